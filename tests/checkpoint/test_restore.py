"""Bringing objects back: from copies that cannot be read, into objects that are not quite those saved."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from stoker.errors import BadCheckpointError

# --- which checkpoint is taken ------------------------------------------------------------------------


@pytest.fixture
def bad_sector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the local part of the second save can be read; a disk that does so is hard to come by."""
    read = os.preadv

    def preadv(handle: int, buffers: list[memoryview], at: int) -> int:
        if "/run/000002" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(handle, buffers, at)

    monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.parametrize(("has_remote", "step"), [(True, 2), (False, 1)])
def test_a_disk_that_cannot_read_gives_way_to_the_next_good_copy(
    open_checkpointer, tmp_path: Path, bad_sector: None, has_remote: bool, step: int
) -> None:
    remote = str(tmp_path / "far") if has_remote else ""
    with open_checkpointer(remote=remote) as checkpointer:
        for number in (1, 2):
            checkpointer.save(number, state={"w": torch.full((3,), float(number))})
            checkpointer.wait()
    back = {"w": torch.zeros(3)}
    with pytest.warns(RuntimeWarning, match="cannot be read at bytes 0 to 64: .* Input/output error"):
        assert open_checkpointer(remote=remote).restore(state=back).step == step
    assert torch.equal(back["w"], torch.full((3,), float(step)))


def test_verifying_says_what_cannot_be_read(open_checkpointer, bad_sector: None) -> None:
    with open_checkpointer() as checkpointer:
        for number in (1, 2):
            checkpointer.save(number, state={"w": torch.ones(6000)})
            checkpointer.wait()
        faults = checkpointer.latest().verify()
    assert len(faults) == 6  # every chunk of it
    assert all("Input/output error" in fault for fault in faults)


def test_a_part_that_cannot_be_opened_is_a_fault(open_checkpointer, tmp_path: Path) -> None:
    with open_checkpointer() as checkpointer:
        checkpointer.save(1, state={"w": torch.ones(6000)})
        checkpointer.wait()
        found = checkpointer.latest()
        assert found.parts
        (tmp_path / "run" / found.name / "part-00000.bin").unlink()
        assert ["cannot be opened" in fault for fault in found.verify()] == [True]
        with pytest.raises(BadCheckpointError, match=r"part-00000\.bin of .* cannot be opened"):
            checkpointer.load(name=found.name)


@pytest.mark.parametrize("file", ["checkpoint.json", "part-00000.json", "part-00000.bin"])
def test_when_none_is_whole_there_is_no_fresh_start(open_checkpointer, tmp_path, file: str) -> None:
    with open_checkpointer() as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state={"w": torch.ones(3)})
            checkpointer.wait()
    for path in (tmp_path / "run").glob(f"0*/{file}"):
        os.truncate(path, 10)
    with pytest.raises(BadCheckpointError, match=r"could be restored: 000002.*; 000001") as caught:
        open_checkpointer().restore(state={"w": torch.zeros(3)})
    assert "to begin anew, delete them" in caught.value.hint
    assert "start again" not in caught.value.hint


def test_what_killed_saves_left_is_still_a_fresh_start(open_checkpointer, tmp_path) -> None:
    leftover = tmp_path / "run" / ".saving-000001-step-000000001-0a0a0a0a"
    leftover.mkdir(parents=True)
    (leftover / "part-00000.bin").write_bytes(bytes(10))
    (tmp_path / "run" / "notes").mkdir()
    assert open_checkpointer().restore(state={"w": torch.zeros(3)}).fresh
