"""A small job that is killed and comes back: requeued_job.py CHECKPOINTS LOG STEPS.

It writes into LOG what it does and when, a JSON line each, by the time of day: the truth that the history's
account is held against.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

PROCESS_BEGAN = time.time() - (
    time.clock_gettime(time.CLOCK_BOOTTIME)
    - int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
)

import torch  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

import stoker  # noqa: E402


class Slow(Dataset):
    """Every fourth batch takes a while to come."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 4 == 0:
            time.sleep(0.03)
        return torch.full((8,), float(index))


def main() -> None:
    folder, path, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    log = open(path, "a", buffering=1)  # noqa: SIM115 - as long as the process

    def say(what: str, start: float, end: float, **facts: object) -> None:
        log.write(json.dumps({"what": what, "start": start, "end": end, "pid": os.getpid(), **facts}) + "\n")

    say("process", PROCESS_BEGAN, PROCESS_BEGAN)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with stoker.Checkpointer(folder, every=20) as checkpointer:
        began = time.time()
        restored = checkpointer.restore(model=model, optimizer=optimizer)
        time.sleep(0.2)  # a restore that takes a while
        say("restore", began, time.time(), step=restored.step, fresh=restored.fresh)
        done = restored.step
        batches = iter(DataLoader(Slow(), batch_size=1))
        while done < steps:
            start = time.time()
            batch = next(batches)
            fetched = time.time()
            model(batch).sum().backward()
            time.sleep(0.04)  # the card computes
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            computed = time.time()
            saved = checkpointer.step(done, model=model, optimizer=optimizer)
            end = time.time()
            say("step", start, end, number=done, fetched=fetched, computed=computed, saved=saved)
    say("end", time.time(), time.time())


if __name__ == "__main__":
    main()
