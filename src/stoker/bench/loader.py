"""Loader benchmark: batches of a dataset as fast as they come, without a GPU; and whether that feeds one.

The loader is iterated with nothing else to do: its rate is the ceiling of any training loop. Beside what one
step takes (`step_s`) the figures say whether the loop will wait.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.bench.figures import Bench, Figure, say_seconds
from stoker.formats.sizes import counted
from stoker.load.loader import Loader
from stoker.watch.inside.alone import pss_bytes

WAYS = ("thread", "inline", "process")
_WARM_UPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Iterated:
    """A loader iterated for a while."""

    first_s: float
    batches: int
    seconds: float
    samples: int
    bytes: int
    tokens: int
    cpu_s: float
    memory_bytes: int


def bench_loader(
    dataset: str,
    *,
    options: Mapping[str, Any],  # of a Loader
    ways: Sequence[str] = ("thread", "inline"),
    seconds: float = 3.0,
    most_batches: int = 0,
    step_s: float = 0.0,
    said: Callable[[str, int, int], None] = lambda name, done, of: None,
) -> Bench:
    """A dataset through stoker's loader, in each of the ways that make batches."""
    figures: list[Figure] = []
    best = math.inf
    for number, way in enumerate(ways):
        said(f"workers={way}", number, len(ways))
        done = _iterated(dataset, {**options, "workers": way}, seconds, most_batches)
        took = done.seconds / max(1, done.batches)
        best = min(best, took)
        figures += _figures(way, done, step_s=step_s, took=took)
    return Bench(
        verb="loader",
        of=f"{dataset}, {counted(int(options.get('batch_size', 1)), 'sample')} a batch",
        figures=figures,
        advice=_advice(best, step_s),
        passed=not step_s or best <= step_s,
    )


def _iterated(dataset: str, options: Mapping[str, Any], seconds: float, most_batches: int) -> Iterated:
    begun = time.monotonic()
    with Loader(dataset, **options) as loader:
        batches = _endless(loader)
        first = next(batches)
        first_s = time.monotonic() - begun
        for _ in range(_WARM_UPS):
            next(batches)
        count, began, cpu = 0, time.monotonic(), _cpu_s()
        while time.monotonic() - began < seconds and (not most_batches or count < most_batches):
            next(batches)
            count += 1
        took, used = time.monotonic() - began, _cpu_s() - cpu
        samples, size, tokens = _held(first, int(options["batch_size"]))
        return Iterated(
            first_s=first_s,
            batches=count,
            seconds=took,
            samples=count * samples,
            bytes=count * size,
            tokens=count * tokens,
            cpu_s=used,
            memory_bytes=pss_bytes(os.getpid()),
        )


def _endless(loader: Loader) -> Any:
    while True:
        yield from loader


def _held(batch: Any, rows: int) -> tuple[int, int, int]:
    """Samples, bytes and tokens of a batch, as far as it tells."""
    values = list(batch.values()) if isinstance(batch, dict) else [batch]
    size = sum(getattr(value, "nbytes", 0) or 0 for value in values)
    tokens = batch.get("input_ids") if isinstance(batch, dict) else None
    return rows, int(size), 0 if tokens is None else math.prod(tokens.shape)


def _figures(way: str, done: Iterated, *, step_s: float, took: float) -> list[Figure]:
    limit = (
        "the processor"
        if done.cpu_s >= 0.9 * done.seconds
        else "storage, or threads that wait for one another"
    )
    beside = {
        "a_batch_s": took,
        "cpu_a_batch_s": done.cpu_s / max(1, done.batches),
        "data_bytes_s": done.bytes / max(1e-9, done.seconds),
        "memory_bytes": done.memory_bytes,
    }
    if step_s:
        beside["of_a_step_share"] = took / step_s
    rates = [("samples", done.samples)] + ([("tokens", done.tokens)] if done.tokens else [])
    found = [
        Figure(
            name=f"{what}, workers={way}",
            value=count / max(1e-9, done.seconds),
            unit="1/s",
            limit=limit if what == "samples" else "",
            beside=beside if what == "samples" else {},
        )
        for what, count in rates
    ]
    return [
        *found,
        Figure(name=f"first batch, workers={way}", value=done.first_s, unit="s", better="less"),
    ]


def _advice(took: float, step_s: float) -> list[str]:
    if not step_s:
        return [f"a step longer than {say_seconds(took)} never waits; say yours with --step"]
    if took <= step_s:
        return [f"a batch takes {say_seconds(took)}, a step {say_seconds(step_s)}: the loop will not wait"]
    return [
        f"a batch takes {say_seconds(took)}, a step only {say_seconds(step_s)}: the loop will wait "
        f"{1 - step_s / took:.0%} of the time; prepare more offline, or `stoker bench path` its disk"
    ]


def _cpu_s() -> float:
    """Of this process and those it started."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
