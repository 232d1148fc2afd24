"""What runs at several batch sizes show: the fixed and the proportional part of a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.recording import RankRecord, Recording, Samples, Spans, Steps
from stoker.watch.runs.batches import Split, Timed, split, timed

SECONDS = st.floats(1e-4, 10)
HALF = st.integers(1, 4096)


def recording(step_s: list[float]) -> Recording:
    ends = np.cumsum(step_s)
    none, unknown = np.empty(0), np.full(len(ends), np.nan)
    steps = Steps(number=np.arange(len(ends)), start=ends - step_s, end=ends, tokens=unknown, flops=unknown)
    spans = Spans(
        kind=none.astype(np.uint8), start=none, end=none, step=none.astype(int), bytes=none.astype(int)
    )
    rank = RankRecord(
        rank=0, node="a", gpu=None, spans=spans, steps=steps, memory=Samples(t=none, columns={})
    )
    return Recording(title="", wall_s=sum(step_s), ended="exit 0", ranks=(rank,), gpus=(), hosts=())


def fitted(step_s: dict[int, float], *, given: int = 8) -> Split:
    found = split(given, [Timed(batch=batch, step_s=time, steps=10) for batch, time in step_s.items()])
    assert found is not None
    return found


@given(fixed=SECONDS, per_sample=SECONDS, half=HALF)
def test_both_parts_of_a_line_are_found_again(fixed: float, per_sample: float, half: int) -> None:
    found = fitted({n * half: fixed + per_sample * n * half for n in (1, 2, 4)}, given=2 * half)
    longest = fixed + per_sample * 4 * half
    assert found.fixed_s == pytest.approx(fixed, abs=1e-9 * longest)
    assert found.per_sample_s * half == pytest.approx(per_sample * half, abs=1e-9 * longest)
    assert found.residual == pytest.approx(0, abs=1e-4)


@given(times=st.tuples(SECONDS, SECONDS, SECONDS), half=HALF)
def test_no_part_is_negative_whatever_was_measured(times: tuple[float, float, float], half: int) -> None:
    found = fitted(dict(zip((half, 2 * half, 4 * half), times, strict=True)), given=2 * half)
    assert found.fixed_s >= 0
    assert found.per_sample_s >= 0
    assert 0 <= found.fixed_share <= 1
    assert found.meaning


@given(fixed=SECONDS, per_sample=SECONDS, drift=st.floats(0, 1), half=HALF)
def test_a_steady_drift_over_the_visits_leaves_the_growth_with_the_batch_alone(
    fixed: float, per_sample: float, drift: float, half: int
) -> None:
    order = (half, 4 * half, 2 * half, 4 * half, half)
    visits = [
        Timed(batch=batch, step_s=fixed + per_sample * batch + drift * number, steps=3 * number + 1)
        for number, batch in enumerate(order)
    ]
    found = split(2 * half, visits)
    assert found is not None
    assert found.per_sample_s == pytest.approx(per_sample, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("step_s", "word"),
    [
        ({4: 1.04, 8: 1.08, 16: 1.16}, "communication"),
        ({4: 0.41, 8: 0.81, 16: 1.61}, "compute"),
        ({4: 1.0, 8: 1.5, 16: 2.5}, "both"),
        ({4: 1.0, 8: 1.0, 16: 3.0}, "line"),
    ],
)
def test_the_meaning_follows_the_fixed_share(step_s: dict[int, float], word: str) -> None:
    assert word in fitted(step_s).meaning


def test_two_sizes_have_a_line_but_no_residual_and_one_has_neither() -> None:
    found = fitted({4: 1.0, 8: 1.5})
    assert (found.residual, found.doubling) == (None, None)
    assert split(8, [Timed(batch=8, step_s=1.0, steps=9)] * 2) is None


def test_the_first_steps_and_a_save_between_two_do_not_count() -> None:
    found = timed(recording([3.0, 2.0, 1.0, 1.0, 1.0] + [0.25] * 10 + [9.0]), batch=4)
    assert found is not None
    assert found.step_s == pytest.approx(0.25)
    assert (found.steps, found.samples_per_s) == (11, pytest.approx(16))


def test_a_run_of_one_step_measures_nothing() -> None:
    assert timed(recording([1.0]), batch=4) is None
