"""The part of a recording that is judged: from the first step on.

Imports, building a model and starting CUDA are paid once. In a short run they would make every other share
look small: of a 25 s trial with 14 s of start-up, copies that take a fifth of each step are a twelfth.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stoker.recording import RankRecord, Recording, Samples


def from_first_step(recording: Recording) -> tuple[Recording, float]:
    """The recording without what came before any rank's first step, and when that was."""
    began_s = min(
        (float(rank.steps.start[0]) for rank in recording.ranks if len(rank.steps.start)), default=0.0
    )
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


def _rank(rank: RankRecord, began_s: float) -> RankRecord:
    spans, steps = rank.spans, rank.steps
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


def _samples(samples: Samples, began_s: float) -> Samples:
    kept: NDArray[np.bool_] = samples.t >= began_s
    columns = {name: column[kept] for name, column in samples.columns.items()}
    return Samples(t=samples.t[kept] - began_s, columns=columns)
