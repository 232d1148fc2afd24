"""Congestion window, rate limit and backoff: how many requests, how large, how fast, when again. No clock.

More requests at once help until the network, the disk or the cores are full, and nobody can know where
that is beforehand: so the number grows while throughput grows, steps back when it does not, and halves
when the server says that it is too much (AIMD). A lane that waits for the first byte of an answer does not
work: for those that wait, as far as is measured, others are added. One of each for every host, see `hosts`.
"""

from __future__ import annotations

from dataclasses import dataclass

SLICE_BYTES = 1 << 20

START_LANES = 6  # on two cores over loopback: one file is quickest with 3, many with 8
MOST_LANES = 64
LANE_BYTES = 2 << 20  # a lane's slice, and what its connection and thread hold

LEAST_RANGE_BYTES = 4 << 20
MOST_RANGE_BYTES = 32 << 20
RANGE_S = 0.5  # a request that lasts half a second makes its own latency (30 ms) small

MOST_SMALL_LANES = 8
_MOST_NEAR = 2
SMALL_AT_ONCE = 64  # requests for small files under way, to begin with
_FAR_AT_ONCE = 512  # once it shows that a store is far; s5cmd has 256, and a first round more to list them
_MOST_FAR = 4  # lanes that fly: one for each bundle, of which none waits for the end of another
MOST_AT_ONCE = 1024  # what a prefix of S3 answers in a second is 5,500
_LEAST_AT_ONCE = 8
_ROUND_S = 0.02
_FADING = 0.8  # a rate is forgotten by and by: lanes that pause between two bundles measure a low one
IDLE_S = 0.003  # a first byte from next door takes less
PATIENT_S = 0.01  # and so long even if the machine has other things to do

_PIECE_S = 0.01
_LEAST_PIECE = 64 << 10
_MOST_PIECE = 256 << 10  # of those that are less than a slice
_YOUNG_BYTES = 4 << 20

_WINDOW_S = 0.25
_TRIAL_S = 0.1  # some 600 small files
_SECOND_LANE = 1.15  # times as quick, or it is not worth its CPU
_GROWTH = 1.05
_HOLD_S = 5.0
_USUAL_READ_S = 0.04  # of a range; a guess until some were read
_MEMORY = 0.2  # how much of an average one sample is
_CALM_S = 1.0  # many requests are refused together: that is one reason to slow down

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 20.0


