"""The search over a made-up machine: what it chooses, what it claims, and when it stops."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

import pytest

from stoker.findings import Finding
from stoker.tune.candidates import Setting
from stoker.tune.search import Outcome, Search
from stoker.tune.seen import Limits, Seen
from stoker.tune.trial import Trial

SEEN = Seen(
    findings=(Finding(kind="data_starvation", summary="late", cause="cpu"),),
    wait=0.6,
    site={"file": "t.py", "line": 1, "text": "", "through": []},
    settings={"num_workers": 0},
    limits=Limits(cores=4),
    card=True,
)


def searched(
    seconds: Callable[[Setting], float],
    *,
    seen: Seen = SEEN,
    until: float = math.inf,
    numerics: bool = False,
    losses: Callable[[Setting], tuple[float, ...]] = lambda setting: (1.0, 0.9),
) -> Outcome:
    def run(setting: Setting, lost_s: float) -> Trial:
        assert setting or lost_s == math.inf  # the unchanged program is never given up
        took = seconds(setting)
        failure = "" if math.isfinite(took) else "MemoryError: no room"
        return Trial(setting=setting, seconds=took, failure=failure, losses=losses(setting), took_s=0.0)

    search = Search(run, seen, until=until, each_s=1.0, numerics=numerics)
    return search.search(plain=run({}, math.inf))


def by_workers(setting: Setting) -> float:
    return {0: 10.0, 1: 8.0, 2: 5.0, 4: 4.95}[int(setting.get("num_workers") or 0)]


def test_the_fewest_workers_that_are_as_fast_are_chosen() -> None:
    found = searched(by_workers)
    assert found.best == {"num_workers": 2}
    assert found.gain
    assert found.gain.proven
    assert abs(found.gain.times - 2.0) < 0.01
    assert found.losses == "same"


def test_a_machine_that_grows_slower_all_the_time_fools_nobody() -> None:
    drift = [1.0]

    def slower(setting: Setting) -> float:
        drift[0] *= 1.05
        return 10.0 * drift[0]

    assert searched(slower).best == {}


def test_noise_alone_finds_nothing_better() -> None:
    draw = random.Random(3)
    found = [searched(lambda setting: 10.0 * draw.lognormvariate(0, 0.03)).best for _ in range(100)]
    assert sum(bool(one) for one in found) <= 5


def test_a_setting_that_fails_is_a_finding_and_not_the_end() -> None:
    found = searched(lambda setting: math.inf if setting.get("num_workers") == 4 else by_workers(setting))
    assert found.best == {"num_workers": 2}
    assert "MemoryError" in next(one.note for one in found.tried if one.setting["num_workers"] == 4)


def test_a_setting_that_changes_the_losses_needs_the_user_s_word() -> None:
    def losses(setting: Setting) -> tuple[float, ...]:
        return (1.0, 0.5) if setting else (1.0, 0.9)

    assert searched(by_workers, losses=losses).best == {}
    assert searched(by_workers, losses=losses, numerics=True).best == {"num_workers": 2}


def test_where_there_is_nothing_to_try_nothing_is_run() -> None:
    healthy = Seen(findings=(Finding(kind="healthy", summary="fine"),), card=True)
    assert searched(by_workers, seen=healthy).trials == ()


def test_without_time_no_candidate_is_tried() -> None:
    found = searched(by_workers, until=time.monotonic())
    assert found.best == {}
    assert "time" in found.why


def test_the_first_candidate_is_tried_where_its_proof_may_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an H200: 52 s were left of 66 when the first window had been judged; a start took some eight."""
    clock = [13.5]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def run(setting: Setting, lost_s: float) -> Trial:
        seconds = 1.5 / (1 + int(setting.get("num_workers") or 0))
        clock[0] += 8.0 + seconds
        return Trial(setting=setting, seconds=seconds, losses=(1.0,), took_s=8.0 + seconds)

    plain = Trial(setting={}, seconds=1.5, losses=(1.0,))
    found = Search(run, SEEN, until=66.0, each_s=9.5, numerics=False).search(plain=plain)
    assert found.trials[0].setting["num_workers"]
    assert len(found.tried) == 1
    assert not found.best
    assert "times as fast, but only 2 of 3 pairs fitted" in found.why
    assert clock[0] <= 66.0


def test_a_search_without_time_says_how_much_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 50.0)
    found = Search(lambda *told: Trial(setting={}), SEEN, until=66.0, each_s=9.5, numerics=False)
    why = found.search(plain=Trial(setting={}, seconds=1.5)).why
    assert why == "there was no time for one candidate, a trial takes 10 s: give 1 minute more (--minutes)"


def test_a_gain_that_there_was_no_time_to_prove_is_not_called_nothing() -> None:
    left = [9]  # trials, then the time is over

    def seconds(setting: Setting) -> float:
        left[0] -= 1
        if left[0] <= 0:
            search_over[0] = True
        return 10.0 / (1 + int(setting.get("num_workers") or 0))

    search_over = [False]

    def run(setting: Setting, lost_s: float) -> Trial:
        return Trial(setting=setting, seconds=seconds(setting), losses=(1.0,), took_s=0.0)

    search = Search(run, SEEN, until=math.inf, each_s=1.0, numerics=False)
    search._has_time = lambda **kept: not search_over[0]  # type: ignore[method-assign]
    found = search.search(plain=run({}, math.inf))
    assert not found.best
    assert found.gain
    assert found.gain.pairs < 3
    assert "looked 5.00 times as fast" in found.why
    assert "--minutes" in found.why
