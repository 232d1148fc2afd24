"""Eviction by next use: the least that can be fetched, for any order and any room."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from stoker.stage.foresight import NEVER, Foresight, fetched_bytes
from stoker.stage.plan import Holding, evictions, evictions_ahead

if TYPE_CHECKING:
    from collections.abc import Callable


def least(uses: str, room: int) -> int:
    """By trying every eviction there is."""

    @cache
    def best(at: int, held: frozenset[str]) -> int:
        if at == len(uses):
            return 0
        key = uses[at]
        if key in held:
            return best(at + 1, held)
        if len(held) < room:
            return 1 + best(at + 1, held | {key})
        return 1 + min(best(at + 1, held - {gone} | {key}) for gone in held)

    return best(0, frozenset())


@given(uses=st.text("abcde", max_size=14), room=st.integers(1, 4))
def test_no_other_eviction_fetches_less(uses: str, room: int) -> None:
    assert fetched_bytes(uses, dict.fromkeys(uses, 1), budget=room) == least(uses, room)


def test_what_lies_here_is_not_fetched() -> None:
    assert fetched_bytes("abc", dict.fromkeys("abc", 7), budget=21, here="ab") == 7


def test_the_next_use_follows_the_reader() -> None:
    ahead = Foresight("abcab")
    assert [ahead.next_use(key) for key in "abcx"] == [0, 1, 2, NEVER]
    ahead.used("a")
    ahead.used("b")
    assert [ahead.next_use(key) for key in "abc"] == [3, 4, 2]
    assert ahead.coming(2) == ["b", "c"]
    ahead.used("x")
    ahead.used("a")  # ahead of c, which is still to come
    assert ahead.next_use("c") == 2


def test_what_is_needed_last_goes_first_and_what_is_needed_sooner_stays() -> None:
    held = [Holding(key=key, bytes=1, used_at=age) for age, key in enumerate("abcd")]
    order = {"a": 1.0, "b": 3.0, "c": 2.0}
    assert evictions(held, need_bytes=2, next_use=lambda key: order.get(key, NEVER)) == ("d", "b")


def bring(held: dict[str, bool], key: str, ahead: Foresight, *, room: int, is_now: bool) -> bool:
    """As `Room` does it, every unit a byte large; `held` says who is being read."""
    holdings = [
        Holding(key=one, bytes=1, used_at=0.0, holders=("us",) if is_read else ())
        for one, is_read in held.items()
    ]
    need = len(held) + 1 - room
    if is_now:
        going = evictions(holdings, need_bytes=need, next_use=ahead.distance)
    else:
        at = ahead.distance(key)
        going = evictions_ahead(holdings, need_bytes=need, next_use=distance_of(ahead), at=at)
    for one in going or ():
        del held[one]
    if going is not None:
        held[key] = False
    return going is not None


def distance_of(ahead: Foresight) -> Callable[[str, float], float]:
    return lambda key, beyond: ahead.distance(key, beyond=beyond)


@given(uses=st.text("abcde", max_size=30), room=st.integers(1, 4), data=st.data())
def test_bringing_ahead_at_any_moment_fetches_no_more_than_waiting(
    uses: str, room: int, data: st.DataObject
) -> None:
    ahead, held, fetched = Foresight(uses), dict[str, bool](), 0

    def bring_the_next(now: int) -> int:
        missing = next((key for key in uses[now:] if key not in held), None)
        wants = missing is not None and data.draw(st.booleans())
        return int(wants and bring(held, missing or "", ahead, room=room, is_now=False))

    for turn, key in enumerate(uses):
        fetched += bring_the_next(turn)
        ahead.used(key)
        if key not in held:
            fetched += bring(held, key, ahead, room=room, is_now=True)
        held[key] = True
        fetched += bring_the_next(turn + 1)  # while it is read
        held[key] = False
    assert fetched == fetched_bytes(uses, dict.fromkeys(uses, 1), budget=room)


def test_what_another_job_holds_is_nothing_to_wait_for_and_what_we_read_is() -> None:
    held = [
        Holding(key="other", bytes=1, used_at=0.0, holders=("another job",)),
        Holding(key="ours", bytes=1, used_at=0.0, holders=("us",)),
        Holding(key="free", bytes=1, used_at=0.0),
    ]
    turns = {"ours": 5.0, "free": 4.0}

    def going(foreseen: str) -> tuple[str, ...] | None:
        return evictions_ahead(
            held,
            need_bytes=1,
            next_use=lambda key, beyond: turns.get(key, NEVER),
            at=1.0,
            foreseen=lambda key: key in foreseen.split(),
        )

    assert going("free ours") is None
    assert going("free") == ("free",)
