"""Datasets people already have: map-style, Hugging Face, arrays, a raw .bin. Each sample once, always."""

from __future__ import annotations

import json
import sys
import threading
from collections import namedtuple
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from small_datasets import make_tokens

from stoker.errors import MissingPackageError, UsageError
from stoker.load.loader import Loader
from stoker.world import World

SAMPLES = 120


@pytest.fixture(autouse=True)
def _bars_without_a_thread(monkeypatch):
    """Progress bars of Hugging Face leave a thread behind that looks after them."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


class Squares:
    """As a tutorial writes it."""

    def __init__(self, count=SAMPLES):
        self._count = count

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        assert type(index) is int
        if not 0 <= index < self._count:
            raise IndexError(index)
        return {"number": index, "square": np.float32(index**2), "pixels": np.full((2, 3), index)}


class Batched(Squares):
    def __init__(self, count=SAMPLES):
        super().__init__(count)
        self.asked = []

    def __getitems__(self, indices):
        self.asked.append(len(indices))
        return [self[index] for index in indices]


class Stream:
    def __iter__(self):
        return iter(range(3))


def hugging_face(count=SAMPLES):
    datasets = pytest.importorskip("datasets")
    columns = {
        "number": list(range(count)),
        "ids": [[n, n + 1, n + 2] for n in range(count)],
        "ragged": [list(range(n % 4)) for n in range(count)],
        "text": [f"text {n}" for n in range(count)],
    }
    return datasets.Dataset.from_dict(columns)


def numbers_of(batches):
    return [
        int(n) for batch in batches for n in (batch["number"] if isinstance(batch, dict) else batch[:, 0])
    ]


KINDS = {
    "map": Squares,
    "batched": Batched,
    "hugging face": hugging_face,
    "array": lambda: np.repeat(np.arange(SAMPLES)[:, None], 3, axis=1),
}


def load(dataset, **options):
    return Loader(dataset, **{"batch_size": 4, "output": "numpy", "seed": 3, **options})


@pytest.mark.parametrize(
    ("kind", "workers"),
    [*((kind, way) for kind in KINDS for way in ("inline", "thread")), ("map", "process")],
)
def test_an_epoch_holds_every_sample_once(kind, workers):
    with load(KINDS[kind](), workers=workers) as loader:
        first, second = numbers_of(loader), numbers_of(loader)
    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert first != second
    assert first != list(range(SAMPLES))


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_begun_on_two_ranks_is_finished_on_three(kind):
    seen = []
    for rank in range(2):
        with load(KINDS[kind](), world=World(rank=rank, size=2), workers="inline") as loader:
            batches = iter(loader)
            seen += numbers_of(next(batches) for _ in range(6))
            state = loader.state_dict()
    for rank in range(3):
        with load(KINDS[kind](), world=World(rank=rank, size=3), workers="thread") as loader:
            loader.load_state_dict(state)
            seen += numbers_of(loader)
    assert sorted(seen) == list(range(SAMPLES))


def test_columns_go_from_arrow_to_batches():
    with load(hugging_face(), shuffle="off", workers="inline") as loader:
        batch = next(iter(loader))
    assert batch["number"].dtype == np.int64
    assert batch["ids"].tolist() == [[n, n + 1, n + 2] for n in range(4)]
    assert batch["ragged"] == [[], [0], [0, 1], [0, 1, 2]]
    assert batch["text"] == [f"text {n}" for n in range(4)]


def test_what_a_hugging_face_dataset_selects_and_transforms_stays():
    chosen = hugging_face().select(range(20, 60, 2))
    with load(chosen) as loader:
        assert sorted(numbers_of(loader)) == list(range(20, 60, 2))
    changed = hugging_face().with_transform(lambda batch: {"number": [n + 1000 for n in batch["number"]]})
    with load(changed) as loader:
        assert sorted(numbers_of(loader)) == list(range(1000, 1000 + SAMPLES))


def test_a_dataset_that_gives_many_at_once_is_asked_for_many():
    dataset = Batched()
    with load(dataset, workers="inline") as loader:
        list(loader)
    assert min(dataset.asked) >= 4


def test_tensors_arrive_as_tensors():
    torch = pytest.importorskip("torch")
    rows = torch.arange(SAMPLES * 3).reshape(SAMPLES, 3)
    with Loader(rows, batch_size=5) as loader:
        batches = list(loader)
    assert all(isinstance(batch, torch.Tensor) for batch in batches)
    assert sorted(int(row[0]) for batch in batches for row in batch) == list(range(0, SAMPLES * 3, 3))
    pairs = torch.utils.data.TensorDataset(rows, torch.arange(SAMPLES))
    with Loader(pairs, batch_size=5) as loader:
        x, y = next(iter(loader))
    assert x.shape == (5, 3)
    assert (x[:, 0] // 3 == y).all()


@pytest.mark.parametrize("source", ["path", "memmap", "array"])
def test_windows_of_a_raw_file_of_tokens(source, tmp_path):
    ids = (np.arange(32 * 50 + 7) % 60000).astype(np.uint16)
    (tmp_path / "train.bin").write_bytes(ids.tobytes())
    made = {
        "path": lambda: tmp_path / "train.bin",
        "memmap": lambda: np.memmap(tmp_path / "train.bin", np.uint16, "r"),
        "array": lambda: ids,
    }[source]()
    with load(made, seq_len=32) as loader:
        batches = list(loader)
    assert batches[0]["input_ids"].dtype == np.int64
    rows = {int(row[0]): row for batch in batches for row in batch["input_ids"]}
    labels = [row for batch in batches for row in batch["labels"]]
    assert set(rows) <= set(range(0, 32 * 50, 32))
    assert len(rows) == 48  # 50 windows in batches of 4
    assert all((label[:-1] == rows[int(label[0]) - 1][1:]).all() for label in labels)


def test_a_raw_file_of_another_type_says_so(tmp_path):
    (tmp_path / "train.bin").write_bytes(bytes(7))
    with pytest.raises(UsageError, match="no ids of type uint16") as raised:
        load(tmp_path / "train.bin", seq_len=2)
    assert "bin_dtype" in raised.value.hint


def test_datasets_of_one_kind_blend():
    with load([Squares(60), Squares(60)], weights=(1, 1), batch_size=2) as loader:
        assert len(numbers_of(loader)) == 120


def test_collate_and_transform_are_the_users_own():
    with load(Squares(), transform=_number, collate=tuple, workers="inline") as loader:
        batches = list(loader)
    assert all(isinstance(batch, tuple) for batch in batches)
    assert sorted(n for batch in batches for n in batch) == list(range(SAMPLES))


def _number(sample):
    return sample["number"]


def test_a_transform_runs_on_several_threads_at_once_and_keeps_the_order():
    together = threading.Barrier(2, timeout=20)
    threads = set()

    def meet(sample):
        threads.add(threading.current_thread().name)
        together.wait()  # none gets on before another is here too
        return sample["number"]

    with load(Squares(), transform=meet, threads=2) as loader:
        batches = [batch.tolist() for batch in loader]
    with load(Squares(), transform=_number, workers="inline") as inline:
        assert batches == [batch.tolist() for batch in inline]
    assert len(threads) == 2
    assert all("stoker-transform" in name for name in threads)


@pytest.mark.parametrize("workers", ["inline", "thread"])
def test_an_error_names_the_sample(workers):
    with (
        load(Squares(), transform=_fails_at_77, workers=workers) as loader,
        pytest.raises(ValueError, match="no") as raised,
    ):
        list(loader)
    assert "sample 77" in "".join(raised.value.__notes__)


def _fails_at_77(sample):
    if sample["number"] == 77:
        raise ValueError("no")
    return sample


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "None is no dataset"),
        ({"a": 1}, "a dict is no dataset"),
        (7, "a int is no dataset"),
        (Stream(), "has no __len__ and no __getitem__ and can only be read from its beginning"),
        (iter([1]), "has no"),
        (np.empty((0, 3)), "holds no samples"),
        ([Squares(), np.zeros((3, 2)), "nowhere"], "no manifest"),
    ],
)
def test_what_is_no_dataset_is_told_what_would_be_one(given, said):
    with pytest.raises(Exception, match=said) as raised:
        load(given)
    assert "hint" in str(raised.value)


def test_packings_of_documents_are_refused_where_nothing_says_where_they_begin():
    with pytest.raises(UsageError, match="does not say where they begin"):
        load(np.arange(1000), seq_len=8, packing="best-fit")


def test_a_dataset_of_another_length_does_not_take_up_the_position():
    with load(Squares()) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with load(Squares(SAMPLES + 1)) as other, pytest.raises(UsageError, match="another order"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    "name", ["num_workers", "sampler", "worker_init_fn", "generator", "collate_fn", "timeout"]
)
def test_arguments_of_a_dataloader_without_a_meaning_are_refused_with_the_reason(name):
    with pytest.raises(UsageError, match=name) as raised:
        load(Squares(), **{name: None})
    assert raised.value.hint


def test_in_the_workers_of_a_dataloader_a_loader_gives_its_part():
    torch = pytest.importorskip("torch")

    class Inside(torch.utils.data.IterableDataset):
        def __iter__(self):
            with load(Squares(), workers="inline") as loader:
                yield from loader

    batches = torch.utils.data.DataLoader(Inside(), batch_size=None, num_workers=2)
    assert sorted(numbers_of(batches)) == list(range(SAMPLES))


@pytest.mark.parametrize("collate", [None, lambda samples: tuple(samples)])
def test_padding_that_a_batch_cannot_name_is_refused(collate):
    rows = np.arange(10) if collate is None else Squares(10)
    with (
        load(rows, tail="pad", collate=collate, workers="inline") as loader,
        pytest.raises(UsageError, match="no place to say which"),
    ):
        list(loader)


Pair = namedtuple("Pair", "left right")


def test_samples_inside_each_other_are_stacked_all_the_way_down():
    torch = pytest.importorskip("torch")

    class Nested(Squares):
        def __getitem__(self, index):
            inner = {"array": np.full(2, index), "tensor": torch.full((2,), index)}
            return {"number": index, "inner": inner, "pair": Pair(torch.tensor(index), f"{index}")}

    with load(Nested(), output="torch", workers="inline") as loader:
        batch = next(iter(loader))
    assert batch["inner"]["array"].shape == batch["inner"]["tensor"].shape == (4, 2)
    assert torch.equal(batch["inner"]["array"], batch["inner"]["tensor"])
    assert isinstance(batch["pair"], Pair)
    assert batch["pair"].right == [str(int(one)) for one in batch["pair"].left]


def test_what_a_collate_keeps_apart_stays_apart():
    torch = pytest.importorskip("torch")

    def boxes(samples):
        return {"number": [s["number"] for s in samples], "boxes": [torch.ones(2, 4) for _ in samples]}

    with load(Squares(), output="torch", collate=boxes, workers="inline") as loader:
        assert isinstance(next(iter(loader))["boxes"], list)


@pytest.mark.parametrize("values", [(1, None), (None, 1), (1, "a"), (2**70, 1)])
def test_values_that_are_not_all_numbers_become_a_list_whichever_comes_first(values):
    class Mixed(Squares):
        def __getitem__(self, index):
            return values[index]

    with load(Mixed(2), batch_size=2, shuffle="off", workers="inline") as loader:
        assert next(iter(loader)) == list(values)


@pytest.mark.parametrize("kind", [">i2", ">f4", "<c8"])
def test_arrays_of_another_byte_order_become_tensors(kind):
    torch = pytest.importorskip("torch")
    with load(np.arange(12).reshape(4, 3).astype(kind), output="torch", shuffle="off") as loader:
        batch = next(iter(loader))
    assert isinstance(batch, torch.Tensor)
    assert batch.real.tolist() == np.arange(12).reshape(4, 3).tolist()


@pytest.mark.parametrize("dtype", ["uint8", "int16"])
def test_a_type_that_cannot_hold_the_ids_of_an_array_is_refused(dtype, tmp_path):
    (np.arange(200, dtype=np.uint16) + 40_000).tofile(tmp_path / "train.bin")
    for source in (tmp_path / "train.bin", np.arange(200) + 40_000):
        with (
            load(source, seq_len=8, dtype=dtype, workers="inline") as loader,
            pytest.raises(UsageError, match=f"dtype={dtype} does not hold the ids"),
        ):
            list(loader)


def test_a_raw_file_with_an_index_of_another_type_is_refused(tmp_path):
    folder = make_tokens(tmp_path, [[300]])
    with pytest.raises(UsageError, match="an index that says its ids are uint16, not int32"):
        load(folder / "e0-0000.bin", seq_len=8, bin_dtype="int32")


def test_a_raw_file_needs_seq_len_and_a_type_that_is_one(tmp_path):
    np.arange(200, dtype=np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(UsageError, match="needs seq_len"):
        load(tmp_path / "train.bin")
    with pytest.raises(UsageError, match="bin_dtype='nope'"):
        load(tmp_path / "train.bin", seq_len=8, bin_dtype="nope")


def test_windows_of_tokens_go_through_a_transform_as_the_samples_they_are():
    with load(
        np.arange(100), seq_len=9, transform=lambda one: {**one, "first": one["input_ids"][0]}
    ) as loader:
        batch = next(iter(loader))
    assert batch["first"].tolist() == batch["input_ids"][:, 0].tolist()
    assert (batch["labels"] == batch["input_ids"] + 1).all()


def test_a_stream_of_torch_s_that_knows_its_length_is_still_a_stream():
    data = pytest.importorskip("torch.utils.data")

    class Stream(data.IterableDataset):
        def __len__(self):
            return 3

        def __iter__(self):
            return iter(range(3))

    with pytest.raises(UsageError, match="no __getitem__"):
        load(Stream())


@pytest.mark.parametrize("found", [None, {"number": [1, 2]}, "text"])
def test_many_at_once_that_are_no_samples_are_refused(found):
    class Odd(Batched):
        def __getitems__(self, indices):
            return found

    with load(Odd(), workers="inline") as loader, pytest.raises(UsageError, match="not a list of samples"):
        next(iter(loader))


def test_a_dataset_that_grows_keeps_the_order_of_its_first_length():
    class Growing(Squares):
        def __len__(self):
            self._count += 1
            return self._count

    with load(Growing(), workers="inline") as loader:
        next(iter(loader))
        assert loader.state_dict()["order"] == loader.state_dict()["order"]


def test_the_format_of_a_hugging_face_dataset_is_kept():
    halves = pytest.importorskip("datasets").Dataset.from_dict({"half": [0.5, 1.0, 1.5, 2.0]})
    with load(halves.with_format("numpy", dtype=np.float16), workers="inline") as loader:
        assert next(iter(loader))["half"].dtype == np.float16


def test_a_batch_of_a_hugging_face_dataset_may_be_written_to():
    dataset = hugging_face()
    with load(dataset, batch_size=1, shuffle="off", workers="inline") as loader:
        batch = next(iter(loader))
        batch["number"] += 100
        batch["ids"] += 100
    assert dataset[0]["number"] == 0
    assert dataset[0]["ids"] == [0, 1, 2]


def test_a_folder_that_hugging_face_saved_is_a_dataset(tmp_path):
    hugging_face().save_to_disk(str(tmp_path / "saved"))
    with load(tmp_path / "saved") as loader:
        assert sorted(numbers_of(loader)) == list(range(SAMPLES))


@pytest.mark.parametrize(
    ("index", "package"), [('{"shards": []}', "mosaicml-streaming"), ('{"chunks": []}', "litdata")]
)
def test_a_folder_of_another_library_names_what_would_read_it(index, package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "streaming", None)
    monkeypatch.setitem(sys.modules, "litdata", None)
    (tmp_path / "index.json").write_text(index)
    with pytest.raises(MissingPackageError, match="is not installed") as said:
        load(tmp_path)
    assert package in said.value.hint


def test_a_folder_of_mds_shards_is_a_dataset(tmp_path, monkeypatch):
    """With a stand-in for the one function of theirs that is called: the real package brings three clouds."""
    for number, count in enumerate((3, 2)):
        (tmp_path / f"{number}.mds").write_bytes(bytes(count))
    shards = [{"name": "0.mds", "first": 0, "samples": 3}, {"name": "1.mds", "first": 3, "samples": 2}]
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))

    class Reader:
        def __init__(self, folder, split, shard):
            self._first, self.samples = shard["first"], shard["samples"]
            self.file_pairs = [(SimpleNamespace(basename=shard["name"], bytes=shard["samples"]), None)]

        def __getitem__(self, index):
            return {"number": self._first + range(self.samples)[index]}

    modules = {name: ModuleType(name) for name in ("streaming", "streaming.base", "streaming.base.format")}
    modules["streaming.base.format"].reader_from_json = Reader
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    with load(tmp_path, batch_size=1) as loader:
        assert sorted(numbers_of(loader)) == list(range(5))
    (tmp_path / "1.mds").unlink()
    with pytest.raises(UsageError, match="does not lie here"):
        load(tmp_path, batch_size=1)


def test_what_works_on_samples_is_refused_where_there_are_none(tmp_path):
    folder = make_tokens(tmp_path, [[300]])
    for name in ("transform", "collate"):
        with pytest.raises(UsageError, match=f"{name}= has nothing to work on"):
            load(folder, seq_len=8, **{name: lambda one: one})


@pytest.mark.parametrize(
    "options", [{"pad_id": 1.5}, {"weights": ["a"]}, {"dtype": object}, {"dtype": "nope"}]
)
def test_options_of_the_wrong_type_are_named(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        load(np.arange(100), seq_len=8, **options)
