"""What a save meets in a long run: interrupts, clean-ups of others, a remote tier that is away."""

from __future__ import annotations

import json
import shutil
import threading
import time
import weakref
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker.checkpoint.checkpointer import Checkpointer
from stoker.checkpoint.saved import commit
from stoker.checkpoint.saved.layout import step_of
from stoker.checkpoint.saved.retention import collect
from stoker.checkpoint.saved.tiers import Tiers, local_names
from stoker.checkpoint.snapshot.copy import Snapshot
from stoker.checkpoint.storm import Limits
from stoker.errors import CheckpointError, StorageError, UsageError
from stoker.world import World

CHUNK = 4096
SLOW = Limits(write_bytes_per_s=2_000_000)


def state(value: float) -> dict[str, torch.Tensor]:
    return {f"w{at}": torch.full((10_000,), value) for at in range(8)}


def values_in(checkpointer: Checkpointer, name: str) -> set[float]:
    return {
        float(one) for tensor in checkpointer.load(name=name)["state"].values() for one in tensor.unique()
    }


def parts_under_way(root: Path) -> list[Path]:
    return [*root.glob(".saving-*/part-*.bin")]


def test_an_interrupt_of_a_wait_is_no_failure_and_the_save_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(tmp_path / "run", chunk_bytes=CHUNK, limits=SLOW, world=World())
    checkpointer.save(1, state=state(1))
    with monkeypatch.context() as patched:
        patched.setattr(Future, "exception", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.wait()
    checkpointer.save(2, state=state(2))
    checkpointer.close()
    assert checkpointer.report().saves == 2
    older, newer = sorted(path.name for path in (tmp_path / "run").glob("0*"))
    assert (values_in(checkpointer, older), values_in(checkpointer, newer)) == ({1.0}, {2.0})


def test_an_interrupt_of_a_copy_ends_the_save_and_nothing_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(tmp_path / "run", chunk_bytes=CHUNK, world=World())
    with monkeypatch.context() as patched:
        patched.setattr(Snapshot, "copy", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(1, state=state(1))
    with suppress(CheckpointError):
        checkpointer.wait()
    checkpointer.save(2, state=state(2))
    checkpointer.close()
    assert [path.name[:6] for path in (tmp_path / "run").glob("0*")] == ["000002"]


def _interrupted(whatever: Any) -> None:
    raise KeyboardInterrupt


def test_a_save_whose_folder_somebody_removes_fails_and_the_one_before_stays(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with Checkpointer(root, chunk_bytes=CHUNK, keep=1, world=World()) as before:
        before.save(1, state=state(1))
    checkpointer = Checkpointer(root, chunk_bytes=CHUNK, keep=1, limits=SLOW, world=World())
    checkpointer.save(2, state=state(2))
    while not (under_way := parts_under_way(root)):
        time.sleep(0.005)
    shutil.rmtree(under_way[0].parent)
    with pytest.raises(CheckpointError, match="was removed"):
        checkpointer.close()
    (left,) = root.glob("0*")
    assert values_in(checkpointer, left.name) == {1.0}


def test_a_part_that_is_gone_when_the_save_is_committed_fails_it(tmp_path: Path) -> None:
    saving = commit.begin(tmp_path, step=1, sequence=1)
    manifest = commit.Manifest(name=saving.name, step=1, save=saving.save, parts=())
    with pytest.raises(CheckpointError, match="was removed"):
        commit.commit(tmp_path, saving, manifest, [], rank=0)


def test_a_save_of_another_container_of_the_pod_is_not_taken_for_dead(tmp_path: Path) -> None:
    """It has this host's name and boot, but its processes are not seen from here."""
    folder = commit.begin(tmp_path, step=1, sequence=1).folder(tmp_path)
    owner = commit.this_owner() | {"pid": 2**22, "pids": "pid:[1]"}
    (folder / commit.OWNER).write_text(json.dumps(owner))
    assert collect(tmp_path) == []


def test_a_save_that_cannot_be_signed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> Any:
        raise StorageError("no space left on device", hint="make room")

    monkeypatch.setattr(commit, "new_file", full)
    with pytest.raises(StorageError):
        commit.begin(tmp_path, step=1, sequence=1)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("restores", [True, False])
def test_checkpoints_stay_newer_than_those_of_a_remote_tier_that_is_away(
    restores: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = str(tmp_path / "far")
    with Checkpointer(tmp_path / "node-1", remote=far, keep=2, world=World()) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(step, state=state(step))
    with Checkpointer(tmp_path / "node-2", remote=far, keep=2, world=World()) as checkpointer:
        if restores:
            assert checkpointer.restore(state=state(0)).step == 5
        with monkeypatch.context() as patched:
            patched.setattr(Tiers, "names", _away)
            checkpointer.save(6, state=state(6))
            checkpointer.wait()
    with Checkpointer(tmp_path / "node-3", remote=far, world=World()) as checkpointer:
        assert checkpointer.restore(state=state(0)).step == 6


def _away(tiers: Tiers) -> list[str]:
    raise StorageError("the store is away", hint="wait for it")


@pytest.mark.parametrize("overlap", [False, True])
def test_what_was_saved_is_not_held_until_the_next_save(tmp_path: Path, overlap: bool) -> None:
    memory = np.ones((500, 300), np.float32)
    held = weakref.ref(memory)
    with Checkpointer(tmp_path, chunk_bytes=CHUNK, overlap=overlap, world=World()) as checkpointer:
        checkpointer.save(1, state={"w": torch.from_numpy(memory)})
        del memory
        while checkpointer.is_saving:
            time.sleep(0.01)
        assert held() is None


def test_a_relative_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with Checkpointer("run", remote="far", world=World()) as checkpointer:
        checkpointer.save(1, state=state(1))
        monkeypatch.chdir(tmp_path / "there")
        checkpointer.save(2, state=state(2))
    assert [*(tmp_path / "there").iterdir()] == []
    assert (
        len([*(tmp_path / "here" / "run").glob("0*")]) == len([*(tmp_path / "here" / "far").glob("0*")]) == 2
    )


@pytest.mark.filterwarnings("ignore:another job saves")
def test_two_jobs_in_one_folder_keep_their_own_newest_checkpoints_and_are_told(tmp_path: Path) -> None:
    with (
        Checkpointer(tmp_path, keep=2, world=World()) as patient,
        Checkpointer(tmp_path, keep=2, world=World()) as busy,
    ):
        patient.save(1, state=state(1))
        patient.wait()
        for step in range(100, 105):
            busy.save(step, state=state(2))
            busy.wait()
        patient.save(2, state=state(1))
        with pytest.warns(RuntimeWarning, match="another job saves into"):
            patient.wait()
        for step in range(105, 110):
            busy.save(step, state=state(2))
    assert sorted(map(step_of, local_names(tmp_path))) == [2, 108, 109]


def test_a_job_deletes_what_the_one_before_left(tmp_path: Path) -> None:
    for first in (1, 11):
        with Checkpointer(tmp_path, keep=2, world=World()) as checkpointer:
            for step in range(first, first + 3):
                checkpointer.save(step, state=state(1))
    assert sorted(map(step_of, local_names(tmp_path))) == [12, 13]


def test_a_second_thread_is_told_instead_of_hanging(tmp_path: Path) -> None:
    flattening, go_on = threading.Event(), threading.Event()

    class Slow:
        def state_dict(self) -> dict[str, Any]:
            flattening.set()
            assert go_on.wait(60)
            return {"n": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with Checkpointer(tmp_path / "run", world=World()) as saver:
        other = threading.Thread(target=lambda: saver.save(1, slow=Slow()))
        other.start()
        assert flattening.wait(60)
        with pytest.raises(UsageError, match="another thread is saving"):
            saver.save(2, slow=Slow())
        go_on.set()
        other.join()
        saver.wait()
        assert saver.report().saves == 1


def test_what_is_restored_in_inference_mode_can_be_trained(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())

    def train() -> None:
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()

    train()
    with Checkpointer(tmp_path / "run", world=World()) as saver, torch.inference_mode():
        saver.save(1, model=model, optimizer=optimizer)
        optimizer.state.clear()
        saver.restore(model=model, optimizer=optimizer)
    train()
    assert optimizer.state[model.weight]["step"] == 2
