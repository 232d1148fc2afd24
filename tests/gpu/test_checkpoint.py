"""Checkpoints of state on a GPU: what is saved is what was there, however the copy ran; and suspending."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stoker
from stoker.suspend import resume, suspend
from stoker.world import World

TRAINER = Path(__file__).parent / "suspended_job.py"


class Job:
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(512, 2048),
            torch.nn.BatchNorm1d(2048),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(2048, 64),
        ).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def objects(self) -> dict:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> float:
        loss = self.model(torch.randn(64, 512, device="cuda")).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"max_host_bytes": 1 << 20}], ids=str)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(tmp_path: Path, options: dict) -> None:
    whole = Job()
    losses = [whole.step() for _ in range(12)]
    first = Job()
    with stoker.Checkpointer(
        tmp_path, every=4, chunk_bytes=1 << 16, world=World(), **options
    ) as checkpointer:
        for step in range(1, 11):
            first.step()
            checkpointer.step(step, **first.objects())
    second = Job(seed=9)
    with stoker.Checkpointer(tmp_path, world=World()) as checkpointer:
        assert checkpointer.restore(**second.objects()).step == 8
    assert [second.step() for _ in range(4)] == losses[8:]


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"max_host_bytes": 1 << 24}], ids=str)
def test_the_copy_is_of_the_moment_of_the_save(tmp_path: Path, options: dict) -> None:
    """The weights are changed behind a long kernel right after the save, by an optimizer."""
    model = torch.nn.Linear(4096, 4096).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with stoker.Checkpointer(tmp_path, world=World(), **options) as checkpointer:
        for step in range(1, 4):
            torch.cuda._sleep(50_000_000)
            with torch.no_grad():
                model.weight.fill_(step)
            checkpointer.save(step, model=model)
            model.weight.grad = torch.full_like(model.weight, 1000.0)
            optimizer.step()
            checkpointer.wait()
            (saved,) = checkpointer.load(keys=["model.weight"])["model"].values()
            assert bool((saved == step).all())


def test_odd_tensors_come_back(tmp_path: Path) -> None:
    state = {
        "transposed": torch.randn(300, 500, device="cuda").t(),
        "half": torch.randn(1001, device="cuda").bfloat16(),
        "scalar": torch.tensor(3.0, device="cuda"),
        "host": torch.randn(77),
        "view": torch.randn(100, 100, device="cuda")[10:20, 5:7],
        "eight": torch.randn(64, device="cuda").to(torch.float8_e4m3fn),
    }
    back = {key: torch.zeros_like(one) for key, one in state.items()}
    with stoker.Checkpointer(tmp_path, chunk_bytes=4096, world=World()) as checkpointer:
        checkpointer.save(1, state=state)
        checkpointer.restore(state=back)
    for key, one in state.items():
        assert back[key].device == one.device
        assert torch.equal(back[key].float(), one.float()), key


def test_host_memory_is_pinned_once(tmp_path: Path) -> None:
    job = Job()
    with stoker.Checkpointer(tmp_path, world=World(), keep=1) as checkpointer:
        checkpointer.save(1, **job.objects())
        held = checkpointer.report().host_bytes
        for step in range(2, 6):
            checkpointer.save(step, **job.objects())
        assert checkpointer.report().host_bytes == held


def test_a_suspended_process_frees_the_card_and_goes_on_with_the_same_losses() -> None:
    def losses(disturb) -> list[str]:
        with subprocess.Popen([sys.executable, TRAINER, "2", "40"], stdout=subprocess.PIPE, text=True) as job:
            found = []
            for line in job.stdout:
                found.append(line.strip())
                if len(found) == 10 and disturb:
                    disturb(job.pid)
        assert job.returncode == 0
        return found

    freed = []

    def away_and_back(pid: int) -> None:
        before = torch.cuda.mem_get_info()[0]
        assert suspend(pid).state == "suspended"
        freed.append(torch.cuda.mem_get_info()[0] - before)
        assert resume(pid).state == "running"

    disturbed = losses(away_and_back)
    assert freed[0] > 2e9
    assert len(disturbed) == 40
    assert disturbed == losses(None)
