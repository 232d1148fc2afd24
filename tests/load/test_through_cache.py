"""Feeding through a cache: the same batches, whatever happens to the files in between."""

from __future__ import annotations

import threading

import feeding
import pytest
import small_datasets
from small_datasets import make_tars, make_tokens

import stoker
from stoker.errors import BadShardError
from stoker.load.loader import Loader
from stoker.load.prefetch import tune
from stoker.load.prefetch.tune import Setting
from stoker.stage import fetch


@pytest.fixture
def cache(tmp_path):
    with stoker.Cache(tmp_path / "cache") as made:
        yield made


def direct(corpus, **more):
    with stoker.feed(corpus, device="cpu", **feeding.options(**more)) as feeder:
        return feeding.as_lists(feeder)


def through(corpus, cache, **more):
    with stoker.feed(str(corpus), device="cpu", cache=cache, **feeding.options(**more)) as feeder:
        return feeding.as_lists(feeder)


def damage(path, at=5000):
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(bytes(data))


PROCESSES = pytest.param({"workers": "process"}, marks=pytest.mark.integration)


@pytest.mark.parametrize("more", [{}, {"packing": "best-fit"}, {"reader": "mmap"}, PROCESSES])
def test_batches_are_the_same(corpus, cache, more):
    assert through(corpus, cache, **more) == direct(corpus, **more)


