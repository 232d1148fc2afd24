"""One summary for every surface: it accounts for all time, names the late rank, invents no number."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import STARVED, flat, job

from stoker.diagnose.timeline import STATES
from stoker.recording import Recording
from stoker.report.series import bin_edges, series_of
from stoker.report.summary import Summary, summarise

readings = st.lists(st.floats(0, 1e6) | st.just(math.nan), max_size=300)


def test_states_of_every_rank_sum_to_the_wall_time(summary: Summary) -> None:
    for rank in summary.ranks:
        assert sum(rank.state_s) == pytest.approx(summary.wall_s, rel=1e-3)
    assert sum(summary.state_s) == pytest.approx(summary.wall_s, rel=1e-3)


def test_every_column_of_the_timeline_sums_to_one(summary: Summary) -> None:
    assert summary.over_time.share.sum(axis=0) == pytest.approx(1.0)


def test_the_timeline_and_the_totals_say_the_same(summary: Summary) -> None:
    widths = np.diff(summary.over_time.edges)
    assert summary.over_time.share @ widths == pytest.approx(np.array(summary.state_s), abs=1e-6)


def test_a_mean_step_is_as_long_as_steps_are(summary: Summary) -> None:
    rank = summary.ranks[0]
    assert sum(summary.step_state_s) == pytest.approx(float(rank.step_s.mean()), rel=1e-3)


def test_the_late_rank_is_the_one_that_others_wait_for(summary: Summary) -> None:
    latest = max(summary.ranks, key=lambda rank: rank.late_s)
    assert latest.rank == 3
    waits = [rank.state_s[STATES.index("collective")] for rank in summary.ranks]
    assert min(waits) == waits[3]


def test_rates_of_ranks_add_up(summary: Summary) -> None:
    assert summary.steps.tokens_per_s == pytest.approx(sum(rank.steps.tokens_per_s for rank in summary.ranks))


def test_a_finding_costs_what_its_gpu_time_costs(summary: Summary) -> None:
    assert summary.dollars(STARVED) == pytest.approx(STARVED.gpu_seconds / 3600 * 2.5)


def test_without_a_price_nothing_costs_money(recording: Recording) -> None:
    assert summarise(recording, [STARVED]).dollars(STARVED) is None


def test_a_run_of_which_nothing_was_seen_has_a_summary() -> None:
    nothing = Recording(title="", wall_s=0.0, ended="", ranks=(), gpus=(), hosts=())
    summary = summarise(nothing, [])
    assert summary.verdict is None
    assert summary.steps.count == 0
    assert math.isnan(summary.steps.median_s)


def test_a_rank_without_steps_is_neither_late_nor_in_the_way() -> None:
    recording = job(ranks=2, steps=10, late=None)
    silent = replace(recording.ranks[1], steps=job(ranks=1, steps=0, late=None).ranks[0].steps)
    summary = summarise(replace(recording, ranks=(recording.ranks[0], silent)), [])
    assert math.isnan(summary.ranks[1].late_s)
    assert summary.steps.count == 10


@pytest.mark.parametrize("name", ["fed", "starved_cpu", "hang_spin"])
def test_recordings_of_a_real_card_are_summarised(name: str) -> None:
    summary = summarise(flat(name), [])
    assert sum(summary.state_s) == pytest.approx(summary.wall_s, rel=1e-3)
    assert {series.name for series in summary.gpus[0].series} >= {"power", "utilization", "tensor_active"}


@given(values=readings, bins=st.integers(1, 40))
def test_thinning_keeps_extremes_and_never_adds_points(values: list[float], bins: int) -> None:
    t, column = np.linspace(0, 10, len(values)), np.array(values, dtype=np.float64)
    thin = series_of("power", unit="watts", t=t, values=column, edges=bin_edges(10.0, bins))
    known = column[np.isfinite(column)]
    assert len(thin.t) <= min(bins, len(known))
    assert (np.diff(thin.t) > 0).all()
    if len(known):
        assert thin.low.min() == known.min()
        assert thin.high.max() == known.max()
        assert thin.last == known[-1]
    else:
        assert math.isnan(thin.average)
