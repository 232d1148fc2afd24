"""Full and read-only disks, a real object store that goes away and comes back, the command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.checkpoint.saved.tiers import Tiers
from stoker.errors import CheckpointError, StorageError
from stoker.storage import open_store
from stoker.world import World

sys.path.insert(0, str(Path(__file__).parent.parent))

from clusters import wait_until
from s3_server import S3Server, serve

pytestmark = pytest.mark.integration


def state(value: float, elements: int = 5000) -> dict[str, torch.Tensor]:
    return {f"w{at}": torch.full((elements,), value) for at in range(3)}


def save(checkpointer: stoker.Checkpointer, step: int, **more: Any) -> None:
    checkpointer.save(step, state=state(step), **more)
    checkpointer.wait()


# --- disks ----------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path, skip_or_fail: Any) -> Iterator[Path]:
    """A filesystem of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        skip_or_fail("a filesystem cannot be mounted here: run as root")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"max_host_bytes": 1 << 20}], ids=str)
def test_a_full_disk_is_known_before_the_first_byte_and_the_old_one_is_safe(
    small_disk: Path, options: dict[str, Any]
) -> None:
    checkpointer = stoker.Checkpointer(small_disk / "run", world=World(), **options)
    save(checkpointer, 1)
    checkpointer.save(2, state=state(2, elements=1_000_000))
    with pytest.raises(CheckpointError, match=r"cannot write .*: No space left on device") as caught:
        checkpointer.wait()
    assert "free space" in caught.value.hint
    back = state(0)
    assert checkpointer.restore(state=back).step == 1
    assert float(back["w0"][0]) == 1
    assert not list((small_disk / "run").glob(".saving*"))
    save(checkpointer, 3)  # what fits goes on
    checkpointer.close()


def test_a_disk_that_became_read_only_is_named_and_the_old_one_is_safe(small_disk: Path) -> None:
    checkpointer = stoker.Checkpointer(small_disk / "run", world=World())
    save(checkpointer, 1)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    checkpointer.save(2, state=state(2))
    with pytest.raises(CheckpointError, match="Read-only file system"):
        checkpointer.wait()
    assert checkpointer.latest().step == 1
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    save(checkpointer, 3)
    checkpointer.close()
    assert checkpointer.latest().step == 3


# --- an object store ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3(require_binary: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    rclone, nginx = require_binary("rclone"), require_binary("nginx")
    with serve(tmp_path_factory.mktemp("s3"), rclone=rclone, nginx=nginx) as server:
        yield server


