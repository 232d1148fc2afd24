"""What a loader meets in a long run: forks, interrupts, shards that go bad after they were good."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_datasets import make_tars, make_tokens

from stoker.errors import StorageError, UsageError
from stoker.load.assembly.rows import Buffers
from stoker.load.loader import Loader

WORKERS = ["inline", "thread"]


def load(folder: Path, **options: Any) -> Loader:
    return Loader(
        folder, **{"batch_size": 4, "seq_len": 32, "output": "numpy", "chunk_bytes": 2048, **options}
    )


def rows_of(batches: Any) -> list[list[int]]:
    return [row for batch in batches for row in batch["input_ids"].tolist()]


def flip_a_byte(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 255]))


def in_a_forked_child(work: Callable[[], Any]) -> str:
    """How it went there."""

    def run(pipe: Any) -> None:
        try:
            pipe.send(f"fine: {work()}")
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")

    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=run, args=(theirs,))
    child.start()
    try:
        return str(ours.recv())
    finally:
        child.join()


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("before", ["a loop", "load_state_dict", "close"])
def test_a_child_is_told_that_the_loader_is_its_parents(before: str, workers: str, corpus: Path) -> None:
    with load(corpus, workers=workers, shuffle="off") as loader:
        begin = loader.state_dict()
        assert list(loader)
        if before == "load_state_dict":
            loader.load_state_dict(begin)
        if before == "close":
            loader.close()
        said = in_a_forked_child(lambda: rows_of(loader)[0])
    assert said.startswith("UsageError: this loader was started before the process was forked")


class StopThatError(BaseException):
    """As an interrupt or an exit is: no Exception."""


@pytest.mark.parametrize("workers", WORKERS)
def test_a_loop_after_an_interrupt_goes_on_where_it_was(workers: str, tmp_path: Path) -> None:
    folder, met = make_tars(tmp_path / "tars", [12]), [0]

    def transform(sample: dict[str, Any]) -> str:
        met[0] += 1
        if met[0] == 6:
            raise StopThatError
        return sample["__key__"]

    def keys(loader: Loader) -> list[str]:
        return [key for batch in loader for key in batch]

    options = {"batch_size": 2, "transform": transform, "collate": list, "workers": workers}
    found: list[str] = []
    with Loader(folder, **options) as loader:
        with pytest.raises(StopThatError):
            found.extend(key for batch in loader for key in batch)
        found += keys(loader)
        assert sorted(found) == sorted(keys(loader))


@pytest.mark.parametrize("reader", ["pread", "direct", "mmap"])
@pytest.mark.parametrize("workers", WORKERS)
def test_a_shard_that_was_lost_after_it_was_verified_is_skipped_and_counted(
    workers: str, reader: str, corpus: Path
) -> None:
    with load(corpus, batch_size=1, workers=workers, reader=reader, on_corrupt="skip") as loader:
        whole = {tuple(row) for row in rows_of(loader)}
        loader.close()
        max(corpus.glob("*.bin")).unlink()
        again = rows_of(loader)
        report = loader.report()
    assert {tuple(row) for row in again} < whole
    assert report.skipped_samples == len(again) - len({tuple(row) for row in again}) > 0


def test_a_shard_that_is_missing_is_said_when_it_is_needed(tmp_path: Path) -> None:
    """Not when it is first asked for, which is many batches ahead, whoever reads."""
    folder = make_tars(tmp_path / "tars", [300, 77, 400])
    (folder / "t0002.tar").unlink()
    found = []
    for reader in ("pread", "direct", "mmap"):
        options: Any = {"batch_size": 5, "chunk_bytes": 20_000, "shuffle": "off", "reader": reader}
        with Loader(folder, output="numpy", **options) as loader:
            seen: list[Any] = []
            with pytest.raises(StorageError, match=r"t0002\.tar"):
                seen.extend(batch["__key__"] for batch in loader)
        found.append(len(seen))
    assert found == [found[0]] * 3
    assert found[0] > 60  # of 75 before it


@pytest.mark.parametrize("workers", WORKERS)
def test_a_group_that_is_damaged_from_end_to_end_is_skipped_too(workers: str, tmp_path: Path) -> None:
    folder = make_tokens(tmp_path / "corpus", [[500] * 20] * 3)
    sound = rows_of(load(folder, workers=workers, shuffle="off"))
    flip_a_byte(min(folder.glob("*.bin")), 100)
    with load(folder, workers=workers, shuffle="off", on_corrupt="skip") as loader:
        found, skipped = rows_of(loader), loader.report().skipped_samples
        again = rows_of(loader)
    changed = [number for number, (one, other) in enumerate(zip(found, sound, strict=True)) if one != other]
    assert changed == list(range(skipped))
    assert all(row in sound for row in found)
    assert again == found


def test_a_dataset_that_is_damaged_throughout_says_so(tmp_path: Path) -> None:
    folder = make_tokens(tmp_path / "corpus", [[500] * 4])
    for path in folder.glob("*.bin"):
        path.write_bytes(bytes(path.stat().st_size))
    with (
        load(folder, on_corrupt="skip") as loader,
        pytest.raises(Exception, match="samples of a group of batches are damaged"),
    ):
        list(loader)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_loader_used_again_after_close_closes_its_files_again(workers: str, corpus: Path) -> None:
    def open_files() -> int:
        return sum(str(corpus) in os.readlink(f"/proc/self/fd/{fd}") for fd in _descriptors())

    loader = load(corpus, workers=workers)
    for length in (1, 3, 7):
        for number, _ in enumerate(loader):
            if number == length:
                break
        loader.close()
        assert open_files() == 0


def _descriptors() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{fd}").is_symlink()]


def test_numbers_of_numpy_are_numbers(corpus: Path) -> None:
    names = {"batch_size": 4, "seq_len": 32, "seed": 3, "lanes": 6, "window": 2, "chunk_bytes": 2048}
    with load(corpus, **{name: np.int64(value) for name, value in names.items()}) as loader:
        state = json.loads(json.dumps(loader.state_dict()))
        found = rows_of(loader)
    with load(corpus, **names) as plain:
        plain.load_state_dict(state)
        assert rows_of(plain) == found
    with pytest.raises(UsageError, match="seed=None"):
        load(corpus, seed=None)


def test_buffers_of_batches_once_kept_are_given_back() -> None:
    buffers = Buffers()
    kept = [buffers.take((4, 8), np.dtype(np.int64)) for _ in range(50)]
    assert len(buffers) == 50
    del kept
    for _ in range(200):
        buffers.take((4, 8), np.dtype(np.int64))
    assert len(buffers) == 1
