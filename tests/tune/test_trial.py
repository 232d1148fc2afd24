"""One trial read: which steps are measured, and of what its time is the mean."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stoker.recording import KINDS, RankRecord, Recording, Samples, Spans, Steps
from stoker.tune.trial import Span, batches_of_a_step, measured_seconds, plan_span

WINDOW = Span(settle=5, last=10, most=1000)


def recorded(ends: list[float], *, spans: tuple[tuple[str, float, float, int], ...] = ()) -> Recording:
    """Steps that ended then, and spans of a kind between two moments in a step."""
    count = len(ends)
    rank = RankRecord(
        rank=0,
        node="n",
        gpu=None,
        memory=Samples(t=np.empty(0), columns={}),
        spans=Spans(
            kind=np.array([KINDS.index(kind) for kind, *_ in spans], np.uint8),
            start=np.array([start for _, start, _, _ in spans]),
            end=np.array([end for _, _, end, _ in spans]),
            step=np.array([step for *_, step in spans], np.int64),
            bytes=np.zeros(len(spans), np.int64),
        ),
        steps=Steps(
            number=np.arange(count),
            start=np.array([0.0, *ends[:-1]]),
            end=np.array(ends),
            tokens=np.full(count, math.nan),
            flops=np.full(count, math.nan),
        ),
    )
    return Recording(title="", wall_s=ends[-1], ended="", ranks=(rank,), gpus=(), hosts=())


SLOWER_LATER = [float(number) for number in range(1, 11)] + [10.0 + 2.0 * number for number in range(1, 11)]


def test_a_setting_that_is_soon_done_is_measured_by_all_of_its_steps() -> None:
    assert measured_seconds(recorded(SLOWER_LATER), WINDOW) == pytest.approx(5 * 25 / 15)


def test_an_evaluation_among_more_steps_leaves_those_that_all_trials_have() -> None:
    for kind in ("evaluation", "checkpoint"):
        mixed = recorded(SLOWER_LATER, spans=((kind, 17.0, 17.5, 13),))
        assert measured_seconds(mixed, WINDOW) == 5.0
    earlier = recorded(SLOWER_LATER, spans=(("evaluation", 2.0, 2.5, 2),))
    assert measured_seconds(earlier, WINDOW) == pytest.approx(5 * 25 / 15)


def test_steps_of_the_next_epoch_are_not_counted() -> None:
    within = Span(settle=5, last=10, most=12)
    assert measured_seconds(recorded(SLOWER_LATER), within) == pytest.approx(5 * 9 / 7)


def test_a_window_that_was_not_finished_took_for_ever() -> None:
    assert measured_seconds(recorded(SLOWER_LATER[:9]), WINDOW) == math.inf


def test_queues_are_emptied_before_the_last_step_that_is_not_measured() -> None:
    data = tuple(("data", 0.1 + n / 2, 0.2 + n / 2, n // 2) for n in range(40))
    recording = recorded([float(n) for n in range(1, 21)], spans=data)
    assert batches_of_a_step(recording) == 2
    span = plan_span(recording, queued=4, epoch=100, seconds=8.0)
    assert span == Span(settle=5, last=13, empty_at=8, most=46)


def test_short_epochs_empty_their_queues_themselves() -> None:
    recording = recorded([float(n) for n in range(1, 41)])
    span = plan_span(recording, queued=4, epoch=4, seconds=10.0)
    assert span == Span(settle=5, last=13)
