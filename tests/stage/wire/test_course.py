"""How long a transfer that fails is tried again."""

from __future__ import annotations

import threading

import pytest

from stoker.stage.origins.address import AddressBook
from stoker.stage.wire import transfer
from stoker.stage.wire.client import Client
from stoker.stage.wire.hosts import Hosts
from stoker.stage.wire.http import Address, NetworkError
from stoker.stage.wire.pace import Bucket, Pace
from stoker.stage.wire.transfer import Course, Means


class Clock:
    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(transfer, "time", clock)
    return clock


@pytest.fixture
def course(clock: Clock) -> Course:
    means = Means(
        client=Client(),
        book=AddressBook(),
        hosts=Hosts(lambda: Pace(memory_bytes=1 << 20, now=clock.now_s)),
        bucket=Bucket(rate=0),
        patience_s=300.0,
        wake=lambda: None,
        lock=threading.RLock(),
    )
    return Course("x", means, means.hosts.of(Address(url="/x")))


def test_a_job_that_was_suspended_tries_again(course: Course, clock: Clock) -> None:
    course.landed(10)
    clock.now_s += 3600
    course.trouble(NetworkError("the server closed the connection long ago"))
    assert course.error is None
    assert course.ready_at > clock.now_s


def test_what_fails_for_too_long_is_given_up(course: Course, clock: Clock) -> None:
    for _ in range(100):
        assert course.error is None
        course.trouble(NetworkError("no route to host"))
        if course.error:
            break
        clock.now_s += 20
    assert "brought nothing for 300 s: no route to host" in str(course.error)
    assert clock.now_s == 1000 + 320


def test_what_came_in_between_counts(course: Course, clock: Clock) -> None:
    for _ in range(100):
        course.trouble(NetworkError("a flapping link"))
        clock.now_s += 200
        course.landed(1 << 20)
    assert course.error is None
