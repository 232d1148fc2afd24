"""Turns of `load_tokens.py` beside plain windows: packings, blends, and a DataLoader asked for whole batches.

The same tokens as documents of lognormal lengths (a median of 400, at most 20,000). A packing counts the
cells of `input_ids`, padding and all, and apart from that the share of them that are tokens of documents.
"""

from __future__ import annotations

import os
from pathlib import Path


def make_documents(folder: Path) -> None:
    """The corpus once more under other names, cut into documents; in two halves, for a blend."""
    import numpy as np

    from stoker.formats import megatron
    from stoker.prepare.check import adopt

    rng = np.random.default_rng(1)
    for number, path in enumerate(sorted((folder / "stoker").glob("*.bin"))):
        for name in ("documents", f"half{number % 2}"):
            (folder / name).mkdir(exist_ok=True)
            target = folder / name / path.name
            os.link(path, target)
            target.with_suffix(".idx").write_bytes(
                megatron.index_bytes(_lengths(rng, path.stat().st_size // 2), dtype=np.dtype("<u2"))
            )
    for name in ("documents", "half0", "half1"):
        if (folder / name).exists():
            adopt(str(folder / name))


def _lengths(rng, tokens: int):
    import numpy as np

    lengths = np.clip(rng.lognormal(6, 1, tokens // 300 + 8).astype(np.int64), 8, 20_000)
    lengths = lengths[: np.searchsorted(np.cumsum(lengths), tokens)]
    return np.append(lengths, tokens - lengths.sum())


def packed(folder: Path, options: dict):
    import stoker

    loader = stoker.Loader(folder / "documents", **options)
    while True:
        yield from loader


def blend(folder: Path, options: dict):
    import stoker

    halves = [path for path in (folder / "half0", folder / "half1") if path.exists()]
    loader = stoker.Loader(halves, weights=(0.7, 0.3)[: len(halves)], **options)
    while True:
        yield from loader


def dataloader_batched(folder: Path, options: dict):
    """A Dataset with `__getitems__`: one gather for a batch, no collate of single samples."""
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, Dataset

    seq_len = options["seq_len"]

    class Windows(Dataset):
        def __init__(self) -> None:
            self.ids = [np.memmap(path, np.uint16, "r") for path in sorted((folder / "stoker").glob("*.bin"))]
            self.ends = np.cumsum([(len(ids) - 1) // seq_len for ids in self.ids])

        def __len__(self) -> int:
            return int(self.ends[-1])

        def __getitems__(self, indices: list[int]):
            batch = np.empty((len(indices), seq_len + 1), np.int64)
            shards = np.searchsorted(self.ends, indices, side="right").tolist()
            for row, (index, shard) in enumerate(zip(indices, shards, strict=True)):
                start = (index - (int(self.ends[shard - 1]) if shard else 0)) * seq_len
                batch[row] = self.ids[shard][start : start + seq_len + 1]
            wide = torch.from_numpy(batch)
            return wide[:, :-1], wide[:, 1:]

    loader = DataLoader(
        Windows(),
        batch_size=options["batch_size"],
        shuffle=True,
        num_workers=options["workers"],
        collate_fn=lambda batch: batch,
    )
    while True:
        yield from loader


def turns(batch_size: int, seq_len: int) -> dict:
    shape = {"batch_size": batch_size, "seq_len": seq_len}
    return {
        "DataLoader, batched": (dataloader_batched, {**shape, "workers": 0}),
        "DataLoader, batched, 2 workers": (dataloader_batched, {**shape, "workers": 2}),
        "stoker best-fit": (packed, {**shape, "packing": "best-fit"}),
        "stoker pad": (packed, {**shape, "packing": "pad"}),
        "stoker buckets": (packed, {**shape, "packing": "buckets"}),
        "stoker documents": (packed, {**shape, "documents": True}),
        "stoker blend": (blend, shape),
        "stoker blend, best-fit": (blend, {**shape, "packing": "best-fit"}),
    }


def counted(batches, count: int) -> tuple[int, int]:
    """Cells and tokens of documents in so many batches that are only looked at, not timed."""
    cells = tokens = 0
    for _ in range(count):
        batch = next(batches)
        ids = batch["input_ids"]
        cells += ids.numel()
        if "attention_mask" in batch:
            tokens += int(batch["attention_mask"].sum())
        else:
            tokens += int((batch["labels"] >= 0).sum())
    return cells, tokens
