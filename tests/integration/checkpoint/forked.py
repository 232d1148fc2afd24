"""Ranks of small jobs, forked from one process that has imported torch already: a job takes a second."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

import torch
import torch._dynamo
import torch.distributed as dist

from stoker.checkpoint.checkpointer import Checkpointer  # noqa: F401 - imported once, before the forks
from stoker.world import World


def run_ranks(size: int, work: Callable[[World], None], *, store: str = "") -> list[int]:
    """Run `work` in `size` ranks, with a gloo group where a store is given; gives their exit codes."""
    torch.set_num_threads(1)  # no pool of threads that a fork would lose
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            _rank(World(rank=rank, size=size, local_rank=rank, local_size=size), work, store)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _rank(world: World, work: Callable[[World], None], store: str) -> None:
    code = 1
    try:
        if store:
            dist.init_process_group(
                "gloo", store=dist.FileStore(store, world.size), rank=world.rank, world_size=world.size
            )
        work(world)
        code = 0
        if store:
            dist.barrier()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
