"""However the ranks of a job are started, each sample is read once; and sources that disagree are refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from slurm_cluster import slurm_cluster

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "load"))

from small_datasets import make_tokens  # noqa: E402 - the path to it is set just above

import stoker  # noqa: E402

SAMPLES = 96
PROGRAM = HERE / "launched.py"

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2")
ACCELERATE = (
    "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
    "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_tokens(tmp_path_factory.mktemp("launched") / "corpus", [[32 * SAMPLES + 1]])


@pytest.fixture
def job(corpus, tmp_path, stoker_environ):
    """Runs the program under a launcher and reads what its processes noted."""

    def run(how, launcher=(sys.executable,), env=None, processes=1):
        environ = stoker_environ(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", **(env or {}))
        command = [*launcher, str(PROGRAM), how, str(corpus), str(tmp_path)]
        for rank in range(processes):
            mine = {name: value.format(rank=rank) for name, value in environ.items() if "{rank}" in value}
            done = subprocess.run(
                command, env={**environ, **mine}, timeout=240, capture_output=True, text=True, cwd=tmp_path
            )
            assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]

    return run


@pytest.fixture(scope="module")
def cluster(require_binary, tmp_path_factory):
    for name in ("munged", "slurmctld", "slurmd", "srun"):
        require_binary(name)
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), max_array_size=2, cpus=4) as started:
        yield started


def check_each_sample_once(notes, ranks=2):
    assert sorted((note["rank"], note["size"]) for note in notes) == [(rank, ranks) for rank in range(ranks)]
    read = sorted(row for note in notes for row in note["rows"])
    assert read == list(range(0, 32 * SAMPLES, 32))


def test_torchrun(job):
    check_each_sample_once(job("plain", TORCHRUN))


def test_torchrun_and_init_process_group(job):
    check_each_sample_once(job("initialised", TORCHRUN))


def test_mp_spawn_and_init_process_group(job):
    check_each_sample_once(job("spawn"))


def test_lightning_s_own_launcher(job):
    check_each_sample_once(job("lightning"))


def test_accelerate_launch(job):
    check_each_sample_once(job("accelerated", (sys.executable, *ACCELERATE)))


def test_accelerate_s_debug_launcher(job):
    check_each_sample_once(job("debug_launched"))


def test_mpirun(job, require_binary):
    check_each_sample_once(job("plain", (require_binary("mpirun"), *MPIRUN[1:], sys.executable)))


def test_srun_on_two_nodes(job, cluster):
    check_each_sample_once(job("plain", ("srun", "-N2", "-n2", sys.executable), cluster.environment))


def test_srun_whose_tasks_start_ranks_themselves(job, cluster):
    notes = job("spawn_in_tasks", ("srun", "-N2", "-n2", sys.executable), cluster.environment)
    check_each_sample_once(notes, ranks=4)


def test_what_deepspeed_s_launcher_sets(job):
    env = {"RANK": "{rank}", "LOCAL_RANK": "{rank}", "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
    check_each_sample_once(job("plain", env={**env, "CROSS_RANK": "0", "CROSS_SIZE": "1"}, processes=2))


def test_what_kubernetes_and_our_manifest_set(job):
    env = {"JOB_COMPLETION_INDEX": "{rank}", "STOKER_NODES": "2"}
    check_each_sample_once(job("plain", env=env, processes=2))


def test_plain_python_in_an_sbatch_script_reads_everything(job, cluster, corpus, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\n{sys.executable} {PROGRAM} plain {corpus} {tmp_path}\n")
    cluster.ask("sbatch", "--wait", "-n4", f"--output={tmp_path}/out", f"--chdir={tmp_path}", str(script))
    notes = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    check_each_sample_once(notes, ranks=1)


CONFLICT = """
import sys, torch.distributed as dist, stoker

dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/meeting", rank=0, world_size=1)
loader = stoker.Loader(sys.argv[1], batch_size=4, seq_len=32)
try:
    next(iter(loader))
except stoker.errors.UsageError as error:
    print(error)
with stoker.Loader(sys.argv[1], batch_size=4, seq_len=32, world=stoker.World(rank=1, size=3)) as told:
    next(iter(told))
    print("world", told.options.world.rank, "of", told.options.world.size)
"""

LATE = """
import sys, torch.distributed as dist, stoker

loader = stoker.Loader(sys.argv[1], batch_size=1, seq_len=32, workers="inline")
batches = iter(loader)
next(batches)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/meeting", rank=0, world_size=1)
dist.get_world_size = lambda: 2
try:
    for _ in batches:
        pass
except stoker.errors.UsageError as error:
    print(error)
"""

OTHER_SEEDS = """
import os, sys, warnings, torch.distributed as dist, stoker