@pytest.mark.long
@pytest.mark.parametrize("zstd", [False, True])
@pytest.mark.parametrize(
    "more", [{}, {"packing": "best-fit"}, {"reader": "direct"}, {"workers": "inline"}, PROCESSES]
)
def test_batches_made_of_files_that_are_still_landing_are_the_same(zstd, more, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(small_datasets, "BLOCK_BYTES", 64 << 10)  # smaller ones are not checked on the way
    corpus = make_tokens(tmp_path / "corpus", [[700] * 800] * 2, zstd=zstd)
    more = {"seq_len": 512, "batch_size": 16, **more}
    assert through(corpus, cache, **more) == direct(corpus, **more)


def test_a_folder_makes_a_cache_for_the_feeders_life(corpus, tmp_path):
    before = set(threading.enumerate())
    assert through(corpus, tmp_path / "other") == direct(corpus)
    assert not [t.name for t in set(threading.enumerate()) - before if "prefetch" in t.name]
    assert list((tmp_path / "other/.stoker/pins").iterdir()) == []


def test_a_blend_of_near_and_far(corpus, cache, tmp_path):
    other = make_tokens(tmp_path / "other", [[3000]])
    options = feeding.options(weights=[1, 2])
    with (
        stoker.feed([cache.at(corpus), other], device="cpu", **options) as mixed,
        stoker.feed([corpus, other], device="cpu", **options) as plain,
    ):
        assert feeding.as_lists(mixed) == feeding.as_lists(plain)


def test_tars_come_through_too(tmp_path, cache):
    tars = make_tars(tmp_path / "tars", [20, 20])
    with stoker.feed(str(tars), device="cpu", cache=cache, batch_size=4) as feeder:
        assert len(list(feeder)) == 10


def test_files_arrive_ahead_of_the_reader(corpus, cache):
    with stoker.feed(str(corpus), device="cpu", cache=cache, **feeding.options()) as feeder:
        next(iter(feeder))
        feeding_path = cache.folder / "local" / str(corpus).lstrip("/")
        while len(list(feeding_path.iterdir())) < len(list(corpus.iterdir())):
            pass  # the test's own limit ends it if they do not come


@pytest.mark.parametrize("has_room", [True, False])
def test_a_cache_knows_when_nothing_of_what_is_read_is_to_come_any_more(has_room, corpus, tmp_path):
    """Without room for all of it, what lies here may have to come again."""
    budget = 0 if has_room else sum(path.stat().st_size for path in corpus.iterdir()) - 1
    with stoker.Cache(tmp_path / "cache", budget=budget) as cache:
        near = cache.at(str(corpus))
        before = near.is_coming
        for file in near.collection.files:
            near.local_path(file.name)
            near.release(file.name)
        assert (before, near.is_coming) == (True, not has_room)


def test_a_loader_whose_files_have_come_goes_on_as_if_they_had_been_here(corpus, cache, monkeypatch):
    monkeypatch.setattr(tune, "_LOOK_S", 0.0)
    monkeypatch.setattr(tune, "_WINDOW", 1)
    monkeypatch.setattr(tune, "_WAITING", 1e9)  # nothing else changes
    with stoker.feed(str(corpus), device="cpu", cache=cache, **feeding.options()) as feeder:
        held = feeder.report().chunk_bytes_held
        feeder.loader._tuner.setting = Setting(depth=2, readers=64)  # as a slow store asks for
        list(feeder)
        list(feeder)
        report = feeder.report()
    choice = next(choice for choice in report.choices if choice.reason == "all files lie here by now")
    assert choice.setting.readers == 2
    assert report.chunk_bytes_held == held


@pytest.mark.parametrize("budget", [0, 1 << 30])
def test_an_epoch_of_files_that_all_lie_here_begins_without_working_out_their_order(
    budget, corpus, tmp_path, monkeypatch
):
    """With a budget others may take their place: then it is told which are needed last."""
    stoker.fetch(str(corpus), cache=tmp_path / "cache")
    told, ask = [], Loader.files_in_order
    monkeypatch.setattr(Loader, "files_in_order", lambda loader, n: told.append(n) or ask(loader, n))
    with (
        stoker.Cache(tmp_path / "cache", budget=budget) as cache,
        stoker.feed(str(corpus), device="cpu", cache=cache, **feeding.options()) as feeder,
    ):
        assert [feeding.as_lists(feeder) for _ in range(2)]
    assert bool(told) == bool(budget)


def test_what_one_share_of_a_dataset_needed_does_not_make_all_of_it_be_here(corpus, cache):
    near = cache.at(str(corpus))
    near.prefetch(["manifest.json"])
    near.local_path("manifest.json")
    assert (near.is_coming, near.is_here) == (False, False)
    for file in near.collection.files:
        near.local_path(file.name)
    assert near.is_here


@pytest.mark.parametrize("on_corrupt", ["raise", "skip"])
def test_damage_in_the_cache_is_healed(corpus, cache, on_corrupt):
    whole = stoker.fetch(str(corpus), cache=cache)
    for name in ("e0-0003.bin", "e0-0000.bin"):
        damage(whole / name)
    with stoker.feed(
        str(corpus), device="cpu", cache=cache, on_corrupt=on_corrupt, **feeding.options()
    ) as feeder:
        assert feeding.as_lists(feeder) == direct(corpus)
        report = feeder.report()
    # small files come in bundles: where one is brought again before the other is read, that is whole too
    assert 1 <= len(report.healed) <= 2
    assert all(": block 1" in one for one in report.healed)
    assert (whole / "e0-0000.bin").read_bytes() == (corpus / "e0-0000.bin").read_bytes()
    assert (report.damaged_blocks, report.skipped_samples) == (0, 0)
    assert (whole / "e0-0003.bin").read_bytes() == (corpus / "e0-0003.bin").read_bytes()


def test_a_file_cut_short_is_healed(corpus, cache):
    near = cache.at(corpus)
    path = near.local_path("e0-0003.bin")
    path.write_bytes(path.read_bytes()[:5000])  # after it was looked at
    with stoker.feed(near, device="cpu", **feeding.options()) as feeder:
        assert feeding.as_lists(feeder) == direct(corpus)
        assert "ends before byte" in feeder.report().healed[0]


def test_of_a_bundle_only_the_damaged_file_is_fetched_again(corpus, cache, fetched):
    whole = stoker.fetch(str(corpus), cache=cache)
    damage(whole / "e0-0003.bin")
    fetched.clear()
    assert through(corpus, cache) == direct(corpus)
    assert sum(fetched) == (corpus / "e0-0003.bin").stat().st_size


@pytest.fixture
def fetched(monkeypatch):
    counted, count = [], fetch._Fetch._count

    def counting(self, size):
        counted.append(size)
        count(self, size)

    monkeypatch.setattr(fetch._Fetch, "_count", counting)
    return counted


@pytest.mark.parametrize("name", ["manifest.json", "blocks.xxh3"])
def test_damaged_books_are_healed(corpus, cache, name):
    damage(stoker.fetch(str(corpus), cache=cache) / name, at=3)
    assert through(corpus, cache) == direct(corpus)


def test_damage_at_the_origin_is_said(corpus, cache):
    whole = stoker.fetch(str(corpus), cache=cache)
    damage(corpus / "e0-0003.bin")
    damage(whole / "e0-0003.bin")
    with pytest.raises(BadShardError, match=r"e0-0003\.bin: block 1 .* cannot be brought again"):
        through(corpus, cache)


@pytest.mark.integration
def test_a_budget_smaller_than_the_dataset_is_enough(tmp_path):
    """Six files of 9 MB through a cache that holds three."""
    corpus = make_tokens(tmp_path / "large", [[4_600_000]] * 6)
    options = {"batch_size": 64, "seq_len": 1024, "shuffle": "off"}
    with (
        stoker.Cache(tmp_path / "cache", budget="30MB") as cache,
        stoker.feed(str(corpus), device="cpu", cache=cache, **options) as fed,
        stoker.feed(corpus, device="cpu", **options) as plain,
    ):
        for mine, theirs in zip(fed, plain, strict=True):
            assert (mine["input_ids"] == theirs["input_ids"]).all()
            assert cache_bytes(cache.folder) <= 30e6


def cache_bytes(folder):
    total = 0
    for path in (folder / "local").rglob("*.bin"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total
