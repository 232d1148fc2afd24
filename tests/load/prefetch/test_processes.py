"""Worker processes: the same batches, faults named, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from small_datasets import make_tars

from stoker.errors import StorageError, TaskError, UsageError
from stoker.load.loader import Loader
from stoker.load.prefetch.ring import make_ring, plan_ring

pytestmark = pytest.mark.integration

SHM, FILES = Path("/dev/shm"), Path("/tmp")


def number(sample):
    return {"number": int(sample["id.txt"]), "array": np.full(1000, int(sample["id.txt"]) % 256, np.uint8)}


def fail_on_17(sample):
    if sample["id.txt"] == b"17":
        raise ValueError("seventeen")
    return number(sample)


def die_on_17(sample):
    if sample["id.txt"] == b"17":
        os.kill(os.getpid(), signal.SIGKILL)
    return number(sample)


def die_once(sample):
    mark = Path(os.environ["STOKER_TEST_MARK"])
    if sample["id.txt"] == b"17" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    return number(sample)


def huge(sample):
    return {"array": np.zeros(3 << 20, np.uint8), "number": int(sample["id.txt"])}


@pytest.fixture
def tars(tmp_path):
    return make_tars(tmp_path / "tars", [20, 3, 17])


def load(folder, **options):
    given = {"batch_size": 3, "transform": number, "workers": "process", "output": "numpy", "memory": 8 << 20}
    return Loader(folder, **{**given, **options})


def numbers(loader):
    return [batch["number"].tolist() for batch in loader]


def test_processes_give_the_same_batches_as_threads_over_two_epochs(tars):
    with load(tars) as processes, load(tars, workers="thread") as threads:
        assert numbers(processes) == numbers(threads)
        assert numbers(processes) == numbers(threads)


def test_processes_resume_from_a_state_of_threads(tars):
    with load(tars, workers="thread") as threads:
        it = iter(threads)
        next(it)
        state, rest = threads.state_dict(), numbers(it)
    with load(tars) as processes:
        processes.load_state_dict(state)
        assert numbers(processes) == rest


def test_an_error_in_a_worker_reaches_the_loop(tars):
    with load(tars, transform=fail_on_17) as loader, pytest.raises(ValueError, match="seventeen"):
        numbers(loader)


def test_a_dead_worker_is_named_with_its_sample(tars):
    with load(tars, transform=die_on_17) as loader, pytest.raises(TaskError) as error:
        numbers(loader)
    assert "SIGKILL" in error.value.message
    assert "s000017" in error.value.message


def test_a_dead_worker_can_be_restarted_and_nothing_is_lost(tars, tmp_path, monkeypatch):
    monkeypatch.setenv("STOKER_TEST_MARK", str(tmp_path / "mark"))
    with load(tars, transform=die_once, on_worker_death="restart") as loader:
        found = numbers(loader)
        second = numbers(loader)
    with load(tars, workers="inline") as inline:
        assert found == numbers(inline)
        assert second == numbers(inline)


def test_a_worker_that_always_dies_is_given_up(tars):
    with (
        load(tars, transform=die_on_17, on_worker_death="restart") as loader,
        pytest.raises(TaskError, match="3 times"),
    ):
        numbers(loader)


def test_batches_larger_than_a_slot_come_through_too(tars):
    with load(tars, transform=huge) as loader:
        assert next(iter(loader))["array"].shape == (3, 3 << 20)


def test_a_transform_that_cannot_travel_is_said(tars):
    with (
        load(tars, transform=lambda sample: sample) as loader,
        pytest.raises(UsageError, match="cannot be sent"),
    ):
        next(iter(loader))


@pytest.mark.parametrize(
    ("free", "folder", "slots"),
    [(1 << 30, SHM, 4), (40 << 20, SHM, 2), (8 << 20, SHM, 2), (100 << 10, FILES, 4), (0, FILES, 4)],
)
def test_a_ring_is_fitted_to_what_shm_has_left(free, folder, slots):
    plan = plan_ring(wanted=32 << 20, free=free, rings=1, shm=SHM, files=FILES)
    assert (plan.folder, plan.slots) == (folder, slots)
    if folder == SHM:
        assert plan.bytes <= free


def test_the_space_of_a_ring_is_really_there(tmp_path):
    ring = make_ring(wanted=4 << 20, rings=1, files=tmp_path)
    try:
        assert os.fstat(ring.handle).st_blocks * 512 >= ring.plan.bytes
        assert os.fstat(ring.handle).st_nlink == 0
    finally:
        ring.close()


def test_no_room_anywhere_is_an_error_with_a_hint(tmp_path, monkeypatch):
    def full(handle, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match="no room") as error:
        make_ring(wanted=4 << 20, rings=1, files=tmp_path)
    assert "shm" in error.value.hint


def test_killing_the_parent_leaves_no_process_and_no_segment(tars, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, time
            sys.path[:0] = sys.argv[2:]
            from test_processes import load
            if __name__ == "__main__":
                loader = load(sys.argv[1])
                next(iter(loader))
                print(*loader._pipeline.pids, flush=True)
                time.sleep(60)
            """
        )
    )
    beside = map(str, Path(__file__).parents[:2])
    parent = subprocess.Popen([sys.executable, script, tars, *beside], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    used = segments(parent.pid).union(*map(segments, pids))
    parent.kill()
    parent.communicate()
    assert len(pids) == 2
    wait_until(lambda: not any(alive(pid) for pid in pids))
    assert [path for path in used if path.exists()] == []


def segments(pid):
    """What a process maps of /dev/shm, where tests beside this one come and go."""
    fields = (line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return {Path(at[5]) for at in fields if at[5:] and at[5].startswith("/dev/shm/")}


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
