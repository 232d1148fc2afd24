"""`stoker bench loader -- COMMAND` and `bench scaling`: the user's own program, seen from inside."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from stoker.bench.own_loader import Alone, Feeding, _bench, worker_counts
from stoker.bench.scaling import Ran, rank_counts, read_launch, report
from stoker.errors import UsageError
from stoker.processes import environ_of
from stoker.watch.inside.alone import rows_of
from stoker.watch.inside.boot import VARIABLE

LATE = """
import time, torch
from torch.utils.data import DataLoader, Dataset
class Late(Dataset):
    def __len__(self): return 64
    def __getitem__(self, number):
        time.sleep(0.004)
        return torch.zeros(8), torch.tensor(1.0)
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
val = DataLoader(Late(), batch_size=1)
train = DataLoader(Late(), batch_size=4, num_workers=1)
while True:
    for rows, wanted in train:
        loss = (model(rows)[:, 0] - wanted).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        time.sleep(0.002)
"""

RANKS = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    loss = model(torch.ones(4, 8)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    time.sleep(0.02 * dist.get_world_size())  # with two ranks a step takes twice as long
"""


def left_behind(folder: Path) -> list[int]:
    """Processes of a run whose folder lies below this one."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in pids if str(folder) in environ_of(pid).get(VARIABLE, "")]


@pytest.mark.integration
def test_a_program_s_own_loader_is_emptied_alone_with_none_its_own_and_more_workers(
    tmp_path, run_stoker, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "train.py").write_text(LATE)
    words = [
        "bench",
        "loader",
        "--json",
        "--no-history",
        "--seconds",
        "0.5",
        "--",
        sys.executable,
        "train.py",
    ]
    done = run_stoker(*words, cwd=tmp_path, timeout=120)
    found = json.loads(done.stdout)
    rates = {one["name"]: one["value"] for one in found["figures"]}
    # Each sample takes 4 ms: no more can come, however busy the machine is.
    assert 0 < rates["samples, num_workers=0"] < 255
    assert 0 < rates["samples, num_workers=1"] < 255
    assert 0 < rates["samples, num_workers=2"] < 510
    assert not found["passed"]  # a batch takes 16 ms, a step 3
    assert done.rc == 1
    assert "without its wait" in found["advice"][0]
    assert left_behind(tmp_path) == []


@pytest.mark.slow
def test_a_program_whose_samples_raise_is_told_in_a_sentence(tmp_path, run_stoker):
    (tmp_path / "train.py").write_text(LATE.replace("time.sleep(0.004)", "0 if number < 60 else 1 / 0"))
    words = ["bench", "loader", "--no-history", "--seconds", "0.2", "--", sys.executable, "train.py"]
    done = run_stoker(*words, cwd=tmp_path, timeout=120)
    assert done.rc == 1
    assert "Traceback" not in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_a_program_that_fails_before_it_trains_is_told_with_its_last_words(tmp_path, run_stoker):
    done = run_stoker("bench", "loader", "--no-history", "--", sys.executable, "nosuch.py", cwd=tmp_path)
    assert done.rc == 1
    assert "failed before its first step (exit 2)" in done.stderr
    assert "No such file" in done.stderr


def test_a_program_that_fails_without_a_word_is_told_so(tmp_path, run_stoker):
    words = ["bench", "loader", "--no-history", "--", sys.executable, "-c", "raise SystemExit(3)"]
    done = run_stoker(*words, cwd=tmp_path)
    assert "failed before its first step (exit 3): it wrote nothing" in done.stderr


@pytest.mark.slow
def test_a_job_that_gets_slower_with_every_rank_is_half_as_efficient_on_two(tmp_path, run_stoker):
    (tmp_path / "train.py").write_text(RANKS)
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    words = ["bench", "scaling", "--json", "--no-history", "--seconds", "1", "--"]
    done = run_stoker(
        *words, torchrun, "--standalone", "--nproc-per-node=2", "train.py", cwd=tmp_path, timeout=200
    )
    assert done.rc == 0, done.stderr
    found = {one["name"]: one for one in json.loads(done.stdout)["figures"]}
    assert found["efficiency, 1 rank"]["value"] == 1.0
    assert found["efficiency, 2 ranks"]["value"] == pytest.approx(0.5, abs=0.12)


def test_workers_are_none_those_given_and_more():
    assert worker_counts(0, cores=8) == [0, 8]
    assert worker_counts(2, cores=8) == [0, 2, 8]
    assert worker_counts(8, cores=8) == [0, 8, 16]


@pytest.mark.parametrize(
    ("words", "on_one"),
    [
        ("torchrun --nproc-per-node=8 train.py --n 3", "torchrun --nproc-per-node=1 train.py --n 3"),
        ("python -m torch.distributed.run --nproc_per_node 4 t.py", "python -m torch.distributed.run --nproc_per_node 1 t.py"),  # noqa: E501
        ("accelerate launch --num_processes 2 t.py", "accelerate launch --num_processes 1 t.py"),
        ("mpirun -np 4 python t.py -np 9", "mpirun -np 1 python t.py -np 9"),
        ("/opt/bin/srun --ntasks=4 python t.py", "/opt/bin/srun --ntasks=1 python t.py"),
    ],
)  # fmt: skip
def test_a_launcher_s_own_number_is_replaced_and_no_other(words, on_one):
    assert " ".join(read_launch(words.split()).on(1)) == on_one


@pytest.mark.parametrize(
    "words", ["python train.py", "torchrun train.py --nproc-per-node=2", "torchrun --nproc-per-node=gpu t.py",
              "torchrun --nproc-per-node=1 t.py"]
)  # fmt: skip
def test_a_command_without_a_number_of_ranks_is_refused(words):
    with pytest.raises(UsageError):
        read_launch(words.split())


def test_ranks_double_up_to_the_most():
    assert rank_counts(2) == [1, 2]
    assert rank_counts(6) == [1, 2, 4, 6]
    assert rank_counts(8) == [1, 2, 4, 8]


def test_where_the_time_of_more_ranks_goes_is_named():
    alone = [Ran(ranks=1, step_s=0.1, parts={"compute": 0.1})]
    four = [Ran(ranks=4, step_s=0.2, parts={"compute": 0.11, "collective": 0.09})]
    found = report("train.py", {1: alone, 4: four}, threads="1")
    assert found.figures[-1].value == pytest.approx(0.5)
    assert found.figures[-1].limit.startswith("waiting for other ranks and the link +90")
    assert "bench collective" in found.advice[0]


def test_samples_of_a_batch_are_the_length_of_its_first_tensor():
    numpy = pytest.importorskip("numpy")
    assert rows_of({"text": ["a", "b"], "input_ids": numpy.zeros((4, 7))}) == 4
    assert rows_of([numpy.zeros((3, 2)), numpy.zeros(3)]) == 3
    assert rows_of(["a", "b"]) == 2
    assert rows_of(object()) == 1


def test_a_loader_that_keeps_up_as_it_is_passes():
    feeding = Feeding(number=0, ranks=1, workers=2, site={}, iterable=False, step_s=0.02, start_s=1.0)

    def alone(workers, batch_s):
        return Alone(
            workers=workers, batch_s=batch_s, first_s=0.1, samples_s=8 / batch_s, tokens_s=0, bytes_s=1,
            cpu_batch_s=batch_s, memory_bytes=1, cores=1, epochs=0,
        )  # fmt: skip

    found = _bench(["python", "t.py"], feeding, [alone(0, 0.03), alone(2, 0.015)], [], step_s=0.02)
    assert found.passed
    assert "need not wait" in found.advice[0]
    late = _bench(
        ["python", "t.py"], feeding, [alone(0, 0.03), alone(2, 0.025), alone(4, 0.01)], [], step_s=0.02
    )
    assert not late.passed
    assert "num_workers=4" in late.advice[0]
