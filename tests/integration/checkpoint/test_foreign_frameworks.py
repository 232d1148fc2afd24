"""Checkpoints as the frameworks themselves write and read them: Hugging Face, Lightning, Megatron."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from s3_server import free_ports

import stoker
from stoker.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.integration

HERE = Path(__file__).parent


@pytest.fixture
def run_job(stoker_environ: Any, skip_or_fail: Any) -> Callable[..., None]:
    """Run a script beside this file, where the framework is installed."""

    def run(package: str, script: str, *arguments: object) -> None:
        if importlib.util.find_spec(package) is None:
            skip_or_fail(f"{package} is not installed: `make venv` brings it")
        command = [sys.executable, str(HERE / script), *map(str, arguments)]
        environ = stoker_environ(OMP_NUM_THREADS="1")
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]

    return run


@pytest.mark.parametrize(("package", "name"), [("transformers", "hugging_face"), ("lightning", "lightning")])
def test_what_they_save_comes_in(package: str, name: str, run_job: Any, tmp_path: Path) -> None:
    run_job(package, "frameworks_job.py", name, tmp_path)


def test_sharded_ranks_begin_with_what_was_saved_whole_and_hear_of_damage_alike(
    tmp_path: Path, stoker_environ: Any
) -> None:
    state = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).state_dict()
    torch.save(state, tmp_path / "truth.pt")
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "bad.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-9])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, HERE / "source_job.py", tmp_path],
        env=stoker_environ(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        assert "bad.safetensors cannot be used" in (tmp_path / f"said-{rank}").read_text()


def test_an_import_that_is_killed_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, stoker_environ: Any
) -> None:
    kills = 40
    command = [sys.executable, HERE / "kill_import_job.py", tmp_path / "here", str(kills), "7"]
    environ = stoker_environ(OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["cut"] + report["committed"] == kills
    assert report["cut"] > 0
    assert report["left"] == []


def test_a_torch_dist_checkpoint_of_megatron_comes_in(run_job: Any, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    run_job("megatron", "megatron_job.py", tmp_path / "megatron" / "iter_0000100", port)
    model = {"decoder.weight": torch.zeros(3, 4)}
    with stoker.Checkpointer(tmp_path / "run", world=World()) as ck:
        restored = ck.restore(source=tmp_path / "megatron", model=model)
    assert (restored.step, restored.extras["args"]) == (100, {"lr": 1e-3, "layers": 2})
    assert model["decoder.weight"].flatten().tolist() == list(range(12))
