"""What to bring, where it goes, and what gives way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import UsageError
from stoker.stage.origins.origin import Collection, RemoteFile
from stoker.stage.plan import (
    BUNDLE_BYTES,
    BUNDLE_FILES,
    SMALL_BYTES,
    Holding,
    evictions,
    folder_of,
    in_order,
    is_one_file,
    safe_parts,
    units_of,
)


def collection(sizes, *, url="s3://bucket/corpus", kind="folder", **more):
    files = tuple(RemoteFile(name=f"f{n}", url=f"{url}/f{n}", bytes=size) for n, size in enumerate(sizes))
    return Collection(url=url, kind=kind, files=files, **more)


SIZES = st.lists(st.integers(0, 3 * SMALL_BYTES), max_size=60)


@given(SIZES)
def test_every_file_is_in_one_unit(sizes):
    found = collection(sizes)
    units = units_of(found, folder="x")
    assert sorted(file.name for unit in units for file in unit.files) == sorted(f.name for f in found.files)
    assert len({unit.key for unit in units}) == len(units)


@given(SIZES)
def test_large_files_are_alone_and_bundles_are_bounded(sizes):
    for unit in units_of(collection(sizes), folder="x"):
        assert len(unit.files) <= BUNDLE_FILES
        assert unit.is_bundle or len(unit.files) == 1
        assert not unit.is_bundle or unit.bytes <= BUNDLE_BYTES


@given(SIZES, st.randoms())
def test_the_order_of_asking_does_not_change_the_units(sizes, random):
    units = units_of(collection(sizes), folder="x")
    names = [file.name for unit in units for file in unit.files]
    random.shuffle(names)
    asked = in_order(units, names)
    assert sorted(unit.key for unit in asked) == sorted(unit.key for unit in units)
    assert not names or names[0] in [file.name for file in asked[0].files]


def test_thousands_of_small_files_make_few_units():
    assert len(units_of(collection([65536] * 4000), folder="x")) == 4


def test_what_a_reader_needs_first_waits_for_nothing_else():
    names = ["a.idx", "manifest.json", "blocks.xxh3", "a.bin"]
    files = tuple(RemoteFile(name=name, url=name, bytes=10) for name in names)
    units = units_of(Collection(url="x", kind="dataset", files=files), folder="x")
    assert [file.name for file in units[0].files] == ["manifest.json", "blocks.xxh3"]


def test_an_unknown_name_is_said():
    with pytest.raises(UsageError, match="there is no nonsense"):
        in_order(units_of(collection([1, 2]), folder="x"), ["nonsense"])


def test_the_same_bytes_uploaded_again_are_the_same_content():
    def unit(**facts):
        files = (RemoteFile(name="a", url="u", bytes=9, **facts),)
        return units_of(Collection(url="u", kind="folder", files=files), folder="x")[0]

    assert unit(digest="xxh3:1", version="1").same_content(unit(digest="xxh3:1", version="2"))
    assert not unit(version="1").same_content(unit(version="2"))
    assert not unit(digest="xxh3:1").same_content(unit(digest="xxh3:2"))


# --- eviction -------------------------------------------------------------------------------------

HOLDINGS = st.lists(
    st.builds(
        lambda key, size, used, held: Holding(
            key=str(key), bytes=size, used_at=float(used), holders=("someone",) if held else ()
        ),
        st.integers(),
        st.integers(1, 100),
        st.integers(0, 20),
        st.booleans(),
    ),
    max_size=12,
    unique_by=lambda held: held.key,
)


@given(HOLDINGS, st.integers(0, 600))
def test_eviction_frees_enough_and_never_what_is_held(holdings, need):
    by_key = {held.key: held for held in holdings}
    going = evictions(holdings, need_bytes=need)
    loose = sum(held.bytes for held in holdings if not held.holders)
    if going is None:
        assert loose < need
    else:
        assert sum(by_key[key].bytes for key in going) >= need
        assert not any(by_key[key].holders for key in going)


@given(HOLDINGS, st.integers(1, 600))
def test_nothing_goes_that_need_not(holdings, need):
    by_key = {held.key: held for held in holdings}
    going = evictions(holdings, need_bytes=need)
    freed = sum(by_key[key].bytes for key in going or ())
    assert all(freed - by_key[key].bytes < need for key in going or ())


def test_the_longest_unused_goes_first():
    holdings = [Holding(key=key, bytes=10, used_at=at) for key, at in (("new", 3), ("old", 1), ("mid", 2))]
    assert evictions(holdings, need_bytes=15) == ("old", "mid")
    assert evictions(holdings, need_bytes=5, keep={"old"}) == ("mid",)
    assert evictions(holdings, need_bytes=25, keep={"old"}) is None


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "kind", "folder"),
    [
        ("s3://bucket/a/b", "dataset", "s3/bucket/a/b"),
        ("s3://bucket/a/b.bin", "file", "s3/bucket/a"),
        ("https://user:secret@host:81/x/y.tar", "file", "https/host:81/x"),
        ("/mnt/nfs/corpus", "folder", "local/mnt/nfs/corpus"),
        ("/mnt/nfs/file.bin", "file", "local/mnt/nfs"),
        ("s3://bucket/../../etc", "folder", "s3/bucket/%../%../etc"),
    ],
)
def test_a_place_in_the_cache_has_a_readable_name(url, kind, folder):
    assert folder_of(collection([1], url=url, kind=kind)) == folder


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        ("s3://bucket/run#1", "s3://bucket/run#2", "folder"),
        ("s3://bucket/run#1/x", "s3://bucket/x", "file"),
        ("s3://bucket/run?1/x", "s3://bucket/run?2/x", "file"),
        ("abfss://one@account/corpus", "abfss://two@account/corpus", "dataset"),
    ],
)
def test_two_places_in_a_store_do_not_share_one_in_the_cache(one, other, kind):
    places = [folder_of(collection([1], url=url, kind=kind)) for url in (one, other)]
    assert places[0] != places[1]


def test_signed_addresses_of_one_path_do_not_share_a_place():
    one, other = (folder_of(collection([1], url=f"https://h/x?sig={n}", kind="file")) for n in (1, 2))
    assert one != other


def test_a_hub_repository_lies_by_its_commit():
    repo = collection([1], url="hf://datasets/org/name@v2", kind="hub", revision="abc")
    assert folder_of(repo) == "hub/datasets/org/name/abc"
    assert folder_of(repo, hub_cache=True) == "datasets--org--name/snapshots/abc"


@pytest.mark.parametrize(
    ("url", "name", "is_one"),
    [
        ("hf://org/name/a/c.bin", "c.bin", True),
        ("hf://org/name@abc/a/c.bin", "c.bin", True),
        ("hf://org/name/a", "c.bin", False),
        ("hf://org/name", "a/c.bin", False),
    ],
)
def test_a_file_of_a_hub_repository_is_one_file(url, name, is_one):
    file = RemoteFile(name=name, url="hf://org/name@abc/a/c.bin", bytes=1)
    assert is_one_file(Collection(url=url, kind="hub", files=(file,), revision="abc")) is is_one


def test_a_part_of_a_hub_repository_lies_where_the_whole_would_have_it():
    folder = collection([1, 2], url="hf://org/name/a/b", kind="hub", revision="abc")
    assert folder_of(folder, hub_cache=True) == "models--org--name/snapshots/abc/a/b"
    file = RemoteFile(name="c.bin", url="hf://org/name@abc/a/c.bin", bytes=1)
    one = Collection(url="hf://org/name/a/c.bin", kind="hub", files=(file,), revision="abc")
    assert folder_of(one) == "hub/models/org/name/abc/a"


@given(st.text(max_size=600))
def test_no_part_of_a_name_climbs_hides_or_is_too_long(text):
    for part in safe_parts(text):
        assert part not in ("", ".", "..", ".stoker")
        assert "/" not in part
        assert "\0" not in part
        assert len(part.encode("utf-8", "surrogatepass")) <= 255
