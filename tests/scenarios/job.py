"""A small training job on the CPU with one fault put in: `python job.py FAULT [--option value …]`.

It knows nothing of stoker. A step computes for some 20 ms on one thread; what else it does is the fault.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

BATCHES = ("free", "sleep", "compute", "crowd", "read", "big")


def main() -> None:
    given = options()
    torch.set_num_threads(given.threads)
    if given.die_after:
        timer = threading.Timer(given.die_after, os._exit, [3])
        timer.daemon = True
        timer.start()
    train(given)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", choices=[*BATCHES], default="free")
    parser.add_argument("--seconds", type=float, default=0.0, help="that a batch takes to make")
    parser.add_argument("--batch-threads", type=int, default=8, help="that --batch crowd starts")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--start", type=float, default=0.0, help="seconds a worker takes to start")
    parser.add_argument("--epoch", type=int, default=10**6, help="batches of an epoch")
    parser.add_argument("--file", type=Path, help="what --batch read reads")
    parser.add_argument("--save", type=int, default=0, help="steps between two saves")
    parser.add_argument("--save-mib", type=int, default=64)
    parser.add_argument("--stop-at", type=int, default=-1, help="step at which the loop stands still")
    parser.add_argument(
        "--skip-at", type=int, default=-1, help="step at which rank 1 leaves a collective out"
    )
    parser.add_argument("--late", type=float, default=0.0, help="seconds that rank 1 sleeps in every step")
    parser.add_argument("--die-after", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--size", type=int, default=640)
    return parser.parse_args()


class Batches(Dataset):  # type: ignore[type-arg]
    """Batches that take as long to make as they are told to."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given

    def __len__(self) -> int:
        return int(self.given.epoch)

    def __getitem__(self, index: int) -> torch.Tensor:
        given = self.given
        if given.batch == "sleep":
            time.sleep(given.seconds)
        elif given.batch == "compute":
            compute(given.seconds)
        elif given.batch == "crowd":
            compute_crowded(given.batch_threads)
        elif given.batch == "read":
            read_directly(given.file, index)
        size = 4 << 20 if given.batch == "big" else 64
        return torch.ones(size)


def compute(seconds: float) -> None:
    """So much CPU time, however many others want the cores."""
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        sum(range(300))


def compute_crowded(threads: int) -> None:
    """Some 0.15 s of one core, dealt out to more threads than there are cores."""
    torch.set_num_threads(threads)
    values = torch.ones(1 << 22)
    for _ in range(48):
        values = values.sin()


def read_directly(path: Path, index: int) -> None:
    """One MiB past the page cache."""
    import mmap

    buffer = mmap.mmap(-1, 1 << 20)
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        os.preadv(file, [buffer], (index % (path.stat().st_size >> 20)) << 20)
    finally:
        os.close(file)


def train(given: argparse.Namespace) -> None:
    many = int(os.environ.get("WORLD_SIZE", "1")) > 1  # a launcher may also start one process alone
    rank = int(os.environ["RANK"]) if many else -1
    if rank >= 0:
        torch.distributed.init_process_group("gloo")
    model = torch.nn.Sequential(
        torch.nn.Linear(64, given.size), torch.nn.ReLU(), torch.nn.Linear(given.size, 64)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(
        Batches(given),
        batch_size=None,
        num_workers=given.workers,
        worker_init_fn=lambda number: time.sleep(given.start),
    )
    step = 0
    while step < given.steps:
        for batch in loader:
            one_step(given, model, optimizer, batch, step, rank)
            step += 1
            if step >= given.steps:
                break


def one_step(
    given: argparse.Namespace,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: torch.Tensor,
    step: int,
    rank: int,
) -> None:
    if rank == 1 and given.late:
        time.sleep(given.late)
    if step == given.stop_at and rank in (-1, 1):
        threading.Event().wait()
    rows = batch[:64].repeat(512, 1)
    for _ in range(4):
        model(rows).square().mean().backward()
    if rank == 1 and step == given.skip_at:
        torch.distributed.barrier()
    elif rank >= 0:
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    if given.save and step % given.save == given.save - 1:
        save(given)


def save(given: argparse.Namespace) -> None:
    path = Path(f"checkpoint-{os.getpid()}.pt")
    torch.save({"weights": torch.ones(given.save_mib << 18)}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


if __name__ == "__main__":
    main()
