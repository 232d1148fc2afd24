"""A real store that is away, silent or forbids: saving goes on, and what is owed is paid by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.checkpoint.saved.layout import step_of
from stoker.checkpoint.saved.tiers import local_names
from stoker.world import World

sys.path.insert(0, str(Path(__file__).parent.parent))

from clusters import wait_until
from gate import Gate, gate_before
from s3_server import S3Server

HERE = Path(__file__).parent


@pytest.fixture
def gate(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    with gate_before(s3.endpoint) as gate:
        for name, value in {**s3.environ(), "AWS_ENDPOINT_URL": gate.endpoint}.items():
            monkeypatch.setenv(name, value)
        yield gate


@pytest.fixture
def remote(request: pytest.FixtureRequest) -> str:
    return f"s3://bucket/{request.node.name.replace('[', '-').replace(']', '')}"


@pytest.fixture
def far(remote: str, s3: S3Server) -> Path:
    """The folder behind the remote tier."""
    return s3.root / remote.removeprefix("s3://")


def state(value: float) -> dict[str, torch.Tensor]:
    return {f"w{at}": torch.full((5000,), value) for at in range(3)}


def save(checkpointer: stoker.Checkpointer, *steps: int) -> None:
    for step in steps:
        checkpointer.save(step, state=state(step))
        checkpointer.wait()


def in_store(far: Path) -> list[int]:
    """The steps whose manifest is there, the newest first."""
    names = {path.parent.name for path in far.glob("*/checkpoint.json")} if far.is_dir() else set()
    return sorted(map(step_of, names), reverse=True)


def steps_in(root: Path) -> list[int]:
    return [step_of(name) for name in local_names(root)]


@pytest.mark.parametrize("mode", ["shut", "hole"])
def test_saving_goes_on_in_an_outage_and_the_end_of_it_needs_no_save(
    mode: str, gate: Gate, remote: str, far: Path, tmp_path: Path
) -> None:
    # on however busy a machine, no request of an open gate may take that long: nobody waits for that warning
    options = {"remote": remote, "keep": 2, "timeout_s": 5.0, "world": World()}
    checkpointer = stoker.Checkpointer(tmp_path / "run", **options)
    save(checkpointer, 1)
    wait_until(lambda: checkpointer.report().drained == 1, "the first is drained")
    gate.mode = mode
    with pytest.warns(RuntimeWarning, match="saved here, and not in the remote tier") as said:  # noqa: PT031
        save(checkpointer, *range(2, 24))
        wait_until(lambda: checkpointer.wait() or len(said) > 0, "the loop is told")
    root = tmp_path / "run"
    wait_until(lambda: len(steps_in(root)) <= 3, "older ones are deleted")  # one is being uploaded
    assert steps_in(root)[:2] == [23, 22]
    assert (checkpointer.report().failed, step_of(checkpointer.report().owed)) == (0, 23)
    gate.mode = "open"
    wait_until(lambda: in_store(far)[:1] == [23], "what is owed is paid", seconds=60)
    checkpointer.close()
    assert len(said) == 1  # once for the outage


def test_a_black_hole_delays_neither_the_end_nor_a_restore_beyond_the_timeout(
    gate: Gate, remote: str, far: Path, tmp_path: Path
) -> None:
    options = {"remote": remote, "timeout_s": 2.0, "world": World()}
    gate.mode = "hole"
    checkpointer = stoker.Checkpointer(tmp_path / "run", **options)
    save(checkpointer, 1)
    began = time.monotonic()
    with pytest.warns(RuntimeWarning, match="stoker checkpoint push"):
        checkpointer.close()
    took_to_close, began = time.monotonic() - began, time.monotonic()
    back = state(0)
    with stoker.Checkpointer(tmp_path / "run", **options) as checkpointer:
        with pytest.warns(RuntimeWarning, match="the remote tier: cannot list"):
            assert checkpointer.restore(state=back).step == 1
        took_to_restore = time.monotonic() - began
    assert float(back["w0"][0]) == 1
    assert max(took_to_close, took_to_restore) < 60  # the client's own retries alone take 180


def test_a_restart_pays_what_the_run_before_owed(gate: Gate, remote: str, far: Path, tmp_path: Path) -> None:
    options = {"remote": remote, "keep": 1, "timeout_s": 1.0, "world": World()}
    gate.mode = "shut"
    checkpointer = stoker.Checkpointer(tmp_path / "run", **options)
    with pytest.warns(RuntimeWarning, match="saved here, and not in the remote tier"):  # noqa: PT031
        save(checkpointer, 1, 2)
        checkpointer.close()
    gate.mode = "open"
    with stoker.Checkpointer(tmp_path / "run", **{**options, "timeout_s": 30.0}) as checkpointer:
        checkpointer.restore(state=state(0))
        wait_until(lambda: in_store(far) == [2], "what is owed is paid", seconds=60)


def test_push_pays_what_a_run_owed(
    gate: Gate, remote: str, far: Path, tmp_path: Path, run_stoker: Callable[..., Any]
) -> None:
    with stoker.Checkpointer(tmp_path / "run", world=World()) as checkpointer:
        save(checkpointer, 1, 2)
    gate.mode = "shut"
    failed = run_stoker("checkpoint", "push", tmp_path / "run", "--remote", remote)
    assert (failed.rc, "Traceback" in failed.stderr) == (1, False)
    gate.mode = "open"
    for _ in range(2):  # again changes nothing
        assert run_stoker("checkpoint", "push", tmp_path / "run", "--remote", remote).rc == 0
        assert in_store(far) == [2]
    assert run_stoker("checkpoint", "verify", tmp_path / "none", "--remote", remote).rc == 0


def test_push_from_nodes_with_disks_of_their_own_is_complete_with_the_last(
    gate: Gate, remote: str, far: Path, tmp_path: Path, run_stoker: Any, run_ranks_job: Any
) -> None:
    run_ranks_job(tmp_path, "apart", "", "")
    first = run_stoker("checkpoint", "push", tmp_path / "node-0", "--remote", remote)
    assert (first.rc, "parts [1] of" in first.stderr, in_store(far)) == (1, True, [])
    assert run_stoker("checkpoint", "push", tmp_path / "node-1", "--remote", remote).rc == 0
    assert in_store(far) == [1]


def test_who_may_not_delete_in_the_store_goes_on_and_is_told_once(
    gate: Gate, remote: str, far: Path, tmp_path: Path
) -> None:
    gate.mode = "keep"
    options = {"remote": remote, "keep": 1, "on_failure": "raise", "world": World()}
    with (  # noqa: PT031 - whichever call comes after a failed deletion
        pytest.warns(RuntimeWarning, match="older ones were not deleted: cannot") as said,
        stoker.Checkpointer(tmp_path / "run", **options) as checkpointer,
    ):
        for step in range(1, 5):
            save(checkpointer, step)
            wait_until(lambda step=step: checkpointer.report().drained == step, "it is drained")
    assert gate.denied >= 2
    assert len({str(one.message) for one in said}) == len(said) <= 3
    assert (steps_in(tmp_path / "run"), in_store(far)) == ([4], [4, 3, 2, 1])
    gate.mode = "open"
    with stoker.Checkpointer(tmp_path / "run", **options) as checkpointer:
        save(checkpointer, 5)
    assert in_store(far) == [5]


# --- a disk that is full --------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path, skip_or_fail: Any) -> Iterator[Path]:
    """A filesystem of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        skip_or_fail("a filesystem cannot be mounted here: run as root")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_an_outage_does_not_fill_the_disk(gate: Gate, remote: str, far: Path, small_disk: Path) -> None:
    gate.mode = "shut"
    options = {"remote": remote, "keep": 2, "timeout_s": 600.0, "world": World()}
    checkpointer = stoker.Checkpointer(small_disk / "run", **options)
    save(checkpointer, *range(1, 120))  # seven megabytes in all
    gate.mode = "open"
    checkpointer.close()
    assert (checkpointer.report().failed, in_store(far)[:1]) == (0, [119])


