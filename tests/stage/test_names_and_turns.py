"""Names that other versions of stoker must find in a shared cache, and turns of use against a plain model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import UsageError
from stoker.stage.foresight import NEVER, Foresight, fetched_bytes
from stoker.stage.origins.hub import parse_hub
from stoker.stage.origins.origin import Collection, RemoteFile
from stoker.stage.plan import (
    Holding,
    content_digest,
    evictions,
    folder_of,
    hub_cache_folder,
    in_order,
    key_of,
    safe_parts,
    units_of,
)
from stoker.stage.preload import OnDisk, PageCache, make_preload, shm_folder

MIB = 1 << 20


def collection(sizes, *, names=(), url="s3://bucket/corpus"):
    names = names or [f"f{number}" for number in range(len(sizes))]
    files = (
        RemoteFile(name=name, url=f"{url}/{name}", bytes=size)
        for name, size in zip(names, sizes, strict=True)
    )
    return Collection(url=url, kind="folder", files=tuple(files))


def shapes(sizes):
    return [[file.name for file in unit.files] for unit in units_of(collection(sizes), folder="x")]


# --- units ----------------------------------------------------------------------------------------


def test_a_file_of_8_mib_is_small_and_one_byte_more_is_large() -> None:
    assert shapes([8 * MIB, 8 * MIB + 1, 5]) == [["f1"], ["f0", "f2"]]
    small, large = (units_of(collection([size]), folder="x")[0] for size in (8 * MIB, 8 * MIB + 1))
    assert (small.is_bundle, large.is_bundle) == (True, False)
    assert large.bytes == 8 * MIB + 1


def test_a_bundle_holds_64_mib_or_1024_files_and_not_a_byte_or_a_file_more() -> None:
    assert list(map(len, shapes([8 * MIB] * 9))) == [8, 1]
    assert list(map(len, shapes([*[8 * MIB] * 7, 8 * MIB - 1, 1, 1]))) == [9, 1]
    assert list(map(len, shapes([0] * 2049))) == [1024, 1024, 1]


def test_a_unit_has_the_name_it_had() -> None:
    """Caches are shared by versions: a unit of another name would be fetched again."""
    assert key_of("s3/bucket/corpus", ["a/b c.bin", "d"]) == "b_c.bin-0adf05a52aa401f7"
    assert key_of("x", ["." + "é" * 80]) == "_" * 59 + "-" + key_of("x", ["." + "é" * 80]).rpartition("-")[2]
    assert key_of("x", ["a"]) != key_of("y", ["a"])
    assert key_of("x", ["a", "b"]) != key_of("x", ["a", "c"])
    assert content_digest(collection([1, 2])) == "558b93a9a2a6"
    (unit,) = units_of(collection([1, 2]), folder="x")
    assert unit.key == key_of("x", ["f0", "f1"])
    assert unit.folder == "x"


@given(name=st.text(min_size=200, max_size=400).filter(lambda name: "/" not in name))
def test_a_name_that_is_too_long_keeps_its_beginning_and_ends_in_a_digest(name: str) -> None:
    (part,) = safe_parts(name) or [name]
    plain = name.replace("\0", "%00")
    if len(plain.encode("utf-8", "surrogatepass")) <= 255:
        assert part == plain
        return
    head, _, tail = part.rpartition("~")
    assert plain.startswith(head)
    assert 231 < len(head.encode()) <= 235
    assert len(tail) == 16
    (other,) = safe_parts(name + "x")
    assert other != part


def test_a_name_of_300_letters_is_cut_after_235() -> None:
    (part,) = safe_parts("x" * 300)
    assert part.rpartition("~")[0] == "x" * 235
    assert safe_parts("x" * 255) == ["x" * 255]


def test_an_address_with_a_query_is_told_apart_by_eight_letters() -> None:
    places = [folder_of(collection([1], url=f"https://h/x{query}")) for query in ("", "?v=1")]
    assert places[0] == "https/h/x"
    head, _, tail = places[1].rpartition("/")
    assert (head, len(tail)) == ("https/h/x", 8)


def test_a_repository_has_the_folder_that_hugging_face_gives_it() -> None:
    assert hub_cache_folder(parse_hub("hf://datasets/org/name")) == "datasets--org--name"


def test_units_come_in_the_order_of_the_first_name_that_asks_for_them() -> None:
    units = units_of(collection([9 * MIB, 1, 9 * MIB, 2]), folder="x")
    names = {unit.files[0].name: unit for unit in units}
    assert in_order(units, ["f3", "f2", "f1", "f3", "f0"]) == [names["f1"], names["f2"], names["f0"]]
    with pytest.raises(UsageError) as refused:
        in_order(units_of(collection([1] * 9), folder="x"), ["f8", "no", "none"])
    assert "there is no no here" in refused.value.message
    assert refused.value.hint == "one of f0, f1, f2, f3, f4, ..."


# --- eviction -------------------------------------------------------------------------------------

HOLDINGS = st.lists(
    st.builds(
        lambda key, size, used, held: Holding(
            key=key, bytes=size, used_at=float(used), holders=("someone",) if held else ()
        ),
        st.sampled_from("abcdefgh"),
        st.integers(1, 9),
        st.integers(0, 3),
        st.sampled_from([False, False, False, True]),
    ),
    max_size=8,
    unique_by=lambda held: held.key,
)
TURNS = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 5), max_size=8)


@given(HOLDINGS, st.integers(-1, 30), TURNS, st.sets(st.sampled_from("abc")))
def test_those_go_that_are_needed_last_then_longest_unused_as_few_as_do(holdings, need, turns, keep):
    def next_use(key):
        return float(turns[key]) if key in turns else NEVER

    going = evictions(holdings, need_bytes=need, keep=keep, next_use=next_use)
    if need <= 0:
        assert going == ()
        return
    may = [one for one in holdings if not one.holders and one.key not in keep]
    may.sort(key=lambda one: (-next_use(one.key), one.used_at, one.key))
    if sum(one.bytes for one in may) < need:
        assert going is None
        return
    count = next(n for n in range(len(may) + 1) if sum(one.bytes for one in may[:n]) >= need)
    chosen = may[:count]
    spare = sum(one.bytes for one in chosen) - need
    for one in reversed(list(chosen)):  # what would go last stays first, if it can
        if one.bytes <= spare:
            chosen.remove(one)
            spare -= one.bytes
    assert going == tuple(one.key for one in chosen)


# --- turns ----------------------------------------------------------------------------------------


@given(
    uses=st.text("abc", max_size=12),
    reads=st.text("abcx", max_size=14),
    reading=st.sets(st.sampled_from("abx")),
)
def test_a_unit_is_needed_at_its_first_turn_that_nobody_read(
    uses: str, reads: str, reading: set[str]
) -> None:
    ahead = Foresight(uses, reading=reading)
    turns = {key: [turn for turn, one in enumerate(uses) if one == key] for key in "abcx"}
    for key in reading:
        turns[key] = turns[key][1:]
    now = -1
    for key in reads:
        ahead.used(key)
        if turns[key]:
            now = max(now, turns[key].pop(0))
        for one, left in turns.items():
            assert ahead.next_use(one) == (left[0] if left else NEVER)
            assert ahead.distance(one) == (ahead.next_use(one) - now) / max(1, len(uses))
        assert ahead.coming(2) == list(dict.fromkeys(uses[max(0, now) :]))[:2]


def test_who_has_read_nothing_is_before_the_first_turn() -> None:
    assert Foresight("ab").distance("a") == 0.5
    assert Foresight("ab").distance("b") == 1.0


def test_a_turn_that_256_reads_went_past_is_not_waited_for() -> None:
    ahead = Foresight(["late", *["x"] * 260, "late"])
    for _ in range(256):
        ahead.used("x")
    assert ahead.next_use("late") == 0
    ahead.used("x")
    assert ahead.next_use("late") == 261


@given(
    uses=st.text("abcde", max_size=20),
    sizes=st.fixed_dictionaries({key: st.integers(1, 5) for key in "abcde"}),
    budget=st.integers(5, 12),
    here=st.sets(st.sampled_from("abc"), max_size=1),
)
def test_bytes_fetched_are_those_of_evicting_what_is_needed_last(uses, sizes, budget, here):
    held, fetched = set(here), 0
    for at, key in enumerate(uses):
        rest = uses[at + 1 :]
        if key not in held:
            fetched += sizes[key]
            while sum(sizes[one] for one in held) + sizes[key] > budget and held:
                after = uses[at:]  # what is needed now is not yet here
                held.remove(max(held, key=lambda one: (after.find(one) if one in after else len(uses), one)))
            held.add(key)
        assert len(rest) < len(uses)
    found = fetched_bytes(uses, sizes, budget=budget, here=sorted(here))
    never = {key for key in "abcde" if uses.count(key) <= 1}
    if len(never) >= 4:  # ties between those that nobody needs again may fall either way, but cost nothing
        assert found == fetched
    assert sum(sizes[key] for key in set(uses) - here) <= found <= sum(sizes[key] for key in uses)


# --- preload --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "made"), [("page-cache", PageCache), ("none", OnDisk), ("", OnDisk)])
def test_a_file_is_read_where_it_lies(kind: str, made: type, tmp_path: Path) -> None:
    preload = make_preload(kind, ttl_s=30.0)
    assert type(preload) is made
    (unit,) = units_of(collection([5]), folder="x")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "f0").write_bytes(b"12345")
    assert preload.path(unit, "f0", root=tmp_path) == tmp_path / "x" / "f0"
    preload.close()


def test_each_user_has_a_folder_in_shared_memory() -> None:
    assert shm_folder() == Path(f"/dev/shm/stoker-cache-{os.getuid()}")
