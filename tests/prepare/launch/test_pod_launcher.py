"""Pods share the tasks of a stage by their numbers, and wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from stoker.errors import TaskError
from stoker.prepare.launch.ledger import Ledger
from stoker.prepare.launch.pods import Pods
from stoker.world import World


class Pool:
    """Does every task at once, except one that fails."""

    def __init__(self, *, fails: int = -1) -> None:
        self.ran: list[int] = []
        self._fails = fails

    def run(self, ledger: Ledger, stage: str, numbers: Sequence[int], on_done: Callable[[int], None]) -> None:
        for number in numbers:
            self.ran.append(number)
            if number == self._fails:
                ledger.fail(stage, number, TaskError("no coal"))
            else:
                ledger.complete(stage, number, result={})
            on_done(number)


def run_two(ledger: Ledger, pools: list[Pool], numbers: Sequence[int]) -> list[list[int]]:
    """Two pods at once; what each was told of."""
    told: list[list[int]] = [[], []]
    pods = [
        Pods(pool, World(rank=n, size=2, node=n, nodes=2))  # type: ignore[arg-type]  # a pool that is quick
        for n, pool in enumerate(pools)
    ]
    threads = [
        threading.Thread(target=pod.run, args=(ledger, "map", numbers, told[n].append))
        for n, pod in enumerate(pods)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return told


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(folder=tmp_path, plan="plan")


def test_each_task_is_run_by_one_pod_and_all_hear_of_it(ledger: Ledger) -> None:
    pools = [Pool(), Pool()]
    told = run_two(ledger, pools, range(7))
    assert [pool.ran for pool in pools] == [[0, 2, 4, 6], [1, 3, 5]]
    assert [sorted(each) for each in told] == [list(range(7))] * 2


def test_a_failure_is_waited_for_by_nobody(ledger: Ledger) -> None:
    told = run_two(ledger, [Pool(), Pool(fails=3)], range(6))
    assert 3 in told[0]
    assert ledger.failure("map", 3)


def test_a_pod_that_comes_back_tries_its_own_failures_again(ledger: Ledger) -> None:
    run_two(ledger, [Pool(), Pool(fails=3)], range(4))
    run_two(ledger, [Pool(), Pool()], ledger.missing("map", 4))
    assert ledger.missing("map", 4) == []
    assert ledger.failure("map", 3) is None


def pod(node: int) -> Pods:
    return Pods(Pool(), World(rank=node, size=2, node=node, nodes=2))  # type: ignore[arg-type]  # a quick pool


def test_a_failure_of_an_earlier_try_is_no_reason_to_give_up(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.fail("map", 1, TaskError("no coal"))

    def come_back(seconds: float) -> None:
        pod(1).run_ours(ledger, "map", range(2), lambda number: None)

    monkeypatch.setattr("stoker.prepare.launch.pods.time.sleep", come_back)
    told: list[int] = []
    pod(0).run(ledger, "map", range(2), told.append)
    assert told == [0, 1]
    assert ledger.missing("map", 2) == []


def test_a_pod_that_does_not_come_back_is_not_waited_for_without_end(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.prepare.launch.pods._COME_BACK_S", 0.0)
    ledger.fail("map", 1, TaskError("no coal"))
    told: list[int] = []
    pod(0).run(ledger, "map", range(2), told.append)
    assert told == [0, 1]
