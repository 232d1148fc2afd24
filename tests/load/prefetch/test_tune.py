"""Self-tuning: grows while the consumer waits, shrinks when it only costs memory, and says why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.load.prefetch.tune import Limits, Seen, Setting, Trial, Tuner, next_setting

LIMITS = Limits(depth=8, readers=4)


def step(now, *, waited, reading=0.0, full=0.1, calm=0):
    seen = Seen(wall_s=1.0, consumer_s=waited, reading_s=reading, full_s=full)
    return next_setting(now, seen, limits=LIMITS, calm=calm)


def test_a_loader_that_is_late_on_the_whole_is_not_given_more_memory():
    now = Setting(depth=2, readers=2)
    assert step(now, waited=0.9, full=0.05) == (now, "")


def test_a_loader_that_is_now_ahead_now_late_gets_more_depth():
    setting, reason = step(Setting(depth=2, readers=2), waited=0.1, full=0.5)
    assert setting == Setting(depth=3, readers=2)
    assert "waited 10%" in reason


def test_a_wait_for_reads_gets_twice_the_readers():
    setting, reason = step(Setting(depth=2, readers=2), waited=0.5, reading=0.9)
    assert setting == Setting(depth=2, readers=4)
    assert "reads" in reason


def storage(tuner, *, latency_s, most=10**9, cores=2, seconds=6.0, cpu_s=0.001, coming=True):
    """A loop that only waits for reads of a storage that answers after `latency_s`, `most` a second; each
    takes a core for `cpu_s`. What the tuner chose after so many seconds."""
    total = Seen(wall_s=0.0, consumer_s=0.0, reading_s=0.0, full_s=0.0)
    while total.wall_s < seconds:
        rate = min(tuner.setting.readers / (latency_s + cpu_s), most, cores / cpu_s)
        took = 8 / rate  # a group of eight chunks
        total = Seen(
            wall_s=total.wall_s + took,
            consumer_s=total.consumer_s + took,
            reading_s=total.reading_s + took,
            full_s=0.0,
            cpu_s=total.cpu_s + 8 * cpu_s,
            is_coming=coming,
        )
        tuner.after_group(total)
    return tuner.setting.readers, tuner


def wide(**more):
    limits = {"depth": 8, "readers": 64, "cores": 2, "why": "64 at once are the most", **more}
    return Tuner(Setting(depth=2, readers=2), Limits(**limits))


@pytest.mark.parametrize("latency_s", [0.005, 0.02, 0.08])
def test_storage_that_answers_late_is_asked_for_much_at_once_within_seconds(latency_s):
    readers, tuner = storage(wide(), latency_s=latency_s)
    best = min(64 / (latency_s + 0.001), 2 / 0.001)
    assert min(readers / (latency_s + 0.001), 2 / 0.001) > best / 1.2
    assert latency_s < 0.05 or tuner.limit == "readers: 64 at once are the most"


def test_busy_cores_are_not_given_more_readers_than_cores():
    readers, tuner = storage(wide(), latency_s=0.0001, cpu_s=0.01)
    assert readers == 2
    assert tuner.limit == "cores: reading and verifying keep 2 busy"


@pytest.mark.parametrize("cores", [2, 16])
def test_readers_that_do_not_read_faster_are_taken_back(cores):
    """Memory gives what it gives, however many ask, and no core is busy all the time."""
    readers, tuner = storage(wide(cores=cores), latency_s=0.001, most=900, seconds=60)
    assert readers == 2
    assert tuner.limit == "readers: more at once did not bring more"
    assert sum(choice.setting.readers > 4 for choice in tuner.history()) == 0


def test_readers_of_fetched_files_are_kept_for_what_they_tell_the_cache():
    readers, _ = storage(wide(cores=16, fetched=True), latency_s=0.001, most=900, seconds=60)
    assert readers == 64


def test_readers_that_fetched_files_needed_go_when_all_of_them_lie_here():
    tuner = wide(cores=16, fetched=True)
    tuner.setting = Setting(depth=2, readers=64)
    readers, _ = storage(tuner, latency_s=0.001, most=900, coming=False)
    assert (readers, tuner.awaits_files) == (2, False)
    assert tuner.history()[1].reason == "all files lie here by now"


def test_that_all_files_lie_here_is_not_first_noticed_at_the_next_look():
    tuner = wide(fetched=True)
    tuner.setting = Setting(depth=5, readers=64)
    soon = Seen(wall_s=0.001, consumer_s=0.0, reading_s=0.0, full_s=0.0, is_coming=False)
    assert not tuner.is_due(soon.wall_s)
    assert tuner.after_group(soon)
    assert tuner.setting == Setting(depth=2, readers=2)


def test_readers_that_one_lucky_look_let_grow_are_given_back():
    tuner = wide(cores=16)
    tuner.setting = Setting(depth=2, readers=32)
    tuner._fewer_in = 0
    readers, _ = storage(tuner, latency_s=0.001, most=900, seconds=300)
    assert readers == 2


def test_readers_that_take_the_waits_away_stay_though_a_slow_loop_comes_no_faster():
    now, before = Setting(depth=2, readers=4), Setting(depth=2, readers=2)
    seen = Seen(wall_s=1.0, consumer_s=0.1, reading_s=0.9, full_s=0.1, groups=100)
    better = Seen(wall_s=1.0, consumer_s=0.01, reading_s=0.5, full_s=0.1, groups=104)
    trial = Trial(before=before, seen=seen)
    assert next_setting(now, better, limits=LIMITS, calm=0, trial=trial) == (now, "")


def test_the_wait_in_all_is_known():
    _, tuner = storage(wide(), latency_s=0.08, seconds=3)
    assert tuner.waited_s >= 2.9


def test_nothing_changes_while_all_is_well():
    now = Setting(depth=4, readers=2)
    assert step(now, waited=0.001) == (now, "")


def test_depth_that_is_not_needed_is_given_back():
    setting, reason = step(Setting(depth=4, readers=2), waited=0.0, calm=8)
    assert setting.depth == 3
    assert "memory" in reason


def looks(tuner, waits):
    """A look of a second for each share of waiting; the depth after each."""
    depths = []
    for waited in waits:
        before = tuner._last
        tuner.after_group(
            Seen(
                wall_s=before.wall_s + 1,
                consumer_s=before.consumer_s + waited,
                reading_s=before.reading_s,
                full_s=before.full_s + 0.9,
            )
        )
        depths.append(tuner.setting.depth)
    return depths


def test_a_ready_group_more_that_does_not_help_is_taken_back_and_not_tried_again_soon():
    tuner = Tuner(Setting(depth=2, readers=1), LIMITS)
    assert looks(tuner, [0.3] * 10) == [3] + [2] * 9
    assert "did not help" in tuner.history()[-1].reason


def test_a_ready_group_more_that_helps_stays_and_another_one_is_tried():
    tuner = Tuner(Setting(depth=2, readers=1), LIMITS)
    assert looks(tuner, [0.4, 0.2, 0.05, 0.0]) == [3, 4, 5, 5]


def test_many_quick_groups_are_looked_at_together():
    tuner = Tuner(Setting(depth=2, readers=1), LIMITS)
    for number in range(1, 100):  # a tenth of a second in all
        tuner.after_group(
            Seen(wall_s=number / 1000, consumer_s=number / 5000, reading_s=0.0, full_s=number / 2000)
        )
    assert len(tuner.history()) == 1


@given(
    depth=st.integers(1, 8),
    readers=st.integers(1, 4),
    waited=st.floats(0, 1),
    reading=st.floats(0, 1),
    calm=st.integers(0, 20),
)
def test_a_setting_never_leaves_its_limits(depth, readers, waited, reading, calm):
    setting, reason = step(Setting(depth=depth, readers=readers), waited=waited, reading=reading, calm=calm)
    assert 1 <= setting.depth <= LIMITS.depth
    assert 1 <= setting.readers <= LIMITS.readers
    assert bool(reason) == (setting != Setting(depth=depth, readers=readers))


def test_what_was_chosen_and_why_is_kept_within_bounds():
    tuner = Tuner(Setting(depth=2, readers=1), LIMITS)
    for number in range(1, 20_000):
        waiting = (number // 500) % 2  # now a slow loader, now a slow consumer
        before = tuner._last
        tuner.after_group(
            Seen(
                wall_s=before.wall_s + 1,
                consumer_s=before.consumer_s + 0.05 * waiting,
                reading_s=before.reading_s,
                full_s=before.full_s + 0.1,
            )
        )
    assert tuner.history()[0].reason == "to begin with"
    assert 10 < len(tuner.history()) < 200
