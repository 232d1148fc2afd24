"""stoker behind torch.distributed.checkpoint: its calls, our files."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from stoker.checkpoint.dcp import Reader, Stager, Writer
from stoker.checkpoint.saved.commit import OWNER, begin, this_owner
from stoker.errors import BadCheckpointError


@pytest.fixture(autouse=True)
def _alone() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that there is one process only
        yield


def blank(job: Any) -> dict[str, Any]:
    """The state of another job, to be loaded into."""
    job.step()
    return {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict(), "note": ""}


def test_what_dcp_saves_through_us_dcp_loads_through_us(make_job, same, tmp_path) -> None:
    job, other = make_job(), make_job(seed=1)
    job.step()
    state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict(), "note": "hello"}
    dcp.save(state, storage_writer=Writer(tmp_path, step=7))
    into = blank(other)
    dcp.load(into, storage_reader=Reader(tmp_path))
    assert same(job.state(), other.state())
    assert into["note"] == "hello"


def test_dcp_loads_what_a_checkpointer_saved(make_job, open_checkpointer, tmp_path) -> None:
    job, other = make_job(), make_job(seed=1)
    job.step()
    with open_checkpointer() as checkpointer:
        checkpointer.save(3, **job.objects)
    into = {"model": other.model.state_dict()}
    dcp.load(into, storage_reader=Reader(tmp_path / "run"))
    assert torch.equal(into["model"]["0.weight"], job.model[0].weight)


def test_a_checkpointer_restores_what_dcp_saved(make_job, open_checkpointer, tmp_path) -> None:
    job, other = make_job(), make_job(seed=1)
    dcp.save({"model": job.model.state_dict()}, storage_writer=Writer(tmp_path / "run", step=7))
    with open_checkpointer() as checkpointer:
        assert checkpointer.restore(model=other.model).step == 7
    assert torch.equal(other.model[0].weight, job.model[0].weight)


def test_async_save_through_our_stager_keeps_what_was_staged(make_job, tmp_path) -> None:
    job = make_job()
    wanted, stager = job.model[0].weight.detach().clone(), Stager()
    saved = dcp.async_save(
        {"model": job.model.state_dict()}, storage_writer=Writer(tmp_path, step=1), async_stager=stager
    )
    with torch.no_grad():
        job.model[0].weight.add_(1)
    saved.result()
    stager.close()
    into = {"model": make_job(seed=1).model.state_dict()}
    dcp.load(into, storage_reader=Reader(tmp_path))
    assert torch.equal(into["model"]["0.weight"], wanted)


def test_a_flipped_bit_is_noticed_by_dcp_load(make_job, tmp_path) -> None:
    job = make_job()
    dcp.save({"model": job.model.state_dict()}, storage_writer=Writer(tmp_path))
    (path,) = tmp_path.glob("*/part-00000.bin")
    data = bytearray(path.read_bytes())
    data[77] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointException, match="is damaged at bytes"):
        dcp.load({"model": job.model.state_dict()}, storage_reader=Reader(tmp_path))


def test_an_empty_folder_is_a_clear_error(tmp_path) -> None:
    with pytest.raises(BadCheckpointError, match="no whole checkpoint"):
        Reader(tmp_path).read_metadata()


def test_more_than_a_chunk_goes_through_dcp(tmp_path) -> None:
    state = {"w": torch.arange(3_000_000), "v": torch.ones(77)}
    stager = Stager()
    dcp.async_save(state, storage_writer=Writer(tmp_path), async_stager=stager).result()
    stager.close()
    into = {"w": torch.zeros(3_000_000, dtype=torch.int64), "v": torch.zeros(77)}
    dcp.load(into, storage_reader=Reader(tmp_path))
    assert torch.equal(into["w"], state["w"])


def unfinished(folder: Path) -> list[str]:
    return [path.name for path in folder.glob(".saving-*")]


def test_what_a_killed_save_left_goes_with_the_next_through_dcp(tmp_path) -> None:
    killed = begin(tmp_path, step=1, sequence=1).folder(tmp_path)
    (killed / "part-00000.bin").write_bytes(b"half")
    (killed / OWNER).write_text(json.dumps(this_owner() | {"started": "before"}))
    begin(tmp_path, step=1, sequence=1)  # its process lives
    dcp.save({"w": torch.ones(3)}, storage_writer=Writer(tmp_path))
    assert killed.name not in unfinished(tmp_path)
    assert len(unfinished(tmp_path)) == 1


class Opaque:
    """Nothing that a checkpoint can hold."""


def test_a_save_through_dcp_that_fails_leaves_nothing(tmp_path) -> None:
    with pytest.raises(CheckpointException, match="which a checkpoint cannot hold"):
        dcp.save({"w": torch.ones(3), "v": Opaque()}, storage_writer=Writer(tmp_path))
    assert unfinished(tmp_path) == []


def test_a_commit_through_dcp_that_fails_leaves_nothing(tmp_path) -> None:
    class Cut(Writer):
        def finish(self, metadata: Any, results: Any) -> None:
            (part,) = tmp_path.glob(".saving-*/part-00000.bin")
            part.write_bytes(b"less")
            super().finish(metadata, results)

    with pytest.raises(CheckpointException, match="is 4 bytes here"):
        dcp.save({"w": torch.ones(3)}, storage_writer=Cut(tmp_path))
    assert unfinished(tmp_path) == []


class Pair(NamedTuple):
    one: Any
    other: Any


def test_a_stager_copies_whatever_can_change() -> None:
    array, names, stager = np.ones(3), {"a"}, Stager()
    state = {"pair": Pair(torch.ones(2), array), "rng": array, "names": names, "size": torch.Size([2, 3])}
    staged = stager.stage(state)
    array[:] = 7
    names.add("b")
    state["pair"].one.zero_()
    assert type(staged["pair"]) is Pair
    assert staged["pair"].one.tolist() == [1, 1]
    assert staged["pair"].other.tolist() == staged["rng"].tolist() == [1, 1, 1]
    assert (staged["names"], staged["size"]) == ({"a"}, torch.Size([2, 3]))
    stager.close()