def test_a_disk_that_somebody_fills_stops_saving_only_while_it_is_full(
    gate: Gate, remote: str, far: Path, small_disk: Path
) -> None:
    options = {"remote": remote, "keep": 2, "on_failure": "warn", "world": World()}
    checkpointer = stoker.Checkpointer(small_disk / "run", **options)
    save(checkpointer, 1, 2)
    filler, free = small_disk / "filler", os.statvfs(small_disk)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)
    with pytest.warns(RuntimeWarning, match="was not saved: cannot write"):
        save(checkpointer, 3)
    filler.unlink()
    save(checkpointer, 4)
    checkpointer.close()
    assert (steps_in(small_disk / "run"), in_store(far)[0]) == ([4, 2], 4)
    assert [path.name for path in (small_disk / "run").iterdir() if path.name.startswith(".")] == []


def test_a_full_disk_of_a_run_with_a_budget_makes_room_for_itself(small_disk: Path) -> None:
    options = {"keep": 0, "max_local_bytes": 300_000, "world": World()}
    with stoker.Checkpointer(small_disk / "run", **options) as checkpointer:
        save(checkpointer, *range(1, 120))
    assert (checkpointer.report().failed, steps_in(small_disk / "run")[0]) == (0, 119)


# --- both tiers, looked at ------------------------------------------------------------------------


