"""A corpus and a tokenizer without a download: the text of this Python installation.

    python examples/corpus.py FOLDER [--megabytes N]

writes FOLDER/corpus-N.jsonl, one source file a document, and FOLDER/tokenizer-32000.json, a byte-level BPE
trained on the start of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

END = "<|endoftext|>"
_TRAINING_CHARS = 20_000_000


def python_texts() -> Iterator[str]:
    """The text of every source file that this interpreter can import, in a fixed order, each once."""
    roots = {Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platlib")}
    paths = {path for root in roots for path in root.rglob("*.py")}
    seen: set[int] = set()
    for path in sorted(paths):
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip() and hash(text) not in seen:
            seen.add(hash(text))
            yield text


def write_corpus(path: Path, *, megabytes: float) -> int:
    """Write about that much JSONL; a short installation is gone through again, each document marked with
    its round so that no two are alike. Returns the bytes written."""
    written = 0
    with path.open("wb") as file:
        for turn in itertools.count():
            for number, text in enumerate(python_texts()):
                marked = f"# round {turn}\n{text}" if turn else text
                line = json.dumps({"id": f"{turn}-{number}", "text": marked}, ensure_ascii=False).encode()
                written += file.write(line + b"\n")
                if written >= megabytes * 1e6:
                    return written
    return written


def train_tokenizer(corpus: Path, path: Path, *, vocabulary: int = 32_000) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_start_of(corpus), trainer)
    tokenizer.save(str(path))


def _start_of(corpus: Path) -> Iterator[str]:
    left = _TRAINING_CHARS
    with corpus.open(encoding="utf-8") as file:
        for line in file:
            text = json.loads(line)["text"]
            yield text
            left -= len(text)
            if left < 0:
                return


def make(folder: Path, *, megabytes: float, vocabulary: int = 32_000) -> tuple[Path, Path]:
    """The corpus and the tokenizer, made unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus, tokenizer = folder / f"corpus-{megabytes:g}.jsonl", folder / f"tokenizer-{vocabulary}.json"
    if not corpus.exists():
        write_corpus(corpus, megabytes=megabytes)
    if not tokenizer.exists():
        train_tokenizer(corpus, tokenizer, vocabulary=vocabulary)
    return corpus, tokenizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=float, default=30)
    options = parser.parse_args()
    print(*make(options.folder, megabytes=options.megabytes), sep="\n", file=sys.stdout)
