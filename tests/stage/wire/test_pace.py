"""How many requests, how large, how fast, and when again: policies on a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.stage.wire.pace import (
    LEAST_RANGE_BYTES,
    MOST_AT_ONCE,
    MOST_LANES,
    MOST_RANGE_BYTES,
    SLICE_BYTES,
    SMALL_AT_ONCE,
    START_LANES,
    Bucket,
    Company,
    Pace,
    Window,
    backoff_s,
)

MEMORY = 256 << 20


class Network:
    """A network whose throughput depends on the number of lanes, driven in quarters of a second."""

    def __init__(self, pace: Pace, rate: float, *, most: float) -> None:
        self.pace, self.rate, self.most, self.now = pace, rate, most, 0.0

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            self.pace.landed(int(min(self.most, self.rate * self.pace.lanes) * 0.25), now=self.now)


def test_lanes_grow_while_each_brings_more() -> None:
    pace = Pace(memory_bytes=MEMORY, now=0.0)
    Network(pace, 90e6, most=1e12).run(3)
    assert pace.lanes > 0.9 * MOST_LANES


def test_lanes_stay_few_where_more_bring_nothing() -> None:
    pace = Pace(memory_bytes=MEMORY, now=0.0)
    network = Network(pace, 1e9, most=1e9)
    for _ in range(100):
        network.run(0.5)
        assert pace.lanes <= 2 * START_LANES


def test_lanes_settle_near_what_the_network_carries() -> None:
    pace = Pace(memory_bytes=MEMORY, now=0.0)
    Network(pace, 100e6, most=1.5e9).run(4)
    assert 10 <= pace.lanes <= 30


@pytest.mark.parametrize(("first_byte_s", "lanes"), [(0.0005, 6), (0.005, 7), (0.02, 9), (0.08, 18)])
def test_lanes_that_wait_for_a_first_byte_are_made_up_for(first_byte_s: float, lanes: int) -> None:
    pace = Pace(memory_bytes=MEMORY, now=0.0)
    pace.heard(first_byte_s)
    assert pace.lanes == lanes


def test_where_reading_takes_longer_than_waiting_few_lanes_do() -> None:
    pace = Pace(memory_bytes=MEMORY, now=0.0)
    for _ in range(50):
        pace.heard(0.08)
        pace.read(8.0)
    assert pace.lanes == START_LANES


def test_a_server_that_is_overrun_is_not_taken_for_a_distant_one() -> None:
    pace = Pace(memory_bytes=MEMORY, now=0.0)
    pace.heard(0.08)
    pace.slow_down(now=1.0)
    assert pace.lanes == 9


def test_a_number_that_was_given_does_not_follow_the_distance() -> None:
    pace = Pace(memory_bytes=MEMORY, lanes=3, now=0.0)
    pace.heard(1.0)
    assert pace.lanes == 3


class Store:
    """A store that answers so long after a request, and so many requests a second at most: lanes that ask
    ahead as far as the window goes and read in order."""

    def __init__(self, window: Window, first_byte_s: float, *, most_a_second: float = 1e9) -> None:
        self.window, self.first_byte_s, self.most = window, first_byte_s, most_a_second
        self.now = 0.0

    def rounds(self, count: int) -> None:
        for _ in range(count):
            took_s = max(self.first_byte_s, self.window.size / self.most)
            self.now += took_s
            self.window.landed(self.window.size, first_byte_s=self.first_byte_s, now=self.now)


def test_the_window_stays_small_next_door() -> None:
    window = Window()
    Store(window, 0.0005).rounds(100)
    assert (window.size, window.is_far) == (SMALL_AT_ONCE, False)


@pytest.mark.parametrize("first_byte_s", [0.005, 0.02, 0.08])
def test_the_window_opens_where_a_lane_waits(first_byte_s: float) -> None:
    window = Window()
    Store(window, first_byte_s).rounds(20)
    assert (window.size, window.is_far) == (MOST_AT_ONCE, True)


def test_a_window_that_opened_in_error_closes_again() -> None:
    window = Window()
    window.unanswered(now=0.0)
    assert window.size == 512
    Store(window, 0.0005, most_a_second=8000).rounds(3)
    assert window.size == SMALL_AT_ONCE


def test_the_window_does_not_open_for_a_server_that_is_full() -> None:
    window = Window()
    Store(window, 0.02, most_a_second=4000).rounds(50)
    assert window.size <= 2 * 0.02 * 4000


def test_a_refusal_halves_the_window_once_and_it_opens_again_later() -> None:
    window = Window()
    store = Store(window, 0.02)
    store.rounds(5)
    for _ in range(20):
        window.slow_down(now=store.now)
    assert window.size == MOST_AT_ONCE // 2
    store.rounds(20)
    assert window.size == MOST_AT_ONCE // 2
    store.rounds(500)
    assert window.size == MOST_AT_ONCE


def test_a_window_is_never_closed_and_never_beyond_what_was_given() -> None:
    window = Window(most=100)
    for second in range(50):
        window.slow_down(now=2.0 * second)
    assert window.size == 8
    window = Window(most=100)
    Store(window, 0.02).rounds(20)
    assert window.size == 100


def test_a_server_that_is_overrun_halves_the_lanes_once() -> None:
    pace = Pace(memory_bytes=MEMORY, now=0.0)
    network = Network(pace, 90e6, most=1e12)
    network.run(3)
    before = pace.lanes
    for _ in range(20):  # all that were under way are refused together
        pace.slow_down(now=network.now)
    assert pace.lanes == before // 2


def test_lanes_grow_again_some_time_after_a_refusal() -> None:
    pace = Pace(memory_bytes=MEMORY, now=0.0)
    network = Network(pace, 90e6, most=1e12)
    network.run(3)
    pace.slow_down(now=network.now)
    slowed = pace.lanes
    network.run(5)
    assert pace.lanes == slowed
    network.run(10)
    assert pace.lanes > 0.9 * MOST_LANES


def test_lanes_never_fall_below_one() -> None:
    pace = Pace(memory_bytes=MEMORY, now=0.0)
    for second in range(1, 20):
        pace.slow_down(now=2.0 * second)
    assert pace.lanes == 1


def test_a_number_that_was_given_stays() -> None:
    pace = Pace(memory_bytes=MEMORY, lanes=3, now=0.0)
    Network(pace, 90e6, most=1e12).run(3)
    pace.slow_down(now=4.0)
    assert pace.lanes == 3


@pytest.mark.parametrize(("memory", "most"), [(1, 1), (8 << 20, 4), (1 << 40, MOST_LANES)])
def test_memory_bounds_the_lanes(memory: int, most: int) -> None:
    assert Pace(memory_bytes=memory, now=0.0).most == most


@given(left=st.integers(1, 1 << 45), rate=st.floats(1e3, 1e11), seconds=st.floats(0, 20))
def test_a_range_is_whole_slices_within_its_bounds(left: int, rate: float, seconds: float) -> None:
    pace = Pace(memory_bytes=MEMORY, now=0.0)
    Network(pace, rate, most=1e12).run(seconds)
    size = pace.range_bytes(left)
    assert LEAST_RANGE_BYTES <= size <= MOST_RANGE_BYTES
    assert size % SLICE_BYTES == 0


def test_ranges_are_larger_on_a_faster_connection() -> None:
    slow, fast = (Pace(memory_bytes=MEMORY, lanes=4, now=0.0) for _ in range(2))
    Network(slow, 8e6, most=1e12).run(1)
    Network(fast, 60e6, most=1e12).run(1)
    assert slow.range_bytes(1 << 40) < fast.range_bytes(1 << 40)


def test_the_last_ranges_are_shared_out() -> None:
    pace = Pace(memory_bytes=MEMORY, lanes=4, now=0.0)
    Network(pace, 1e9, most=1e12).run(1)
    assert pace.range_bytes(64 << 20) == 8 << 20


def test_a_lane_that_is_alone_with_a_file_asks_for_all_of_it() -> None:
    pace = Pace(memory_bytes=MEMORY, lanes=4, now=0.0)
    Network(pace, 1e9, most=1e12).run(1)
    assert pace.range_bytes(64 << 20, files=4) == 32 << 20


@given(st.lists(st.tuples(st.integers(1, SLICE_BYTES), st.floats(0, 2)), min_size=1, max_size=50))
def test_a_limit_holds_whatever_the_lanes_do(takes: list[tuple[int, float]]) -> None:
    bucket, now, allowed_at, total = Bucket(rate=1 << 20), 0.0, 0.0, 0
    for count, pause in takes:
        now += pause
        allowed_at = now + bucket.wait_s(count, now=now)
        assert total <= bucket.rate * allowed_at + 1  # all before this one fits the time that has passed
        total += count


def test_without_a_limit_nobody_waits() -> None:
    bucket = Bucket(rate=0)
    assert [bucket.wait_s(1 << 40, now=0.0) for _ in range(3)] == [0.0, 0.0, 0.0]


@given(tries=st.integers(0, 10_000), luck=st.floats(0, 1))
def test_waiting_is_bounded_and_never_nothing(tries: int, luck: float) -> None:
    assert 0.05 <= backoff_s(tries, luck=luck) <= 20.0


def test_waiting_grows_with_failures() -> None:
    waits = [backoff_s(tries, luck=0.5) for tries in range(6)]
    assert waits == sorted(waits)


def bring(company: Company, *, rate: float, seconds: float, start: float) -> float:
    """So many bytes a second, in steps of 10 ms; the time at the end."""
    now = start
    for _ in range(round(seconds / 0.01)):
        now += 0.01
        company.landed(int(rate * 0.01), now=now)
    return now


def test_small_files_from_next_door_come_over_one_lane() -> None:
    company = Company()
    assert company.wants_more(near=True)
    company.lanes = 1
    assert not company.wants_more(near=True)
    assert company.wants_more(near=False)


@pytest.mark.parametrize(("gain", "wanted"), [(0.8, False), (1.5, True)])
def test_a_second_lane_for_small_files_stays_if_it_is_quicker(gain: float, wanted: bool) -> None:
    company = Company()
    company.lanes = 1
    now = bring(company, rate=1e8, seconds=0.25, start=0.0)
    assert company.wants_more(near=True)  # a trial
    bring(company, rate=gain * 1e8, seconds=0.5, start=now)
    assert company.wants_more(near=True) == wanted
