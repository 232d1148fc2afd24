"""What a what-if run measured."""

from __future__ import annotations

import numpy as np

from stoker.recording import RankRecord, Recording, Samples, Spans, Steps
from stoker.watch.runs.ceiling import ceiling


def recording(step_s: list[float], windows: list[tuple[bool, float]], **loader: int) -> Recording:
    ends = np.cumsum(step_s)
    unknown = np.full(len(ends), np.nan)
    steps = Steps(number=np.arange(len(ends)), start=ends - step_s, end=ends, tokens=unknown, flops=unknown)
    none = np.empty(0)
    spans = Spans(
        kind=none.astype(np.uint8), start=none, end=none, step=none.astype(int), bytes=none.astype(int)
    )
    rank = RankRecord(
        rank=0, node="a", gpu=None, spans=spans, steps=steps, memory=Samples(t=none, columns={})
    )
    facts = {"what_if": [{"cached": cached, "at": at} for cached, at in windows], "loader": loader}
    return Recording(
        title="", wall_s=float(ends[-1]), ended="exit 0", ranks=(rank,), gpus=(), hosts=(), facts=facts
    )


def test_the_ceiling_is_the_ratio_of_step_times() -> None:
    run = recording([0.4] * 10 + [0.1] * 10 + [0.4] * 10, [(False, 0.0), (True, 4.0), (False, 5.0)])
    found = ceiling(run)
    assert found is not None
    assert round(found.speedup, 6) == 4.0


def test_batches_the_workers_had_ready_do_not_count() -> None:
    ready = [0.1] * 4 + [0.4] * 6
    run = recording(
        [0.4] * 10 + [0.1] * 10 + ready,
        [(False, 0.0), (True, 4.0), (False, 5.0)],
        num_workers=2,
        prefetch_factor=2,
    )
    found = ceiling(run)
    assert found is not None
    assert round(found.real_step_s, 6) == 0.4


def test_one_kind_of_window_measures_nothing() -> None:
    assert ceiling(recording([0.4] * 10, [(False, 0.0)])) is None
    assert ceiling(recording([0.4] * 10, [])) is None
