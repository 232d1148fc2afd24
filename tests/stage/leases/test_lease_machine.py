"""Any order of taking, sleeping, waking and releasing: one lease checks at most, and epochs grow."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stage.leases.holders import fall_silent
from stoker.errors import LeaseLostError
from stoker.stage.leases.lease import Claim, Lease

CLAIMS = 3
TTL_S = 10.0


class Leases(RuleBasedStateMachine):
    """Three observers of one lease, each at its own pace, on a clock that the test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "x.lease"
        self.now = 1000.0
        self.clocks = mock.patch.multiple(time, monotonic=lambda: self.now, clock_gettime=lambda _: self.now)
        self.clocks.start()
        self.claims = [Claim(self.path, ttl_s=TTL_S) for _ in range(CLAIMS)]
        self.held: list[Lease] = []  # all that were ever taken and not released by their holder
        self.renewed_at = 0.0
        self.epoch = 0

    def teardown(self) -> None:
        for lease in self.held:
            lease.release()
        self.clocks.stop()
        assert list(self.folder.iterdir()) == []
        shutil.rmtree(self.folder)

    @rule(number=st.integers(0, CLAIMS - 1))
    def try_take(self, number: int) -> None:
        before = self.good()
        lease = self.claims[number].try_take()
        if lease is None:
            assert before or not self.path.exists()
            return
        fall_silent(lease)  # the rules below are its heart
        if before:
            assert self.now - self.renewed_at >= TTL_S
        assert lease.epoch == (self.epoch + 1 if lease.previous else 1)
        assert not lease.previous_is_dead
        self.epoch, self.renewed_at = lease.epoch, self.now
        self.held.append(lease)

    @rule(number=st.integers(0, CLAIMS - 1), looks=st.integers(2, 6))
    def watch(self, number: int, looks: int) -> None:
        """Long enough, and nobody wakes: its owner is silent."""
        for _ in range(looks):
            self.now += TTL_S / 3
            self.try_take(number)

    @rule(seconds=st.sampled_from([0.1, 2.0, 4.9, 5.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(number=st.integers(0, 9))
    def wake_and_renew(self, number: int) -> None:
        if self.held:
            lease = self.held[number % len(self.held)]
            time.sleep(0.000_01)  # the wall clock, which stamps heartbeats, is not faked
            if lease.renew():
                assert lease is self.held[-1]
                self.renewed_at = self.now

    @rule(number=st.integers(0, 9))
    def wake_and_release(self, number: int) -> None:
        if self.held:
            lease = self.held.pop(number % len(self.held))
            survivors = [other for other in self.good() if other is not lease]
            lease.release()
            assert self.good() == survivors

    @rule()
    def all_but_the_last_taken_are_fenced(self) -> None:
        for lease in self.held[:-1]:
            with pytest.raises(LeaseLostError):
                lease.check()

    @invariant()
    def at_most_the_last_taken_is_good(self) -> None:
        assert self.good() in ([], self.held[-1:])

    def good(self) -> list[Lease]:
        """The leases that check. Looking must not renew them, so it does not look at the clock."""
        return [lease for lease in self.held if not lease.is_over and lease._exists()]


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=40, stateful_step_count=30)
