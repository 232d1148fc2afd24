"""Jobs of 1, 2 and 4 ranks, killed with -9 again and again; each must go on from the last good checkpoint.

    kill_job.py FOLDER RANKS KILLS SEED

Importing torch takes longer than a whole job here: this process imports it once and forks every rank.
A rank restores, checks that what it got is one whole step and not older than what the job before it knew
to be durable, then saves as fast as it can until it is killed.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import struct
import sys
import time
import traceback
from pathlib import Path

import torch

from stoker.checkpoint.checkpointer import Checkpointer
from stoker.world import World

OK, DURABLE, FAILED = (
    0,
    8,
    16,
)  # places in the shared memory: rounds begun well, newest durable step, failures


class Shared:
    """Numbers that outlive the ranks."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)

    def get(self, place: int) -> int:
        return struct.unpack_from("q", self._memory, place)[0]

    def put(self, place: int, value: int) -> None:
        struct.pack_into("q", self._memory, place, value)


def rank_main(root: Path, world: World, shared: Shared, seed: int) -> None:
    options = {"overlap": seed % 2 == 1, "max_host_bytes": 16384 if seed % 3 == 1 else 0}
    checkpointer = Checkpointer(root, keep=2, chunk_bytes=4096, timeout_s=20, world=world, **options)
    state = {f"w{at}": torch.full((2000 + 300 * at,), -1.0) for at in range(6)}
    restored = checkpointer.restore(state=state)
    step = restored.step
    seen = {float(value) for one in state.values() for value in (one.min(), one.max())}
    if step < shared.get(DURABLE) or (
        not restored.fresh and (seen != {float(step)} or restored.extras["step"] != step)
    ):
        raise AssertionError(f"restored step {step} with {seen}, durable {shared.get(DURABLE)}: {restored}")
    if world.rank == 0:
        shared.put(OK, shared.get(OK) + 1)
    while True:
        step += 1
        for one in state.values():
            one.fill_(step)
        checkpointer.save(step, state=state, step=step)
        checkpointer.wait()
        if world.rank == 0:
            shared.put(DURABLE, step)


def fork_rank(root: Path, world: World, shared: Shared, seed: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            rank_main(root, world, shared, seed)
        except BaseException as error:
            # a rank whose peer was killed first may say so; nothing else may go wrong
            if isinstance(error, AssertionError) or "CheckpointError" not in repr(type(error)):
                traceback.print_exc()
                shared.put(FAILED, shared.get(FAILED) + 1)
        finally:
            os._exit(0)
    return pid


def one_round(root: Path, ranks: int, shared: Shared, chance: random.Random) -> bool:
    """Begin, and kill at some moment; in half of the rounds not before one more save was durable. Whether
    this was one of those."""
    worlds = [World(rank=rank, size=ranks, local_rank=rank, local_size=ranks) for rank in range(ranks)]
    begun, durable, seed = shared.get(OK), shared.get(DURABLE), chance.randrange(6)
    patient = chance.random() < 0.5
    pids = [fork_rank(root, world, shared, seed) for world in worlds]
    deadline = time.monotonic() + 30
    while not shared.get(FAILED) and time.monotonic() < deadline:
        if shared.get(OK) > begun and (not patient or shared.get(DURABLE) > durable):
            break
        time.sleep(0.001)
    time.sleep(chance.random() * 0.05 * (1 + ranks))
    first = chance.sample(pids, 1 if chance.random() < 0.5 else ranks)
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    time.sleep(chance.random() * 0.01)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    return patient


def main() -> None:
    root, ranks, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)  # no pool of threads that a fork would lose
    root.mkdir(parents=True, exist_ok=True)
    shared, chance = Shared(), random.Random(seed)
    patient = 0
    for _ in range(kills):
        patient += one_round(root, ranks, shared, chance)
        if shared.get(FAILED):
            break
    report = {"ok": shared.get(OK), "durable": shared.get(DURABLE), "failed": shared.get(FAILED)}
    print(json.dumps({**report, "patient": patient}))


if __name__ == "__main__":
    main()
