"""Jobs of 1, 2 and 4 ranks, killed with -9 again and again; each must go on from the last good checkpoint.

    kill_job.py FOLDER RANKS KILLS SEED [REMOTE]

Importing torch takes longer than a whole job here: this process imports it once and forks every rank.
A rank restores, checks that what it got is one whole step and not older than what the job before it knew
to be durable, then saves as fast as it can until it is killed. In some rounds only one rank is killed, and
the others must find out by themselves; with a remote tier in some the folder is lost too, and what was
drained must come back. In the end a job that nobody kills saves once more, and after a collection nothing may
be left.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from stoker.checkpoint.checkpointer import Checkpointer
from stoker.checkpoint.saved.layout import step_of
from stoker.checkpoint.saved.survey import clear, sort_out, verify_copies
from stoker.checkpoint.saved.tiers import Tiers, local_names
from stoker.processes import is_zombie
from stoker.storage import open_store
from stoker.world import World

# places in the shared memory: rounds begun well, newest durable step, failures, newest drained step
OK, DURABLE, FAILED, DRAINED = 0, 8, 16, 24


class Shared:
    """Numbers that outlive the ranks."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)

    def get(self, place: int) -> int:
        return struct.unpack_from("q", self._memory, place)[0]

    def put(self, place: int, value: int) -> None:
        struct.pack_into("q", self._memory, place, value)


def rank_main(root: Path, world: World, shared: Shared, seed: int, remote: str, saves: int) -> None:
    options = {"overlap": seed % 2 == 1, "max_host_bytes": 16384 if seed % 3 == 1 else 0, "remote": remote}
    checkpointer = Checkpointer(root, keep=2, chunk_bytes=4096, timeout_s=60, world=world, **options)
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
    saver = checkpointer._saver
    for step in range(restored.step + 1, restored.step + 1 + saves):
        for one in state.values():
            one.fill_(step)
        checkpointer.save(step, state=state, step=step)
        checkpointer.wait()
        if world.rank == 0:
            shared.put(DURABLE, step)
            _note_drained(saver, shared)
    checkpointer.close()
    if world.rank == 0:
        _note_drained(saver, shared)


def _note_drained(saver: Any, shared: Shared) -> None:
    if saver.drain and saver.drain.drained:
        shared.put(DRAINED, step_of(saver.drain.drained[-1]))


def fork_rank(root: Path, world: World, shared: Shared, seed: int, remote: str, saves: int = 1 << 40) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            rank_main(root, world, shared, seed, remote, saves)
        except BaseException as error:
            # a rank whose peer was killed first may say so; nothing else may go wrong
            if isinstance(error, AssertionError) or "CheckpointError" not in repr(type(error)):
                traceback.print_exc()
                shared.put(FAILED, shared.get(FAILED) + 1)
        finally:
            os._exit(0)
    return pid


def one_round(root: Path, ranks: int, shared: Shared, chance: random.Random, remote: str) -> bool:
    """Begin, and kill at some moment; in half of the rounds not before one more save was durable. Whether
    this was one of those."""
    begun, durable, seed = shared.get(OK), shared.get(DURABLE), chance.randrange(6)
    patient = chance.random() < 0.5
    pids = [fork_rank(root, world, shared, seed, remote) for world in worlds(ranks)]
    deadline = time.monotonic() + 60
    while not shared.get(FAILED) and time.monotonic() < deadline:
        if shared.get(OK) > begun and (not patient or shared.get(DURABLE) > durable):
            break
        time.sleep(0.001)
    time.sleep(chance.random() * 0.05 * (1 + ranks))
    first = chance.sample(pids, 1 if chance.random() < 0.5 else ranks)
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    if len(first) < ranks and chance.random() < 0.5:
        _end_by_themselves([pid for pid in pids if pid not in first], shared)
    time.sleep(chance.random() * 0.01)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    if remote and chance.random() < 0.1:  # the node is lost: what was drained must be there
        shutil.rmtree(root)
        shared.put(DURABLE, shared.get(DRAINED))
    return patient


def _end_by_themselves(pids: list[int], shared: Shared) -> None:
    """Who is left must hear of the death, and long before it would have waited in vain."""
    deadline = time.monotonic() + 30
    while not all(map(is_zombie, pids)) and not shared.get(FAILED):
        if time.monotonic() > deadline:
            print("who is left does not notice", file=sys.stderr)
            shared.put(FAILED, shared.get(FAILED) + 1)
        time.sleep(0.005)


def worlds(ranks: int) -> list[World]:
    return [World(rank=rank, size=ranks, local_rank=rank, local_size=ranks) for rank in range(ranks)]


def end_well(root: Path, ranks: int, shared: Shared, remote: str) -> dict[str, Any]:
    """One job that nobody kills; then what a collection leaves, and what is wrong with what was kept."""
    tiers = Tiers(root=root, remote=open_store(remote) if remote else None)
    there = [len(local_names(root)), len(tiers.remote_names())]  # few, where every drain was killed
    for pid in [fork_rank(root, world, shared, 0, remote, saves=1) for world in worlds(ranks)]:
        os.waitpid(pid, 0)
    old = time.time() - 120  # of what a process was killed over before it could sign it nothing is known
    for path in root.glob(".*"):
        os.utime(path, (old, old))
    clear(tiers, sort_out(tiers, keep=2))
    left = [one for some in sort_out(tiers, keep=2).values() for one in some]
    faults = [
        fault for name in tiers.names() for some in verify_copies(tiers, name).values() for fault in some
    ]
    kept = [len(local_names(root)), len(tiers.remote_names())]
    return {"left": list(map(str, left)), "faults": faults, "there": there, "kept": kept}


def main() -> None:
    root, ranks, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)  # no pool of threads that a fork would lose
    root.mkdir(parents=True, exist_ok=True)
    shared, chance = Shared(), random.Random(seed)
    remote, patient = "".join(sys.argv[5:6]), 0
    for _ in range(kills):
        patient += one_round(root, ranks, shared, chance, remote)
        if shared.get(FAILED):
            break
    rounds = shared.get(OK)
    report = {"ok": rounds, "patient": patient, **end_well(root, ranks, shared, remote)}
    report |= {"durable": shared.get(DURABLE), "failed": shared.get(FAILED), "drained": shared.get(DRAINED)}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
