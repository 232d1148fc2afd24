"""Congestion window, rate limit and backoff: how many requests, how large, how fast, when again. No clock.

More requests at once help until the network, the disk or the cores are full, and nobody can know where
that is beforehand: so the number grows while throughput grows, steps back when it does not, and halves
when the server says that it is too much.
"""

from __future__ import annotations

from dataclasses import dataclass

SLICE_BYTES = 1 << 20

START_LANES = 6  # on two cores over loopback: one file is quickest with 3, many with 8
FAR_LANES = 12  # to begin with from afar, where a lane waits most of its time: at 20 ms, see docs/design
MOST_LANES = 64
LANE_BYTES = 2 << 20  # a lane's slice, and what its connection and thread hold

LEAST_RANGE_BYTES = 4 << 20
MOST_RANGE_BYTES = 32 << 20
RANGE_S = 0.5  # a request that lasts half a second makes its own latency (30 ms) small

MOST_SMALL_LANES = 8
_MOST_NEAR = 2
_MOST_FLYING = 4  # with 32 requests each
SMALL_AT_ONCE = 64  # requests for small files under way; more of them meet SlowDown on one prefix of a store

_WINDOW_S = 0.25
_TRIAL_S = 0.1  # some 600 small files
_SECOND_LANE = 1.15  # times as quick, or it is not worth its CPU
_GROWTH = 1.05
_HOLD_S = 5.0
_CALM_S = 1.0  # many requests are refused together: that is one reason to slow down

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 20.0


class Pace:
    """The number of lanes in use and the size of a range, from what landed and what was refused."""

    def __init__(self, *, memory_bytes: int, lanes: int = 0, now: float) -> None:
        self.most = lanes or max(1, min(MOST_LANES, memory_bytes // LANE_BYTES))
        self.lanes = lanes or min(START_LANES, self.most)
        self._fixed, self._is_far = bool(lanes), False
        self._before = self.lanes  # what to go back to if more lanes brought nothing
        self._best = 0.0  # what more lanes must beat; 0 = nothing is known, so try
        self._rate = 0.0
        self._bytes = 0
        self._opened = now
        self._hold_until = self._slowed = now - _CALM_S

    def landed(self, count: int, *, now: float) -> bool:
        """So many bytes have arrived; whether more lanes may work now."""
        self._bytes += count
        if now - self._opened < _WINDOW_S:
            return False
        before = self.lanes
        self._judge(self._bytes / (now - self._opened), now)
        self._bytes, self._opened = 0, now
        return self.lanes > before

    def go_far(self) -> None:
        """The way is long: begin with more lanes, if nothing else is known yet."""
        if not self._fixed and not self._is_far:
            self.lanes = self._before = max(self.lanes, min(self.most, FAR_LANES))
        self._is_far = True

    def slow_down(self, *, now: float) -> None:
        """A request was refused for being one too many, or timed out."""
        if self._fixed or now - self._slowed < _CALM_S:
            return
        self.lanes = self._before = max(1, self.lanes // 2)
        self._slowed, self._hold_until, self._best = now, now + 2 * _HOLD_S, 0.0

    def range_bytes(self, left: int, *, files: int = 1) -> int:
        """How much the next request should ask for of what is left of a file: half a second's worth, and
        towards the end so little that the lanes it shares with so many other files finish together."""
        worth = self._rate / self.lanes * RANGE_S if self._rate else 2 * LEAST_RANGE_BYTES
        lanes = self.lanes // files
        share = left / (2 * lanes) if lanes > 1 else left
        size = min(MOST_RANGE_BYTES, max(LEAST_RANGE_BYTES, min(worth, share)))
        return int(size) // SLICE_BYTES * SLICE_BYTES

    def _judge(self, rate: float, now: float) -> None:
        self._rate = rate
        if self._fixed or now < self._hold_until:
            return
        if rate > self._best * _GROWTH:
            self._best, self._before = rate, self.lanes
            self.lanes = min(self.most, self.lanes + max(1, self.lanes // 2))
        else:
            self.lanes, self._best = self._before, 0.0
            self._hold_until = now + _HOLD_S


class Company:
    """How many lanes bring small files. From a store next door two, if they fly (see `flight`). Else one, or
    two if they turn out to be quicker: they take turns in one interpreter, which is a loss unless writing the
    files takes long. On two cores 4,000 x 64 KiB took 1.0 s to memory with one lane, 1.3 s with two, 1.5 s
    with four; to a disk 2.4 s, 1.8 s and 1.9 s. From afar as many as help to connect and to wait."""

    def __init__(self) -> None:
        self.lanes = 0  # at work
        self._near = 1  # wanted, from next door
        self._alone = -1.0  # bytes a second that one lane brought; below 0 while connections are made
        self._bytes = 0
        self._opened: float | None = None

    def wants_more(self, *, near: bool, flies: bool = False) -> bool:
        if flies:
            return self.lanes < (_MOST_NEAR if near else _MOST_FLYING)
        return self.lanes < (self._near if near else MOST_SMALL_LANES)

    @staticmethod
    def depth(*, near: bool) -> int:
        """How many requests each lane should have under way."""
        return SMALL_AT_ONCE // (_MOST_NEAR if near else MOST_SMALL_LANES)

    def landed(self, count: int, *, now: float) -> bool:
        """So many bytes have arrived; whether one more lane is wanted now."""
        opened = self._opened = now if self._opened is None else self._opened
        self._bytes += count
        if now - opened < _TRIAL_S:
            return False
        rate, self._bytes, self._opened = self._bytes / (now - opened), 0, now
        if self._alone < 0:
            self._alone = 0.0
        elif not self._alone:
            self._alone, self._near = rate, _MOST_NEAR
            return True
        elif self._near == _MOST_NEAR and rate < self._alone * _SECOND_LANE:
            self._near = 1
        return False


@dataclass(kw_only=True, slots=True)
class Bucket:
    """A limit on bytes a second over all lanes: who takes more than there is waits for it to be made good."""

    rate: int
    ready_at: float = 0.0

    def wait_s(self, count: int, *, now: float) -> float:
        """How long to wait before reading so many bytes more."""
        if not self.rate:
            return 0.0
        wait = max(0.0, self.ready_at - now)
        self.ready_at = max(now, self.ready_at) + count / self.rate
        return wait


def backoff_s(tries: int, *, luck: float) -> float:
    """How long to wait after so many failures; `luck` (0 to 1) keeps clients from returning together."""
    return min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(tries, 10)) * (0.5 + luck / 2)
