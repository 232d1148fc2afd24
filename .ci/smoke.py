"""What an installed stoker must do in an empty environment: doctor, and a small prepare → load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import stoker

TEXTS = [f"document {number} says {number * number} and no more " * 40 for number in range(60)]


def main() -> None:
    if Path(sys.prefix) not in Path(stoker.__file__).parents:
        raise SystemExit(f"error: {stoker.__file__} is not what was installed into {sys.prefix}")
    json.loads(ran("doctor", "--json", codes=(0, 1)))  # 1: this machine has a fault; doctor works
    write_inputs()
    ran("prepare", "texts.jsonl", "--tokenizer", "tokenizer.json", "--out", "corpus", "--work", "work")
    ran("prepare", "verify", "corpus")
    whole, first = read(0), read(0)[:3]
    rest = read(3)
    if len(whole) < 5 or not all(map(np.array_equal, whole, [*first, *rest])) or len(rest) + 3 != len(whole):
        raise SystemExit(
            "error: a loader that went on did not give the batches of one that was not disturbed"
        )
    print(f"doctor answers; {len(whole)} batches, the same after a stop")


def ran(*arguments: str, codes: tuple[int, ...] = (0,)) -> str:
    command = [str(Path(sys.executable).parent / "stoker"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in codes:
        raise SystemExit(f"error: {' '.join(command)} ended with {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def write_inputs() -> None:
    Path("texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save("tokenizer.json")


def read(after: int) -> list[np.ndarray]:
    """The batches of an epoch; of another loader that goes on after some, those that are left."""
    options = {"batch_size": 4, "seq_len": 64, "output": "numpy"}
    with stoker.Loader("corpus", **options) as loader:
        batches = iter(loader)
        for _ in range(after):
            next(batches)
        state = loader.state_dict()
    with stoker.Loader("corpus", **options) as loader:
        loader.load_state_dict(state)
        return [np.array(batch["input_ids"]) for batch in loader]


if __name__ == "__main__":
    main()