class Pace:
    """The number of lanes in use and the size of a range, from what landed, what was refused, and how much of
    its time a lane waits for the first byte (Little's law)."""

    def __init__(self, *, memory_bytes: int, lanes: int = 0, now: float) -> None:
        self.most = lanes or max(1, min(MOST_LANES, memory_bytes // LANE_BYTES))
        self._working = lanes or min(START_LANES, self.most)  # lanes that read at the same moment
        self._fixed = bool(lanes)
        self._wait_s, self._read_s = 0.0, _USUAL_READ_S
        self._before = self._working  # what to go back to if more lanes brought nothing
        self._best = 0.0  # what more lanes must beat; 0 = nothing is known, so try
        self._rate = 0.0
        self._bytes = 0
        self._opened = now
        self._hold_until = self._slowed = now - _CALM_S

    @property
    def lanes(self) -> int:
        return self._working if self._fixed else min(self.most, round(self._working * self._stretch))

    @property
    def _stretch(self) -> float:
        return 1 + self._wait_s / self._read_s

    def landed(self, count: int, *, now: float) -> bool:
        """So many bytes have arrived; whether more lanes may work now."""
        self._bytes += count
        if now - self._opened < _WINDOW_S:
            return False
        before = self.lanes
        self._judge(self._bytes / (now - self._opened), now)
        self._bytes, self._opened = 0, now
        return self.lanes > before

    def heard(self, wait_s: float) -> None:
        """An answer began after so long. The first one says how far it is."""
        self._wait_s += (wait_s - self._wait_s) * (_MEMORY if self._wait_s else 1.0)

    def read(self, read_s: float) -> None:
        """The rest of an answer took so long."""
        self._read_s += (max(read_s, 1e-3) - self._read_s) * _MEMORY

    def slow_down(self, *, now: float) -> None:
        """A request was refused for being one too many, or timed out."""
        if self._fixed or now - self._slowed < _CALM_S:
            return
        self._working = self._before = max(1, self.lanes // 2)
        self._slowed, self._hold_until, self._best = now, now + 2 * _HOLD_S, 0.0
        self._wait_s = 0.0  # a server that is overrun answers late: that is no distance

    def range_bytes(self, left: int, *, files: int = 1) -> int:
        """How much the next request should ask for of what is left of a file: half a second's worth, and
        towards the end so little that the lanes it shares with so many other files finish together."""
        stretch = self._stretch
        worth = self._rate / self.lanes * RANGE_S if self._rate else 2 * LEAST_RANGE_BYTES * stretch
        lanes = self.lanes // files
        share = left / (2 * lanes) if lanes > 1 else left
        least = LEAST_RANGE_BYTES * stretch  # from afar the last little ones would only be waited for
        size = min(MOST_RANGE_BYTES, max(least, min(worth, share)))
        return int(size) // SLICE_BYTES * SLICE_BYTES

    def _judge(self, rate: float, now: float) -> None:
        self._rate = rate
        if self._fixed or now < self._hold_until:
            return
        if rate > self._best * _GROWTH:
            self._best, self._before = rate, self._working
            self._working = min(self.most, self._working + max(1, self._working // 2))
        else:
            self._working, self._best = self._before, 0.0
            self._hold_until = now + _HOLD_S


class Window:
    """How many requests for small files are under way: twice what is on its way at the rate that files come
    and the quickest first byte (BBR's rule), so that it doubles each round trip while waiting is all there is
    to do, and stays where the network, the server or the cores are full."""

    def __init__(self, *, most: int = MOST_AT_ONCE) -> None:
        self.most = max(_LEAST_AT_ONCE, min(MOST_AT_ONCE, most))
        self.size = min(SMALL_AT_ONCE, self.most)
        self._quickest = float("inf")  # from a request to the first byte of its answer
        self._rate = 0.0  # files a second
        self._files, self._opened = 0, float("-inf")
        self._slowed = float("-inf")

    @property
    def is_far(self) -> bool:
        return IDLE_S < self._quickest < float("inf")

    def landed(self, count: int, *, first_byte_s: float, now: float) -> None:
        """So many files came, the first of them so long after its request."""
        self._quickest = min(self._quickest, first_byte_s)
        if self._opened == float("-inf"):  # what was waited for came in no time
            self._opened = now
            self._grow(self._far if self.is_far else self.size, now)
            return
        self._files += count
        took_s = now - self._opened
        if took_s >= max(_ROUND_S, self._quickest):
            self._rate = max(self._files / took_s, _FADING * self._rate)
            self._files, self._opened = 0, now
            self._grow(round(2 * self._rate * self._quickest) if self.is_far else 0, now)

    def _grow(self, size: int, now: float) -> None:
        if now - self._slowed > _HOLD_S:
            self.size = min(self.most, max(SMALL_AT_ONCE, size))

    def unanswered(self, *, now: float) -> None:
        """The first requests have had no answer for PATIENT_S: no need for a whole round to know it is
        far."""
        if self._opened == float("-inf"):
            self._grow(self._far, now)

    @property
    def _far(self) -> int:
        return min(self.most, _FAR_AT_ONCE)

    def slow_down(self, *, now: float) -> None:
        """A request was refused for being one too many."""
        if now - self._slowed > _CALM_S:
            self.size, self._slowed = max(_LEAST_AT_ONCE, self.size // 2), now


class Company:
    """How many lanes bring small files. If they fly (see `flight`) two, four from afar. Else from next door
    one, or two if they turn out to be quicker: they take turns in one interpreter, which is a loss unless
    writing the files takes long. On two cores 4,000 x 64 KiB took 1.0 s to memory with one lane, 1.3 s with
    two, 1.5 s with four; to a disk 2.4 s, 1.8 s and 1.9 s. From afar as many as help to connect and to
    wait."""

    def __init__(self) -> None:
        self.lanes = 0  # at work
        self._near = 1  # wanted, from next door
        self._alone = -1.0  # bytes a second that one lane brought; below 0 while connections are made
        self._bytes = 0
        self._opened: float | None = None

    def wants_more(self, *, near: bool, flies: bool = False) -> bool:
        return self.lanes < self._wanted(near=near, flies=flies)

    def depth(self, window: int, *, near: bool, flies: bool = False) -> int:
        """How many requests each lane should have under way, of so many in all."""
        lanes = _MOST_NEAR if near else _MOST_FAR if flies else MOST_SMALL_LANES
        return max(1, window // lanes)

    def _wanted(self, *, near: bool, flies: bool) -> int:
        if flies:
            return _MOST_NEAR if near else _MOST_FAR
        return self._near if near else MOST_SMALL_LANES

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


class Pieces:
    """How much of a slice a lane reads before it is written down: what comes in 10 ms. The rest of that is
    what a kill costs. A whole slice where that comes at once, which takes the least CPU; little at first,
    while a process may not have long to live."""

    def __init__(self) -> None:
        self.size = _LEAST_PIECE
        self._read = 0

    def took(self, count: int, seconds: float) -> None:
        """So many bytes were read in so long."""
        self._read += count
        worth = count / max(seconds, 1e-6) * _PIECE_S
        is_fast = worth >= SLICE_BYTES / 2 and self._read >= _YOUNG_BYTES
        self.size = SLICE_BYTES if is_fast else min(_MOST_PIECE, max(_LEAST_PIECE, _power_of_two(worth)))


def _power_of_two(size: float) -> int:
    return 1 << max(0, int(size).bit_length() - 1)


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
