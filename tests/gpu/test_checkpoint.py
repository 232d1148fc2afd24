"""Checkpoints of state on a GPU: what is saved is what was there, however the copy ran; and suspending."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stoker
from stoker.checkpoint.snapshot.digest import digests
from stoker.checkpoint.suspend import resume, suspend
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
            checkpointer.save(step, model=model, optimizer=optimizer)
            model.weight.grad = torch.full_like(model.weight, 1000.0)
            optimizer.step()
            checkpointer.wait()
            (saved,) = checkpointer.load(keys=["model.weight"])["model"].values()
            assert bool((saved == step).all())


def test_digests_of_the_card_tell_every_byte_apart() -> None:
    made = [
        torch.randn(4001, device="cuda").to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)
    ]
    made += [
        torch.randint(0, 255, (4001,), dtype=torch.uint8, device="cuda"),
        torch.randn(9, 7, device="cuda").t(),
    ]
    made += [
        torch.randn((5 << 20) + 3, device="cuda"),
        torch.empty(0, device="cuda"),
        torch.tensor(3.0).cuda(),
    ]
    made += [
        torch.randn(64, device="cuda").to(torch.float8_e4m3fn),
        torch.randn(33, dtype=torch.complex64).cuda(),
    ]
    before = digests(made)
    assert digests([one.clone() for one in made]) == before
    assert len(set(before)) == len(before)
    for at, one in enumerate(made):
        if one.numel():
            raw = one.clone().contiguous().view(-1).view(torch.uint8)
            raw[len(raw) // 2] ^= 1  # one bit
            changed = raw.view(one.dtype).view(one.shape)
            assert digests([changed]) != [before[at]]
    swapped = torch.arange(8.0, device="cuda")
    assert digests([swapped]) != digests([swapped.flip(0)])  # the same elements in another order


def test_a_step_in_a_graph_switches_overlap_off(tmp_path: Path) -> None:
    """It changes the weights and runs no hook: the first save shows it."""
    model = torch.nn.Linear(1024, 1024, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    with torch.no_grad():
        model.weight.fill_(1)
    with stoker.Checkpointer(tmp_path, overlap=True, world=World()) as checkpointer:
        checkpointer.save(1, model=model, optimizer=optimizer)
        graph.replay()
        with pytest.warns(RuntimeWarning, match=r"overlap=True is switched off .* model\.weight was changed"):
            checkpointer.wait()
        assert bool((checkpointer.load()["model"]["weight"] == 1).all())


def test_the_first_overlapped_save_proves_itself_and_the_next_overlap(tmp_path: Path) -> None:
    job = Job()
    job.step()
    with stoker.Checkpointer(tmp_path, overlap=True, world=World()) as checkpointer:
        checks = []
        for step in range(3):
            wanted = job.model[0].weight.detach().clone()
            checkpointer.save(step, **job.objects())
            checks.append(checkpointer.report().check_s)
            job.step()
            checkpointer.wait()
            assert torch.equal(checkpointer.load(keys=["model.0.weight"])["model"]["0.weight"], wanted.cpu())
    assert 0 < checks[0] == checks[1] == checks[2]


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
