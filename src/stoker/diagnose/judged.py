"""The part of a recording that is judged: from the first step on that is like the others.

Imports, building a model, starting CUDA, loading kernels and compiling are paid once. In a short run they
would make every other share look small: of a 25 s trial with 14 s of start-up, copies that take a fifth of
each step are a twelfth. And a card that stands by while a first step compiles looks like one with a fault.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stoker.diagnose.thresholds import at
from stoker.recording import KINDS, Floats, RankRecord, Recording, Samples, Steps

_MOST_WARM_UPS = 5  # steps


def from_first_step(recording: Recording) -> tuple[Recording, float]:
    """The recording without what came before any rank's first usual step, and when that was."""
    began_s = min((_begin(rank) for rank in recording.ranks if len(rank.steps.start)), default=0.0)
    if not 0.0 < began_s < recording.wall_s:
        return recording, 0.0
    return (
        replace(
            recording,
            wall_s=recording.wall_s - began_s,
            ranks=tuple(_rank(rank, began_s) for rank in recording.ranks),
            gpus=tuple(replace(gpu, samples=_samples(gpu.samples, began_s)) for gpu in recording.gpus),
            hosts=tuple(replace(host, samples=_samples(host.samples, began_s)) for host in recording.hosts),
        ),
        began_s,
    )


def _begin(rank: RankRecord) -> float:
    """When the first step began that was no warm-up."""
    took: Floats = rank.steps.end - rank.steps.start
    usual = float(np.median(took))
    for number in range(min(_MOST_WARM_UPS, len(took) // 4)):
        is_long = took[number] > at("warm_up") * usual
        if not is_long or _data_s(rank, number) > took[number] / 2:  # a late batch is no warm-up
            return float(rank.steps.start[number])
    return float(rank.steps.start[min(_MOST_WARM_UPS, len(took) // 4)])


def _data_s(rank: RankRecord, number: int) -> float:
    """Seconds of a step that the loop waited for data."""
    spans, steps = rank.spans, rank.steps
    mine = spans.kind == KINDS.index("data")
    start = np.maximum(spans.start[mine], steps.start[number])
    end = np.minimum(spans.end[mine], steps.end[number])
    return float(np.maximum(end - start, 0.0).sum())


def _rank(rank: RankRecord, began_s: float) -> RankRecord:
    spans, steps = rank.spans, _steps(rank.steps, began_s)
    kept: NDArray[np.bool_] = spans.end > began_s
    return replace(
        rank,
        spans=replace(
            spans,
            kind=spans.kind[kept],
            start=np.maximum(spans.start[kept] - began_s, 0.0),
            end=spans.end[kept] - began_s,
            step=spans.step[kept],
            bytes=spans.bytes[kept],
        ),
        steps=replace(steps, start=steps.start - began_s, end=steps.end - began_s),
        memory=_samples(rank.memory, began_s),
        events=tuple(replace(event, t=event.t - began_s) for event in rank.events),
    )


def _steps(steps: Steps, began_s: float) -> Steps:
    kept: NDArray[np.bool_] = steps.end > began_s
    return Steps(
        number=steps.number[kept],
        start=steps.start[kept],
        end=steps.end[kept],
        tokens=steps.tokens[kept],
        flops=steps.flops[kept],
    )


def _samples(samples: Samples, began_s: float) -> Samples:
    kept: NDArray[np.bool_] = samples.t >= began_s
    columns = {name: column[kept] for name, column in samples.columns.items()}
    return Samples(t=samples.t[kept] - began_s, columns=columns)
