"""All wall time is accounted for, once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.diagnose.ledger import ledger
from stoker.diagnose.thresholds import THRESHOLDS
from stoker.diagnose.timeline import STATES, Timeline, timeline
from stoker.recording import KINDS, RankRecord, Samples, Spans, Steps
from stoker.watch.runs.flat import read_flat

RUNS = Path(__file__).parents[1] / "recordings" / "runs"
Piece = tuple[str, float, float]


def rank_of(pieces: list[Piece], ends: list[float]) -> RankRecord:
    pieces = sorted(pieces, key=lambda piece: piece[1])
    count, steps = len(pieces), np.array(sorted(ends))
    return RankRecord(
        rank=0,
        node="",
        gpu=0,
        spans=Spans(
            kind=np.array([KINDS.index(kind) for kind, _, _ in pieces], np.uint8),
            start=np.array([start for _, start, _ in pieces], float),
            end=np.array([end for _, _, end in pieces], float),
            step=np.full(count, -1, np.int64),
            bytes=np.zeros(count, np.int64),
        ),
        steps=Steps(
            number=np.arange(len(steps)),
            start=np.concatenate([[0.0], steps[:-1]])[: len(steps)],
            end=steps,
            tokens=np.full(len(steps), np.nan),
            flops=np.full(len(steps), np.nan),
        ),
        memory=Samples(t=np.zeros(0), columns={}),
    )


def of(pieces: list[Piece], *, wall_s: float, ends: list[float] | None = None) -> dict[str, float]:
    spent = timeline(rank_of(pieces, ends or []), wall_s=wall_s).seconds()
    return {name: pytest.approx(seconds) for name, seconds in spent.items() if seconds > 0}


_times = st.floats(-2, 40)
_raw = st.tuples(st.sampled_from(KINDS), _times, st.floats(0, 15))
_spans = st.lists(_raw.map(lambda one: (one[0], one[1], one[1] + one[2])), max_size=25)


@given(pieces=_spans, ends=st.lists(st.floats(0, 30), max_size=10), wall_s=st.floats(0, 30))
def test_states_sum_to_the_wall_time(pieces: list[Piece], ends: list[float], wall_s: float) -> None:
    spent = timeline(rank_of(pieces, ends), wall_s=wall_s).seconds()
    assert sum(spent.values()) == pytest.approx(wall_s, rel=1e-3, abs=1e-9)
    assert set(spent) == set(STATES)


@given(pieces=_spans, cuts=st.lists(st.floats(0, 30), max_size=6))
def test_windows_share_out_what_the_whole_has(pieces: list[Piece], cuts: list[float]) -> None:
    whole: Timeline = timeline(rank_of(pieces, []), wall_s=30.0)
    edges = np.array([0.0, *sorted(cuts), 30.0])
    for name, seconds in whole.seconds().items():
        assert whole.within(name, edges[:-1], edges[1:]).sum() == pytest.approx(seconds, abs=1e-6)


def test_a_nested_span_takes_its_time_from_the_one_around_it() -> None:
    assert of([("backward", 0, 10), ("collective", 4, 7)], wall_s=10) == {"compute": 7, "collective": 3}


def test_of_spans_that_cross_the_kind_that_stands_first_wins() -> None:
    assert of([("h2d", 0, 4), ("forward", 2, 6)], wall_s=6) == {"copy": 4, "compute": 2}
    assert of([("forward", 0, 4), ("h2d", 2, 6)], wall_s=6) == {"copy": 4, "compute": 2}


def test_bare_time_is_startup_then_unattributed_and_stalled_where_it_lasts() -> None:
    ends = [3.1, 3.2, 3.3, 3.4, 8.4, 8.5]
    record = rank_of([("compute", 3.0, 3.05)], ends)
    record.steps.start[0] = 3.0
    spent = timeline(record, wall_s=8.5).seconds()
    assert spent["startup"] == pytest.approx(3.0)
    assert spent["stalled"] == pytest.approx(5.0)
    assert spent["unattributed"] == pytest.approx(0.45)


def test_steps_that_go_on_without_any_span_are_no_stall() -> None:
    assert of([], wall_s=20, ends=[i / 2 for i in range(1, 41)]) == {"unattributed": 20}


def test_of_a_process_seen_from_outside_nobody_can_tell_that_it_stands() -> None:
    assert of([], wall_s=60) == {"unattributed": 60}


@pytest.mark.parametrize("name", sorted(path.stem for path in RUNS.glob("*.jsonl")))
def test_both_sides_of_the_ledger_of_every_recording_sum_to_its_wall_time(name: str) -> None:
    recording = read_flat(RUNS / f"{name}.jsonl")
    lines = tuple(timeline(rank, wall_s=recording.wall_s) for rank in recording.ranks)
    for line in lines:
        assert sum(line.seconds().values()) == pytest.approx(recording.wall_s)
    told = ledger(recording, lines)
    assert told is not None
    assert told.busy + sum(told.idle.values()) == pytest.approx(1.0)
    assert min(told.busy, *told.idle.values()) >= 0.0


def test_the_page_shows_every_threshold() -> None:
    page = (RUNS.parents[2] / "docs" / "concepts" / "diagnosis.md").read_text("utf-8")
    for name, threshold in THRESHOLDS.items():
        assert f"| `{name}` | {threshold.value:g} | {threshold.why} |" in page