dist.init_process_group("gloo")
rank = dist.get_rank()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for seeds in ((7, 7), (7, 8)):
        with stoker.Loader(sys.argv[1], batch_size=4, seq_len=32, seed=seeds[rank]) as loader:
            next(iter(loader))
    dist.barrier()
told = [str(one.message) for one in caught if "in another order" in str(one.message)]
open(f"{sys.argv[2]}/told-{rank}", "w").write(chr(10).join(told))
dist.destroy_process_group()
"""


SPLIT_BEFORE = """
import sys, warnings, numpy as np, torch.distributed as dist, stoker

dist.init_process_group("gloo")
rank = dist.get_rank()
numbers = np.arange(96)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for array in (numbers, numbers.reshape(2, 48)[rank]):
        with stoker.Loader(array, batch_size=4) as loader:
            next(iter(loader))
    dist.barrier()
told = [str(one.message) for one in caught if "in another order" in str(one.message)]
open(f"{sys.argv[2]}/told-{rank}", "w").write(chr(10).join(told))
dist.destroy_process_group()
"""


def python(script, corpus, tmp_path, environ, *launcher):
    path = tmp_path / "program.py"
    path.write_text(script)
    command = [*(launcher or (sys.executable,)), str(path), str(corpus), str(tmp_path)]
    return subprocess.run(command, env=environ, check=True, timeout=120, capture_output=True, text=True)


def test_a_launcher_that_torch_contradicts_is_refused_with_both(corpus, tmp_path, stoker_environ):
    environ = stoker_environ(RANK="1", WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo")
    said = python(CONFLICT, corpus, tmp_path, environ).stdout
    assert "rank 0 of 1, the variables of torchrun say rank 1 of 2" in said
    assert "world 1 of 3" in said


def test_ranks_that_are_given_out_after_the_first_batch_come_too_late(corpus, tmp_path, stoker_environ):
    said = python(LATE, corpus, tmp_path, stoker_environ(GLOO_SOCKET_IFNAME="lo")).stdout
    assert "began as rank 0 of 1, and torch.distributed now says rank 0 of 2" in said


def test_ranks_that_read_in_different_orders_are_warned_of(corpus, tmp_path, stoker_environ):
    python(OTHER_SEEDS, corpus, tmp_path, stoker_environ(GLOO_SOCKET_IFNAME="lo"), *TORCHRUN)
    (told,) = warned(tmp_path)
    assert {"seed 7", "seed 8"} <= set(re.findall(r"seed \d", told))


def test_ranks_that_were_given_parts_of_a_dataset_before_are_warned_of(corpus, tmp_path, stoker_environ):
    python(SPLIT_BEFORE, corpus, tmp_path, stoker_environ(GLOO_SOCKET_IFNAME="lo"), *TORCHRUN)
    (told,) = warned(tmp_path)
    assert "the same whole dataset" in told
    assert len(set(re.findall(r"array:\(48,\):int64#\w+", told))) == 2


def warned(folder):
    return [line for rank in range(2) for line in (folder / f"told-{rank}").read_text().splitlines()]


def test_torch_is_not_imported_to_find_the_rank(corpus, stoker_environ):
    script = (
        "import sys, stoker; l = stoker.Loader(sys.argv[1], batch_size=4, seq_len=32, output='numpy', "
        "workers='inline'); next(iter(l)); l.close(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script, str(corpus)], env=stoker_environ(), check=True, timeout=60)


def test_a_loader_in_each_worker_of_a_dataloader_reads_a_part(corpus):
    data = torch.utils.data.DataLoader(Inside(str(corpus)), batch_size=None, num_workers=2)
    rows = sorted(int(row) for batch in data for row in batch["input_ids"][:, 0])
    assert rows == list(range(0, 32 * SAMPLES, 32))


class Inside(torch.utils.data.IterableDataset):
    """An iterable dataset as people write it, with a loader of its own in every worker."""

    def __init__(self, corpus):
        self._corpus = corpus

    def __iter__(self):
        with stoker.Loader(self._corpus, batch_size=4, seq_len=32, workers="inline") as loader:
            yield from loader


def test_a_process_that_is_one_of_several_and_nobody_knows_which_is_warned(corpus, tmp_path, stoker_environ):
    script = tmp_path / "program.py"
    script.write_text(
        "import sys, stoker\n"
        "with stoker.Loader(sys.argv[1], batch_size=4, seq_len=32) as one: next(iter(one))"
    )
    environ = stoker_environ(WORLD_SIZE="2", LOCAL_RANK="1")
    done = subprocess.run(
        [sys.executable, str(script), str(corpus)], env=environ, capture_output=True, text=True, timeout=60
    )
    assert "WORLD_SIZE=2, LOCAL_RANK=1 says that several processes train together" in done.stderr
