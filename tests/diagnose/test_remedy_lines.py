"""The numbers in a remedy: enough, and the least that is."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from stoker.diagnose import remedies

WAIT = st.floats(0.01, 0.95)


def seen(*, wait: float, facts: dict[str, float] | None = None, **host: float) -> Any:
    """As much of a run's features as the remedies ask for."""
    usual = {"workers": math.nan, "wait_busy": 1.0, "busy": 1.0, "loader_cores": 0.0, "allowed": 64.0}
    known = facts or {}
    return SimpleNamespace(
        host=SimpleNamespace(**{**usual, "quota": math.nan, **host}),
        loop=SimpleNamespace(share={"data": wait}),
        fact=lambda *names: next((known[name] for name in names if name in known), math.nan),
    )


def told(pattern: str, texts: tuple[str, ...]) -> list[int]:
    return [int(found) for text in texts for found in re.findall(pattern, text)]


@given(have=st.integers(1, 40), wait=WAIT, allowed=st.integers(1, 200))
def test_the_workers_told_keep_up_are_the_fewest_and_leave_the_loop_a_core(
    have: int, wait: float, allowed: int
) -> None:
    texts = remedies.feed(seen(wait=wait, workers=have, allowed=allowed), "cpu")
    named, room = told(r"DataLoader\(num_workers=(\d+)\)", texts), max(allowed - 1, 1)
    if not named:  # as many as there are cores already
        assert have >= room
        assert any("more workers find no core" in text for text in texts)
        return
    (workers,) = named
    assert workers <= room
    assert (workers - 1) * (1 - wait) < have + 1e-9
    if not any("a batch must also become cheaper" in text for text in texts):
        assert workers * (1 - wait) >= have - 1e-9
    else:
        assert workers == room
        assert room * (1 - wait) < have


@given(have=st.integers(0, 40), wait=WAIT)
def test_workers_are_those_of_the_loader_where_no_host_counted_them(have: int, wait: float) -> None:
    run = seen(wait=wait, facts={"num_workers": have})
    assert remedies.feed(run, "cpu") == remedies.feed(seen(wait=wait, workers=have), "too_few_workers")


def test_without_workers_what_was_busy_while_the_loop_waited_makes_the_batches() -> None:
    texts = remedies.feed(seen(wait=0.5, wait_busy=3.0), "cpu")
    assert told(r"num_workers=(\d+)", texts) == [6]


def test_no_wait_asks_for_no_workers() -> None:
    assert told(r"num_workers=(\d+)", remedies.feed(seen(wait=0.0, workers=4), "cpu")) == []


@given(asked=st.floats(0.1, 100), allowed=st.integers(1, 64))
def test_one_thread_a_worker_is_told_where_they_ask_for_more_cores_than_there_are(
    asked: float, allowed: int
) -> None:
    texts = remedies.feed(seen(wait=0.5, workers=2, loader_cores=asked, allowed=allowed), "cpu")
    assert any("OMP_NUM_THREADS=1" in text for text in texts) == (asked > allowed)


@given(quota=st.floats(0.1, 64), wait=st.floats(0.0, 0.9))
def test_the_cpu_limit_told_is_the_least_with_which_batches_come_in_time(quota: float, wait: float) -> None:
    (limit,) = told(r'cpu: "(\d+)"', remedies.feed(seen(wait=wait, quota=quota), "quota"))
    assert limit * (1 - wait) >= quota - 1e-9
    assert (limit - 1) * (1 - wait) < quota + 1e-9


@given(workers=st.integers(1, 64), ahead=st.integers(1, 16), batch=st.integers(1 << 10, 1 << 32))
def test_the_shm_told_holds_what_workers_hold_and_half_more(workers: int, ahead: int, batch: int) -> None:
    facts = {"num_workers": workers, "prefetch_factor": ahead, "batch_bytes": batch}
    texts = remedies.shm(seen(wait=0.5, facts=facts))
    (kubernetes,), (docker,) = told(r"sizeLimit: (\d+)Gi", texts), told(r"--shm-size=(\d+)g", texts)
    need = 1.5 * workers * (ahead + 1) * batch
    assert kubernetes == docker
    assert kubernetes << 30 >= need
    assert kubernetes == 1 or (kubernetes - 1) << 30 < need


def test_shm_of_an_unknown_loader_is_16_gib_and_two_batches_ahead_are_usual() -> None:
    assert told(r"--shm-size=(\d+)g", remedies.shm(seen(wait=0.5))) == [16]
    facts = {"num_workers": 4.0, "batch_bytes": float(1 << 30)}
    assert told(r"--shm-size=(\d+)g", remedies.shm(seen(wait=0.5, facts=facts))) == [18]


@given(pause=st.floats(0.01, 100), step=st.floats(0.01, 100))
def test_the_steps_between_saves_told_make_them_cost_one_percent_and_no_fewer_would(
    pause: float, step: float
) -> None:
    assume(pause / step > 0.02)
    (steps,) = told(
        r"every (\d+) steps?",
        tuple(text.replace(",", "") for text in remedies.save(pause_s=pause, step_s=step)),
    )
    assert pause / (pause + steps * step) <= 0.01 + 1e-9
    assert pause / (pause + (steps - 1) * step) > 0.01 - 1e-9
    assert told(r"every (\d+)", remedies.save(pause_s=0.0, step_s=step)) == []
    assert told(r"every (\d+)", remedies.save(pause_s=pause, step_s=0.0)) == []
