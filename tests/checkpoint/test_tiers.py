"""Near and far: what is drained, what may be deleted, what dead runs left."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from stoker.checkpoint.drain import _LONGEST_YIELD_S
from stoker.checkpoint.saved.commit import begin, this_owner
from stoker.checkpoint.saved.layout import step_of
from stoker.checkpoint.saved.retention import collect, remote_garbage
from stoker.checkpoint.saved.tiers import Tiers, remote_names
from stoker.errors import CheckpointError
from stoker.storage import open_store

NAMES = [f"{at:06d}-step-{at:09d}-0000000{at}" for at in range(9, 0, -1)]


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return {f"w{at}": torch.randn(2000) for at in range(3)}


def test_a_save_is_drained_and_comes_back_from_the_remote_tier_alone(
    open_checkpointer, state, tmp_path: Path
) -> None:
    far = str(tmp_path / "far")
    with open_checkpointer(remote=far, keep=2) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state=state)
            checkpointer.wait()
    assert checkpointer.report().drained >= 1
    back = {key: torch.zeros_like(one) for key, one in state.items()}
    with open_checkpointer(root=tmp_path / "new-machine", remote=far) as checkpointer:
        assert checkpointer.restore(state=back).step == 3
        assert all(torch.equal(back[key], state[key]) for key in state)
        checkpointer.save(4, state=state)  # the sequence goes on though nothing is here
    assert Tiers(root=tmp_path / "none", remote=open_store(far)).latest(skipped=[]).step == 4


def test_a_damaged_local_copy_gives_way_to_the_remote_one(open_checkpointer, state, tmp_path: Path) -> None:
    with open_checkpointer(remote=str(tmp_path / "far")) as checkpointer:
        checkpointer.save(1, state=state)
    (path,) = (tmp_path / "run").glob("*/part-00000.bin")
    path.write_bytes(bytes(path.stat().st_size))
    back = {key: torch.zeros_like(one) for key, one in state.items()}
    checkpointer = open_checkpointer(remote=str(tmp_path / "far"))
    with pytest.warns(RuntimeWarning, match="is damaged"):
        restored = checkpointer.restore(state=back)
    assert (restored.step, len(restored.skipped)) == (1, 1)
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_in_an_outage_no_more_stay_here_than_are_kept_and_the_newest_is_owed(
    open_checkpointer, state, tmp_path: Path
) -> None:
    (tmp_path / "far").write_text("a file where the folder should be")
    options = {"keep": 2, "timeout_s": 0.1}
    checkpointer = open_checkpointer(remote=str(tmp_path / "far"), **options)
    with pytest.warns(RuntimeWarning, match="far"):  # noqa: PT031 - whichever call comes after a failed drain
        for step in range(1, 6):
            checkpointer.save(step, state=state)
            checkpointer.wait()
        checkpointer.close()
    assert [step_of(name) for name in Tiers(root=tmp_path / "run").names()] == [5, 4]
    (tmp_path / "far").unlink()
    with open_checkpointer(remote=str(tmp_path / "far"), keep=2) as checkpointer:  # and the next run pays
        checkpointer.restore(state=state)
    assert Tiers(root=tmp_path / "none", remote=open_store(tmp_path / "far")).latest(skipped=[]).step == 5


def test_what_an_outage_passed_over_is_brought_too_if_it_is_pinned(
    open_checkpointer, state, tmp_path: Path
) -> None:
    (tmp_path / "far").write_text("a file where the folder should be")
    checkpointer = open_checkpointer(remote=str(tmp_path / "far"), keep=1)
    for step in (1, 2, 3):
        checkpointer.save(step, pin="good" if step == 1 else "", state=state)
        checkpointer.wait()
    (tmp_path / "far").unlink()
    there: list[int] = []
    while there != [3, 1]:
        there = [step_of(name) for name in remote_names(open_store(tmp_path / "far"))]
        time.sleep(0.01)
    checkpointer.close()
    assert [step_of(name) for name in Tiers(root=tmp_path / "run").names()] == [3, 1]


def test_a_drain_yields_while_the_loader_is_busy(open_checkpointer, state, tmp_path: Path) -> None:
    asked: list[bool] = []

    def busy() -> bool:
        asked.append(len(asked) < 5)
        return asked[-1]

    with open_checkpointer(remote=str(tmp_path / "far"), busy=busy) as checkpointer:
        checkpointer.save(1, state=state)
        wait_for_drain(checkpointer)
    assert asked[:6] == [True] * 5 + [False]


def wait_for_drain(checkpointer) -> None:
    deadline = time.monotonic() + 60
    while not checkpointer.report().drained:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_drain_yields_to_nobody_once_the_loop_has_ended(open_checkpointer, state, tmp_path: Path) -> None:
    """A loader whose loop was left never has a batch ready: the exit would wait a minute for each chunk."""
    asked = threading.Event()

    def busy() -> bool:
        asked.set()
        return True

    with open_checkpointer(remote=str(tmp_path / "far"), busy=busy) as checkpointer:
        checkpointer.save(1, state=state)
        asked.wait()
        began = time.monotonic()
    assert checkpointer.report().drained == 1
    assert time.monotonic() - began < _LONGEST_YIELD_S / 2


class Loader:
    """Something that is saved and says that it is behind, a few times."""

    def __init__(self) -> None:
        self.asked = 0

    @property
    def is_behind(self) -> bool:
        self.asked += 1
        return self.asked < 4

    def state_dict(self) -> dict[str, int]:
        return {"position": 3}


def test_a_drain_yields_to_a_loader_that_is_saved(open_checkpointer, state, tmp_path: Path) -> None:
    loader = Loader()
    with open_checkpointer(remote=str(tmp_path / "far"), every=1) as checkpointer:
        checkpointer.step(1, state=state, loader=loader)
        wait_for_drain(checkpointer)
    assert loader.asked == 4


def test_what_the_disk_has_damaged_is_not_passed_on(open_checkpointer, state, tmp_path: Path) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def busy() -> bool:
        asked.set()
        return not go_on.is_set()

    checkpointer = open_checkpointer(remote=str(tmp_path / "far"), busy=busy)
    checkpointer.save(1, state=state)
    asked.wait()  # the first is being drained, the second waits
    checkpointer.wait()
    checkpointer.save(2, state=state)
    checkpointer.wait()
    path = Path(checkpointer.latest().folder.url) / "part-00000.bin"
    path.write_bytes(bytes(path.stat().st_size))
    go_on.set()
    with pytest.raises(CheckpointError, match="is damaged here at bytes 0 to 4,096"):
        checkpointer.close()
    assert Tiers(root=tmp_path / "none", remote=open_store(tmp_path / "far")).latest(skipped=[]).step == 1


# --- garbage --------------------------------------------------------------------------------------


def test_what_a_killed_run_left_is_collected_and_what_lives_is_not(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from stoker.checkpoint.saved.commit import begin;"
        "begin(Path(sys.argv[1]), step=1, sequence=1)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    mine = begin(tmp_path, step=2, sequence=2)
    (found,) = collect(tmp_path)
    assert found.name.startswith(".saving-000001")
    assert "is gone" in found.why
    assert [path.name for path in tmp_path.iterdir()] == [f".saving-{mine.name}"]


def test_a_save_of_another_machine_is_dead_only_when_silent(tmp_path: Path) -> None:
    saving = begin(tmp_path, step=1, sequence=1)
    owner = {**this_owner(), "host": "elsewhere"}
    (saving.folder(tmp_path) / "owner.json").write_text(json.dumps(owner))
    assert collect(tmp_path) == []
    (found,) = collect(tmp_path, silent_s=-1)
    assert "nobody has touched it" in found.why


def test_an_upload_that_a_dead_run_left_is_collected_by_the_next(
    open_checkpointer, state, tmp_path: Path
) -> None:
    far = open_store(tmp_path / "far")
    half = f"{NAMES[-1].replace('000001-', '000000-', 1)}/part-00000.bin"
    far.write(half, b"half")
    assert remote_garbage(far) == []  # nothing newer is whole: somebody may still be at it
    for step in (1, 2):
        with open_checkpointer(remote=str(tmp_path / "far")) as checkpointer:
            checkpointer.save(step, state=state)
        assert half not in {entry.path for entry in far.list()}
        far.write(half, b"half")
        (found,) = remote_garbage(far)
        assert (found.bytes, found.name[:6]) == (4, "000000")
