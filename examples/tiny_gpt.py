"""Train a tiny GPT and split each step into waiting for data, copying it, and computing.

demo.py runs it under `stoker watch`, once for each way of feeding it. The model is real (attention, a
vocabulary, AdamW) and small enough for two CPU cores.

    python examples/tiny_gpt.py tutorial demo-out/corpus-20.jsonl --tokenizer demo-out/tokenizer-2048.json
    python examples/tiny_gpt.py stoker demo-out/corpus --cache demo-out/cache
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

BATCH, LENGTH, WIDTH, LAYERS, HEADS = 8, 128, 64, 2, 4
VOCABULARY = 2048  # small, so that two CPU cores can train on it
WARM_UP_STEPS = 5  # not counted


class TinyGpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        logits = self.head(self.layers(hidden, mask=self.mask, is_causal=True))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


@dataclass
class Steps:
    """What a run of steps cost, in seconds."""

    steps: int = 0
    wait_s: float = 0.0
    copy_s: float = 0.0
    compute_s: float = 0.0
    loss: float = 0.0
    tokens: int = 0

    @property
    def seconds(self) -> float:
        return self.wait_s + self.copy_s + self.compute_s


def train(batches: Iterable[dict], *, seconds: float, device: str) -> Steps:
    """Train for so long; steps for warming up are not counted."""
    torch.manual_seed(0)
    model = TinyGpt().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen, stream, number = Steps(), iter(batches), 0
    while seen.seconds < seconds:
        began = now(device)
        batch = next(stream)
        waited = now(device)
        ids, labels = batch["input_ids"].to(device), batch["labels"].to(device)
        copied = now(device)
        loss = model(ids, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended = now(device)
        number += 1
        if number > WARM_UP_STEPS:
            seen.steps += 1
            seen.wait_s += waited - began
            seen.copy_s += copied - waited
            seen.compute_s += ended - copied
            seen.tokens += int((labels != -100).sum())
            seen.loss = loss.item()
    return seen


def now(device: str) -> float:
    """The clock, once the device has done what it was asked: fair to both ways of feeding it."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


class JsonLines(torch.utils.data.Dataset):
    """As tutorials write it: a line is parsed, tokenised and cut to the model's length when it is needed."""

    def __init__(self, path: Path, tokenizer: Path) -> None:
        from tokenizers import Tokenizer

        self._lines = path.read_text("utf-8").splitlines()
        self._tokenizer = Tokenizer.from_file(str(tokenizer))

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        ids = self._tokenizer.encode(json.loads(self._lines[number])["text"]).ids[: LENGTH + 1]
        row = torch.full((LENGTH + 1,), -100)
        row[: len(ids)] = torch.tensor(ids)
        return {"input_ids": row[:-1].clamp(min=0), "labels": row[1:]}


def tutorial_batches(path: Path, tokenizer: Path) -> Iterator[dict]:
    loader = torch.utils.data.DataLoader(JsonLines(path, tokenizer), batch_size=BATCH, shuffle=True)
    while True:
        yield from loader


def stoker_batches(url: str, cache: Path, device: str) -> Iterator[dict]:
    """The same model fed by stoker, through a cache."""
    import stoker

    with stoker.feed(url, cache=cache, batch_size=BATCH, seq_len=LENGTH, device=device) as feed:
        while True:
            yield from feed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("way", choices=["tutorial", "stoker"])
    parser.add_argument("data", help="a file of JSON lines, or the dataset's folder or URL")
    parser.add_argument("--tokenizer", type=Path, help="for the tutorial's way")
    parser.add_argument("--cache", type=Path, default=Path("demo-out/cache"), help="for stoker's")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--out", type=Path, help="write what the steps cost here, as JSON")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)  # steps this small lose more by waiting for threads than they gain
    if given.way == "tutorial":
        batches = tutorial_batches(Path(given.data), given.tokenizer)
    else:
        batches = stoker_batches(given.data, given.cache, device)
    seen = train(batches, seconds=given.seconds, device=device)
    if given.out:
        given.out.write_text(json.dumps(asdict(seen)))


if __name__ == "__main__":
    main()
