"""Checkpoint benchmark: how long a save stalls the loop, takes to be durable, and to come back, in a folder.

The state is made up: weights of a size, in tensors of a few megabytes as layers have. The folder is one of
our own inside of the one that was named, and goes away with its checkpoints, also after Ctrl-C.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.bench.figures import Bench, Figure
from stoker.checkpoint.checkpointer import Checkpointer
from stoker.errors import StorageError, UsageError, require
from stoker.formats.sizes import counted, say_size

if TYPE_CHECKING:
    import torch

_TENSOR_BYTES = 8 << 20
_KEPT = 2  # checkpoints on the disk at once, and one that is being written


def bench_checkpoint(
    folder: Path,
    *,
    size: int = 1 << 30,
    saves: int = 3,
    said: Callable[[str, int, int], None] = lambda name, done, of: None,
) -> Bench:
    """Save a state of `size` bytes a few times and restore it once, verified."""
    require("torch", extra="torch")
    _check_room(folder, size)
    model = _model(size)
    own = Path(tempfile.mkdtemp(prefix=".stoker-bench-", dir=folder))
    stalls, durables = list[float](), list[float]()
    try:
        with Checkpointer(own, keep=_KEPT) as saver:
            for number in range(saves + 1):  # the first makes the buffers
                said("saving", number, saves + 2)
                stall, durable = _saved(saver, number, model)
                stalls.append(stall)
                durables.append(durable)
        said("restoring", saves + 1, saves + 2)
        restored = _restored(own, model)
    finally:
        shutil.rmtree(own, ignore_errors=True)
    rate = size / statistics.median(durables[1:])
    return Bench(
        verb="checkpoint",
        of=f"{folder}, {say_size(size)} in {counted(len(model), 'tensor')}",
        figures=[
            _seconds("stall of the loop", stalls[1:], "the copy in memory"),
            _seconds("until durable", durables[1:], "hashing, writing and syncing"),
            Figure(
                name="written",
                value=rate,
                unit="B/s",
                limit="see `stoker bench path` for the disk's own rate",
            ),
            Figure(name="verified restore", value=size / restored, unit="B/s", limit="reading and hashing"),
            Figure(name="first stall", value=stalls[0], unit="s", better="less", limit="buffers made once"),
        ],
        measured={"checkpoint": float(size)},
    )


def _check_room(folder: Path, size: int) -> None:
    if not folder.is_dir():
        raise StorageError(f"{folder} is no folder", hint="name the folder that checkpoints will go to")
    if size < 4096:
        raise UsageError(
            f"a state of {size} bytes measures nothing", hint="give --size as of your model: 16GiB"
        )
    stat = os.statvfs(folder)
    free, wanted = stat.f_bavail * stat.f_frsize, (_KEPT + 1) * size + (1 << 30)
    if free < wanted:
        raise StorageError(
            f"{folder} has {say_size(free)} free, and {say_size(wanted)} are needed",
            hint="give a smaller --size, or another folder",
        )


def _model(size: int) -> dict[str, torch.Tensor]:
    import torch

    count = max(1, size // _TENSOR_BYTES)
    each = size // count // 4
    return {f"layer.{number}.weight": torch.rand(each) for number in range(count)}


def _saved(saver: Checkpointer, step: int, model: dict[str, torch.Tensor]) -> tuple[float, float]:
    for tensor in model.values():
        tensor.add_(1.0)  # what is the same as before might be told apart from it
    begun = time.monotonic()
    saver.save(step, model=model)
    stalled = time.monotonic()
    saver.wait()
    return stalled - begun, time.monotonic() - begun


def _restored(folder: Path, model: dict[str, torch.Tensor]) -> float:
    begun = time.monotonic()
    with Checkpointer(folder) as saver:
        saver.restore(model=model)
    return time.monotonic() - begun


def _seconds(name: str, values: list[float], limit: str) -> Figure:
    beside = {"least_s": min(values), "most_s": max(values)}
    return Figure(
        name=name, value=statistics.median(values), unit="s", better="less", limit=limit, beside=beside
    )
