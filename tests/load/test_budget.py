"""A budget smaller than what a node reads: what is fetched is next to the least that can be."""

from __future__ import annotations

import itertools
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from small_datasets import make_tokens

import stoker
from stoker.errors import CacheFullError
from stoker.stage import fetch
from stoker.stage.foresight import NEVER, Foresight, fetched_bytes
from stoker.stage.plan import FIRST, Unit

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

SHARDS = 8
OPTIONS = {"device": "cpu", "batch_size": 64, "seq_len": 1024}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("large") / "corpus", [[4_600_000]] * SHARDS)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted: list[int] = []
    count = fetch._Fetch._count

    def counting(self: fetch._Fetch, size: int) -> None:
        counted.append(size)
        count(self, size)

    monkeypatch.setattr(fetch._Fetch, "_count", counting)
    return counted


@pytest.fixture
def fetched_for_the_epoch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each unit that was brought for a read that was foreseen: at its end a loader reads on into the next
    epoch, as far as threads have come by then."""
    counted: list[int] = []
    reader = threading.local()
    used, bring = Foresight.used, fetch.Fetcher.bring

    def using(self: Foresight, key: str) -> None:
        reader.is_in_the_next = self.next_use(key) == NEVER
        used(self, key)

    def bringing(self: fetch.Fetcher, unit: Unit, **how: Any) -> None:
        was_here = self.shelf.holds(unit)
        bring(self, unit, **how)
        if not was_here and not getattr(reader, "is_in_the_next", False):
            counted.append(unit.bytes)

    monkeypatch.setattr(Foresight, "used", using)
    monkeypatch.setattr(fetch.Fetcher, "bring", bringing)
    return counted


def shard_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.bin"))


@pytest.mark.parametrize("readers", [0, 1])
@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.3])
def test_an_epoch_fetches_the_least_that_its_order_allows(
    share: float, readers: int, large: Path, tmp_path: Path, fetched_for_the_epoch: list[int]
) -> None:
    """To the byte with one reader, whatever is brought ahead of it. Of many, who are out of turn among them,
    all who wait for a file are served by one fetch."""
    budget = int(shard_bytes(large) * share)
    with warnings.catch_warnings(), stoker.Cache(tmp_path / "c", budget=budget, refetch=1000) as cache:
        warnings.simplefilter("ignore")
        near = cache.at(str(large))
        with stoker.feed(near, readers=readers, **OPTIONS) as feeder, stoker.feed(large, **OPTIONS) as plain:
            near.prefetch(feeder.loader.files_in_order())
            for mine, theirs in zip(feeder, plain, strict=True):
                assert (mine["input_ids"] == theirs["input_ids"]).all()
        sizes = {unit.key: unit.bytes for unit in near.units}
        least = fetched_bytes(near.foresight.uses, sizes, budget=budget)
    print(f"fetched over the least: {sum(fetched_for_the_epoch) / least:.3f}")
    assert sum(fetched_for_the_epoch) <= (least if readers == 1 else 1.1 * least)


def test_what_would_thrash_is_refused_and_says_how_much(large: Path, tmp_path: Path) -> None:
    budget = int(shard_bytes(large) * 0.5)
    with (
        stoker.Cache(tmp_path / "c", budget=budget) as cache,
        pytest.raises(CacheFullError, match=r"will fetch .* times its .*: the budget is") as caught,
    ):
        stoker.feed(str(large), cache=cache, **OPTIONS)
    assert "refetch=" in caught.value.hint


@pytest.mark.parametrize("shuffle", ["full", "blocks", "off"])
def test_the_stated_minimum_is_enough(shuffle: str, large: Path, tmp_path: Path) -> None:
    """The largest unit, and the manifest with its digests."""
    with stoker.Cache(tmp_path / "all") as cache:
        near = cache.at(str(large))
        first = sum(unit.bytes for unit in near.units if unit.files[0].name in FIRST)
        budget = max(unit.bytes for unit in near.units) + first
    with (
        warnings.catch_warnings(),
        stoker.Cache(tmp_path / "c", budget=budget, refetch=10_000) as cache,
        stoker.feed(large, shuffle=shuffle, **OPTIONS) as plain,
    ):
        warnings.simplefilter("ignore")
        with stoker.feed(str(large), cache=cache, shuffle=shuffle, **OPTIONS) as feeder:
            for mine, theirs in itertools.islice(zip(feeder, plain, strict=True), 12):
                assert (mine["input_ids"] == theirs["input_ids"]).all()


def test_in_disk_order_each_file_comes_once_through_a_third_of_the_room(
    large: Path, tmp_path: Path, fetched: list[int]
) -> None:
    with (
        stoker.Cache(tmp_path / "c", budget=shard_bytes(large) // 3) as cache,
        stoker.feed(str(large), cache=cache, shuffle="off", **OPTIONS) as feeder,
    ):
        assert sum(1 for _ in feeder) == len(feeder)
    assert sum(fetched) <= 1.5 * shard_bytes(large)  # at its end the loader reads ahead into the next epoch
