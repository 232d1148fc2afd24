"""Warm-up removal: the part of a recording that is judged begins with the first step that is like the others,
and ends where the program is over: what the interpreter then takes apart is nobody's.

Imports, building a model, starting CUDA, loading kernels and compiling are paid once. In a short run they
would make every other share look small: of a 25 s trial with 14 s of start-up, copies that take a fifth of
each step are a twelfth. And a card that stands by while a first step compiles looks like one with a fault.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stoker.diagnose.thresholds import at
from stoker.recording import KINDS, Floats, RankRecord, Recording, Samples, kept

OVER = ("leaving", "the program is over")  # as the watched process says it itself
_MOST_WARM_UPS = 5  # steps


def from_first_step(recording: Recording) -> tuple[Recording, float]:
    """The recording without what came before any rank's first usual step, and when that was."""
    whole = _until_over(recording)
    began_s = min((_begin(rank) for rank in whole.ranks if len(rank.steps.start)), default=0.0)
    if not 0.0 < began_s < whole.wall_s:
        return whole, 0.0
    judged = replace(
        whole,
        wall_s=whole.wall_s - began_s,
        ranks=tuple(_rank(rank, began_s) for rank in whole.ranks),
        gpus=tuple(replace(gpu, samples=gpu.samples.since(began_s)) for gpu in whole.gpus),
        hosts=tuple(replace(host, samples=host.samples.since(began_s)) for host in whole.hosts),
    )
    return judged, began_s


def _until_over(recording: Recording) -> Recording:
    """Without the end of the processes, where all of them said when their program was over."""
    said = [[one.t for one in rank.events if (one.what, one.text) == OVER] for rank in recording.ranks]
    if recording.ended != "exit 0" or not said or not all(said):
        return recording
    over_s = min(max(map(max, said)), recording.wall_s)
    return replace(
        recording,
        wall_s=over_s,
        gpus=tuple(replace(one, samples=_until(one.samples, over_s)) for one in recording.gpus),
        hosts=tuple(replace(one, samples=_until(one.samples, over_s)) for one in recording.hosts),
    )


def _until(samples: Samples, over_s: float) -> Samples:
    return samples.kept(samples.t <= over_s)


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
    late = replace(
        rank,
        spans=kept(rank.spans, rank.spans.end > began_s),
        steps=kept(rank.steps, rank.steps.end > began_s),
        memory=rank.memory.kept(rank.memory.t >= began_s),
    ).moved(-began_s)
    return replace(late, spans=replace(late.spans, start=np.maximum(late.spans.start, 0.0)))
