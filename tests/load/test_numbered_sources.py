"""What is taken for numbered samples, and what is not: a length that is one rank's, brackets without rows."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pyarrow
import pytest
import torch

from stoker.errors import UsageError
from stoker.load.loader import Loader
from stoker.world import World


def load(dataset, **options):
    return Loader(dataset, **{"batch_size": 4, "output": "numpy", "workers": "inline", **options})


class Twelve:
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"number": range(12)[index]}


class HalfOfLitdata(Twelve):
    """As litdata's StreamingDataset is on two ranks: half as long, and numbered through all samples."""

    __module__ = "litdata.streaming.dataset"
    parts = ((0, 0, 7, 7), (7, 7, 12, 12))

    def __init__(self, folder="", shuffle=False):
        self.shuffler = None

    def __len__(self):
        cache = [*range(12)]
        parts = self.parts
        self.shuffler = SimpleNamespace(
            cache=type("Cache", (list,), {"get_chunk_intervals": lambda _: parts})(cache)
        )
        return 6


class HalfOfMosaic(Twelve):
    __module__ = "streaming.base.dataset"
    size = 12

    def __len__(self):
        return 6


class MyOwn(HalfOfMosaic):
    """People derive from it."""

    __module__ = "train"


@pytest.mark.parametrize("kind", [HalfOfLitdata, HalfOfMosaic, MyOwn])
def test_a_dataset_whose_length_is_one_rank_s_share_is_read_whole(kind):
    seen = []
    for rank in range(2):
        with load(kind(), batch_size=3, world=World(rank=rank, size=2)) as loader:
            seen += [int(n) for batch in loader for n in batch["number"]]
    assert sorted(seen) == list(range(12))


def test_a_folder_of_litdata_is_read_whole_on_every_rank(tmp_path, monkeypatch):
    """With a stand-in for their class (the real one was tried by hand: on two ranks it gave one half)."""
    litdata = ModuleType("litdata")
    litdata.StreamingDataset = HalfOfLitdata
    monkeypatch.setitem(sys.modules, "litdata", litdata)
    (tmp_path / "index.json").write_text(json.dumps({"chunks": [{}], "config": {"data_format": ["int"]}}))
    with load(tmp_path, batch_size=3) as loader:
        assert len(loader) == 4
    (tmp_path / "index.json").write_text(
        json.dumps({"chunks": [{}], "config": {"item_loader": "TokensLoader"}})
    )
    with pytest.raises(UsageError, match="was written for a TokensLoader"):
        load(tmp_path)


def test_a_part_of_a_litdata_dataset_or_one_that_hides_its_size_is_refused(monkeypatch):
    monkeypatch.setattr(HalfOfLitdata, "parts", ((0, 0, 7, 7), (7, 7, 9, 12)))
    with pytest.raises(UsageError, match="uses 9 samples of chunks of 12"):
        load(HalfOfLitdata())
    monkeypatch.delattr(HalfOfMosaic, "size")
    with pytest.raises(UsageError, match="this rank gets 6 of its samples, and not how many it holds"):
        load(HalfOfMosaic())


def frame():
    return pytest.importorskip("pandas").DataFrame({0: [1, 2], 1: [3, 4]})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (frame, "a DataFrame gives columns or labels"),
        (lambda: frame()[0], "a Series gives columns or labels"),
        (lambda: pyarrow.table({"a": [1], "b": [2]}), "a Table gives columns or labels"),
        (lambda: torch.eye(4).to_sparse(), "of layout torch.sparse_coo has no rows by number"),
        (list, "a list of no datasets"),
        (lambda: [{"a": 1}, {"a": 2}], "a list is a blend of datasets, and this one holds a dict"),
        (lambda: [(1, 2)], "this one holds a tuple"),
    ],
)
def test_what_gives_no_rows_by_number_is_refused_with_what_would(make, said):
    with pytest.raises(UsageError, match=said) as raised:
        load(make())
    assert "hint" in str(raised.value)


def test_several_datasets_of_hugging_face_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # their bars leave a thread behind
    datasets = pytest.importorskip("datasets")
    both = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"a": [1]})})
    with pytest.raises(UsageError, match="several datasets: train") as raised:
        load(both)
    assert "dataset['train']" in str(raised.value)
    both.save_to_disk(str(tmp_path))
    with pytest.raises(UsageError, match="several datasets: train") as raised:
        load(tmp_path)
    assert str(tmp_path / "train") in str(raised.value)


@pytest.mark.parametrize(
    "options",
    [
        {"seed": -1},
        {"seed": 2**64},
        {"seed": True},
        {"batch_size": True},
        {"batch_size": np.True_},
        {"world": (0, 2)},
        {"labels": "same"},
        {"dtype": "int32"},
        {"pad_id": 3},
    ],
)
def test_an_option_that_would_be_taken_for_another_or_for_nothing_is_named(options):
    with pytest.raises(UsageError, match=f"^{next(iter(options))}="):
        load(Twelve(), **options)


def test_the_largest_seed_is_one_of_its_own():
    firsts = set()
    for seed in (0, 2**63, 2**64 - 1):
        with load(np.arange(1000), seed=np.uint64(seed)) as loader:
            firsts.add(tuple(next(iter(loader)).tolist()))
    assert len(firsts) == 3


def test_rows_of_an_array_are_not_taken_for_a_stream_to_be_cut():
    with pytest.raises(UsageError, match="rows of 9 is not cut into rows of seq_len=4"):
        load(np.zeros((8, 9), np.int64), seq_len=4)
    with load(np.zeros((8, 9), np.int64), seq_len=8) as loader:
        assert next(iter(loader)).shape == (4, 9)


@pytest.mark.parametrize(("asked", "order"), [(True, "full"), (False, "off")])
def test_shuffle_may_be_asked_for_as_of_a_dataloader(asked, order):
    with load(Twelve(), shuffle=asked) as one, load(Twelve(), shuffle=order) as other:
        assert [b["number"].tolist() for b in one] == [b["number"].tolist() for b in other]


def test_a_column_that_padding_would_replace_is_not_lost():
    class Real(Twelve):
        def __getitem__(self, index):
            return {"real": index}

    with load(Real(), tail="pad") as loader, pytest.raises(UsageError, match="a `real` of their own"):
        list(loader)


def hugging_face(values):
    return pytest.importorskip("datasets").Dataset.from_dict({"number": list(values)})


@pytest.mark.parametrize(
    "make",
    [
        lambda values: np.array(values),
        lambda values: torch.tensor(values).to(torch.bfloat16),
        lambda values: torch.tensor(values)[:, None].float().requires_grad_(),
        hugging_face,
    ],
)
def test_a_position_in_one_dataset_is_none_in_another_of_its_shape(make):
    with load(make(range(60)), seed=1) as loader:
        next(iter(loader))
        state = json.loads(json.dumps(loader.state_dict()))
    with load(make(range(60)), seed=1) as same:
        same.load_state_dict(state)
    with (
        load(make(range(60, 120)), seed=1) as other,
        pytest.raises(UsageError, match="another order: datasets"),
    ):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    "values", [np.array([{}] * 8), np.zeros((8, 0)), np.arange(8)[::-1], np.array(["a"] * 8)]
)
def test_any_array_has_a_state(values):
    with load(values) as loader:
        next(iter(loader))
        with load(values) as again:
            again.load_state_dict(loader.state_dict())