@pytest.fixture
def remote(s3: S3Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    for name, value in s3.environ().items():
        monkeypatch.setenv(name, value)
    return f"s3://bucket/{request.node.name}"


def test_checkpoints_drain_to_the_store_and_come_back_from_it(remote: str, tmp_path: Path) -> None:
    options = {"remote": remote, "keep": 2, "chunk_bytes": 8192, "world": World()}
    with stoker.Checkpointer(tmp_path / "run", **options) as checkpointer:
        for step in (1, 2, 3, 4):
            save(checkpointer, step, note=f"step {step}")
    store = open_store(remote)
    assert len(Tiers(root=tmp_path / "none", remote=store).remote_names()) <= 2
    back = state(0)
    with stoker.Checkpointer(tmp_path / "elsewhere", **options) as checkpointer:
        restored = checkpointer.restore(state=back)
    assert (restored.step, restored.extras["note"], float(back["w2"][-1])) == (4, "step 4", 4)


def test_a_damaged_object_is_noticed_and_the_older_one_taken(
    remote: str, s3: S3Server, tmp_path: Path
) -> None:
    options = {"remote": remote, "chunk_bytes": 8192, "world": World()}
    for step in (1, 2):
        with stoker.Checkpointer(tmp_path / "run", **options) as checkpointer:
            save(checkpointer, step)
    folder = s3.root / remote.removeprefix("s3://")
    path = max(folder.iterdir()) / "part-00000.bin"
    data = bytearray(path.read_bytes())
    data[9000] ^= 4
    path.write_bytes(data)
    back = state(0)
    with (
        stoker.Checkpointer(tmp_path / "elsewhere", **options) as checkpointer,
        pytest.warns(RuntimeWarning, match="was skipped: .* is damaged"),
    ):
        restored = checkpointer.restore(state=back)
    assert (restored.step, float(back["w0"][0])) == (1, 1)
    assert "is damaged" in restored.skipped[0]


def test_a_store_that_is_away_for_a_while_gets_the_newest_when_it_is_back(
    remote: str, s3: S3Server, tmp_path: Path
) -> None:
    bucket, hidden = s3.root / "bucket", s3.root / "away"
    checkpointer = stoker.Checkpointer(tmp_path / "run", remote=remote, timeout_s=30, world=World())
    save(checkpointer, 1)
    wait_until(lambda: checkpointer.report().drained == 1, "the first is drained")
    bucket.rename(hidden)
    bucket.write_text("a file, into which nobody can write objects")
    save(checkpointer, 2)  # the loop does not notice
    save(checkpointer, 3)
    bucket.unlink()
    hidden.rename(bucket)
    checkpointer.close()
    assert Tiers(root=tmp_path / "none", remote=open_store(remote)).latest(skipped=[]).step == 3


def test_a_store_that_stays_away_is_an_error_and_the_local_ones_stay(
    remote: str, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    checkpointer = stoker.Checkpointer(
        tmp_path / "run", remote=remote, keep=1, timeout_s=0.2, on_drain_failure="raise", world=World()
    )
    checkpointer.save(1, state=state(1))
    with pytest.raises(CheckpointError, match=r"not in the remote tier: cannot .* s3://bucket") as caught:
        checkpointer.close()
    assert "AWS_SECRET_ACCESS_KEY" in caught.value.hint
    assert Tiers(root=tmp_path / "run").latest(skipped=[]).step == 1


def test_a_store_that_cannot_be_read_is_no_fresh_start(
    remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stoker.Checkpointer(tmp_path / "run", remote=remote, world=World()) as checkpointer:
        save(checkpointer, 1)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with (
        stoker.Checkpointer(tmp_path / "elsewhere", remote=remote, world=World()) as checkpointer,
        pytest.raises(StorageError, match="cannot list"),
    ):
        checkpointer.restore(state=state(0))
    with (
        stoker.Checkpointer(tmp_path / "run", remote=remote, world=World()) as checkpointer,
        pytest.warns(RuntimeWarning, match="the remote tier: cannot list"),
    ):
        restored = checkpointer.restore(state=state(0))
    assert (restored.step, len(restored.skipped)) == (1, 1)


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with stoker.Checkpointer(tmp_path / "run", chunk_bytes=4096, world=World()) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, model=torch.nn.Linear(40, 50), epoch=step)
            checkpointer.wait()
    return tmp_path / "run"


def test_ls_and_verify_tell_whole_from_damaged(run: Path, run_stoker: Callable[..., Any]) -> None:
    older, newer = sorted(path.name for path in run.iterdir())
    rows = json.loads(run_stoker("checkpoint", "ls", run, "--json", "--tensors").stdout)
    assert [(row["name"], row["step"], row["whole"]) for row in rows["checkpoints"]] == [
        (newer, 2, True),
        (older, 1, True),
    ]
    assert [one["name"] for one in rows["tensors"]] == ["model.weight", "model.bias"]
    path = run / newer / "part-00000.bin"
    path.write_bytes(path.read_bytes()[:-8] + b"damaged!")
    ran = run_stoker("checkpoint", "verify", run)
    assert (ran.rc, "is damaged at bytes 8,192 to" in ran.stdout) == (1, True)
    path.unlink()
    assert (
        "not usable; local: part-00000.bin of" in run_stoker("checkpoint", "ls", run).stdout.splitlines()[0]
    )
    ran = run_stoker("checkpoint", "verify", run)
    assert (ran.rc, ran.stdout.startswith(f"{older} is whole")) == (0, True)


def test_export_diff_and_gc(run: Path, run_stoker: Callable[..., Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    older, newer = sorted(path.name for path in run.iterdir())
    assert run_stoker("checkpoint", "export", run, "--out", tmp_path / "out").rc == 0
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"weight", "bias"}
    said = run_stoker("checkpoint", "diff", run, older, newer).stdout
    assert "model.weight: 2,000 of 2,000 elements differ, by" in said
    assert "epoch: 1 against 2" in said
    shutil.copytree(run / older, run / f".saving-{older}")
    owner = {"host": os.uname().nodename, "boot": "another", "pid": 1}
    (run / f".saving-{older}" / "owner.json").write_text(json.dumps(owner))
    said = run_stoker("checkpoint", "gc", run, "--keep", 1, "--dry-run").stdout
    assert ("is gone" in said, f"{older}  local: " in said) == (True, True)
    assert "newer ones, which were read back, stand in for it" in said
    assert run_stoker("checkpoint", "gc", run, "--keep", 1).stdout.count("\n") == 2
    assert [path.name for path in run.iterdir()] == [newer]


@pytest.mark.parametrize(
    ("arguments", "rc"),
    [(["verify", "nowhere"], 2), (["diff", ".", "no-such"], 2), (["verify", "."], 2), (["suspend", "1"], 1)],
    ids=str,
)
def test_what_cannot_work_is_said_without_a_traceback(
    arguments: list[str], rc: int, run_stoker: Callable[..., Any]
) -> None:
    ran = run_stoker("checkpoint", *arguments)
    assert (ran.rc, "Traceback" in ran.stderr, "hint: " in ran.stderr) == (rc, False, True)
