"""Two runs compared: a difference is said when it is one, and where the time went."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import FED, Run, Shows, record

from stoker.diagnose.compare import Comparison, compare, mann_whitney
from stoker.watch.runs.flat import read_flat

if TYPE_CHECKING:
    from pathlib import Path

    from stoker.recording import Recording


def compared(tmp_path: Path, *, wait: tuple[float, float]) -> Comparison:
    runs = []
    for number, share in enumerate(wait):
        run = Run(label="", shows={"compute": FED, "data": Shows()}, jitter=0.05)
        run.pieces = lambda step, compute, share=share: [("data", share * compute), ("compute", compute)]
        path = record(run, np.random.default_rng(number), tmp_path / f"{number}.jsonl")
        runs.append(read_flat(path))
    return compare(*runs)


def test_a_wait_that_grew_is_slower_and_named(tmp_path: Path) -> None:
    found = compared(tmp_path, wait=(0.01, 0.5))
    assert found.direction == "slower"
    assert found.ratio == pytest.approx(1.5 / 1.01, rel=0.03)
    assert list(found.moved) == ["data"]
    assert found.new == ("data_starvation",)


def test_a_fault_that_went_is_quicker_and_gone(tmp_path: Path) -> None:
    found = compared(tmp_path, wait=(0.5, 0.01))
    assert (found.direction, found.gone) == ("quicker", ("data_starvation",))


def test_two_runs_of_the_same_are_the_same(tmp_path: Path) -> None:
    found = compared(tmp_path, wait=(0.01, 0.01))
    assert (found.direction, found.moved, found.new, found.gone) == ("the same", {}, (), ())


def test_a_long_start_is_no_part_of_a_step(tmp_path: Path) -> None:
    run = Run(label="", shows={"compute": FED, "data": Shows()}, jitter=0.05)
    once = read_flat(record(run, np.random.default_rng(0), tmp_path / "run.jsonl"))
    found = compare(once, later(once, by_s=10 * once.wall_s))
    assert (found.direction, found.moved) == ("the same", {})


def later(run: Recording, *, by_s: float) -> Recording:
    """The same run after a start that took longer."""
    ranks = [
        replace(
            rank,
            spans=replace(rank.spans, start=rank.spans.start + by_s, end=rank.spans.end + by_s),
            steps=replace(rank.steps, start=rank.steps.start + by_s, end=rank.steps.end + by_s),
        )
        for rank in run.ranks
    ]
    cards = [replace(gpu, samples=replace(gpu.samples, t=gpu.samples.t + by_s)) for gpu in run.gpus]
    return replace(run, wall_s=run.wall_s + by_s, ranks=tuple(ranks), gpus=tuple(cards), hosts=())


@given(values=st.lists(st.floats(0.01, 10), min_size=5, max_size=40))
def test_the_same_steps_are_never_a_difference(values: list[float]) -> None:
    assert mann_whitney(np.array(values), np.array(values)) == pytest.approx(1.0)


def test_steps_that_are_all_longer_are_a_difference() -> None:
    assert mann_whitney(np.arange(1.0, 31.0), np.arange(101.0, 131.0)) < 1e-9


def lengths(run: Recording) -> np.ndarray:
    (rank,) = run.ranks
    return np.diff(rank.steps.end)[1:]  # the first two steps warm up


def test_the_interval_is_that_of_the_ratio_of_means_and_middles_are_medians(tmp_path: Path) -> None:
    runs = []
    for number in range(2):
        run = Run(label="", shows={"compute": FED, "data": Shows()}, jitter=0.3)
        run.pieces = lambda step, compute: [("compute", compute)]
        runs.append(read_flat(record(run, np.random.default_rng(number), tmp_path / f"{number}.jsonl")))
    found, (a, b) = compare(*runs), map(lengths, runs)
    assert found.median_s == pytest.approx((np.median(a), np.median(b)))
    assert found.mean_s == pytest.approx((a.mean(), b.mean()))
    assert found.ratio == pytest.approx(b.mean() / a.mean())
    # as the delta method has it: the bootstrap knows nothing of it
    spread = found.ratio * math.hypot(*(one.std() / one.mean() / math.sqrt(len(one)) for one in (a, b)))
    assert found.interval == pytest.approx(
        (found.ratio - 1.96 * spread, found.ratio + 1.96 * spread), abs=0.25 * spread
    )
    assert compare(*runs).interval == found.interval


STEPS = st.lists(st.integers(1, 12), min_size=5, max_size=30).map(lambda drawn: np.array(drawn, float))


@given(a=STEPS, b=STEPS)
def test_the_chance_is_that_of_counting_pairs(a: np.ndarray, b: np.ndarray) -> None:
    wins = float((a[:, None] > b).sum() + (a[:, None] == b).sum() / 2)
    both, size = np.concatenate([a, b]), len(a) + len(b)
    tied = sum(count**3 - count for count in (int((both == one).sum()) for one in set(both.tolist())))
    spread = math.sqrt(len(a) * len(b) / 12 * ((size + 1) - tied / (size * (size - 1))))
    far = abs(wins - len(a) * len(b) / 2)
    assert mann_whitney(a, b) == pytest.approx(math.erfc(far / spread / math.sqrt(2)) if spread else 1.0)


def test_four_steps_say_nothing_and_five_do() -> None:
    few, many = np.arange(1.0, 5.0), np.arange(101.0, 131.0)
    assert mann_whitney(few, many) == mann_whitney(many, few) == 1.0
    assert mann_whitney(np.arange(1.0, 6.0), many) < 0.01
    assert mann_whitney(many, np.arange(1.0, 6.0)) < 0.01