def test_ls_and_verify_look_at_both_copies(
    gate: Gate, remote: str, far: Path, tmp_path: Path, run_stoker: Callable[..., Any]
) -> None:
    with stoker.Checkpointer(tmp_path / "run", remote=remote, world=World()) as checkpointer:
        save(checkpointer, 1)
    (path,) = far.glob("*/part-00000.bin")
    data = bytearray(path.read_bytes())
    data[9000] ^= 4
    path.write_bytes(data)
    both = (tmp_path / "run", "--remote", remote)
    ran = run_stoker("checkpoint", "verify", *both)
    assert (ran.rc, "is whole, local:" in ran.stdout, "remote: part-00000.bin" in ran.stdout) == (
        1,
        True,
        True,
    )
    path.write_bytes(data[:-9])
    (row,) = json.loads(run_stoker("checkpoint", "ls", *both, "--json").stdout)["checkpoints"]
    assert (row["whole"], row["tiers"], [*row["faults"]]) == (True, "local+remote", ["remote"])


# --- requests -------------------------------------------------------------------------------------


@pytest.fixture
def run_ranks_job(stoker_environ: Any) -> Callable[..., str]:
    def run(*arguments: object) -> str:
        done = subprocess.run(
            [sys.executable, str(HERE / "requests_job.py"), *map(str, arguments)],
            env=stoker_environ(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="FATAL"),
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


@pytest.mark.parametrize("ranks", [(2, 4), pytest.param((2, 4, 8, 16), marks=pytest.mark.slow)], ids=str)
def test_requests_of_a_restore_grow_with_what_is_read(
    ranks: tuple[int, ...], s3: S3Server, credentials: None, tmp_path: Path, run_ranks_job: Any
) -> None:
    log, remote = s3.root.parent / "access.log", f"s3://bucket/requests-{len(ranks)}"
    counts = json.loads(run_ranks_job(tmp_path, "count", remote, log, *ranks))
    # a listing, the manifest, the sizes; of every rank its description and its one chunk
    assert counts == {str(one): 3 + 2 * one for one in ranks}


def test_a_thousand_checkpoints_are_listed_by_one_request_each_and_a_few_for_all(
    s3: S3Server, gate: Gate, remote: str, far: Path, tmp_path: Path, run_stoker: Callable[..., Any]
) -> None:
    with stoker.Checkpointer(tmp_path / "run", remote=remote, world=World()) as checkpointer:
        save(checkpointer, 1)
    (one,) = far.iterdir()
    for number in range(2, 61):
        copy = far / one.name.replace("000001-", f"{number:06d}-", 1)
        copy.mkdir()
        for path in one.iterdir():
            (copy / path.name).write_bytes(path.read_bytes())
    log = s3.root.parent / "access.log"
    before = log.stat().st_size
    rows = json.loads(run_stoker("checkpoint", "ls", tmp_path / "none", "--remote", remote, "--json").stdout)
    with log.open() as lines:
        lines.seek(before)
        asked = len(lines.readlines())
    assert (len(rows["checkpoints"]), asked) == (60, 61)
