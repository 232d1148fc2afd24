"""Ranks of scripts, forked from one process that has imported their packages: a job takes a second or two.

warm_ranks.py PACKAGE...     reads a line a job: {"script": …, "arguments": […], "size": …, "log": …}; answers
each with the exit codes of its ranks
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import socket
import sys
import traceback
from typing import Any

import torch
import torch._dynamo  # every optimizer imports it


def main() -> None:
    for package in sys.argv[1:]:
        importlib.import_module(package)
    torch.set_num_threads(1)  # no pool of threads that a fork would lose
    for line in sys.stdin:
        print(json.dumps(run_ranks(json.loads(line))), flush=True)


def run_ranks(job: dict[str, Any]) -> list[int]:
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = chosen.getsockname()[1]
    pids = []
    for rank in range(job["size"]):
        pid = os.fork()
        if pid == 0:
            run_rank(rank, port, job)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def run_rank(rank: int, port: int, job: dict[str, Any]) -> None:
    """With what torchrun would say to it; the first rank has the store."""
    log, code = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 1
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(job["size"]))
    os.environ |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = [job["script"], *job["arguments"]]
    try:
        runpy.run_path(job["script"], run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
