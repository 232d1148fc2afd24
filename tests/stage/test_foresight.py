"""Eviction by next use: the least that can be fetched, for any order and any room."""

from __future__ import annotations

from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from stoker.stage.foresight import NEVER, Foresight, fetched_bytes
from stoker.stage.plan import Holding, evictions


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
    assert evictions(held, need_bytes=3, next_use=lambda key: order.get(key, NEVER), before=2.0) is None
