"""A crowd of processes that all want the same dataset, as a program of its own.

    python crowd.py URL FOLDER PROCESSES TTL [flock-succeeds | flock-fails]

Prints a line with the process ids, then, when all have ended, a line with their exit codes. The processes
are forked before anything was used, from a parent without threads, and waited for only at the end: until
then a killed one is a zombie.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import traceback

import stoker
import stoker.manifest  # which staging a dataset needs: imported once for all
from stoker.stage.run import stage


def main(url: str, folder: str, processes: int, ttl_s: float, locks: str) -> None:
    if locks:
        fcntl.flock = fcntl.lockf = _lying_lock(locks)
    children = []
    for _ in range(processes):
        if not (child := os.fork()):
            os._exit(_fetch(url, folder, ttl_s))
        children.append(child)
    print(json.dumps(children), flush=True)
    # whoever ends becomes a zombie and stays one until all are done
    for child in children:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps(codes), flush=True)


def _fetch(url: str, folder: str, ttl_s: float) -> int:
    try:
        with stoker.Cache(folder, ttl_s=ttl_s) as cache:
            stage(url, cache)
        return 0
    except BaseException:
        traceback.print_exc()
        return 1


def _lying_lock(how: str):
    def lock(*_):
        if how == "flock-fails":
            raise OSError(11, "Resource temporarily unavailable")

    return lock


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), "".join(sys.argv[5:]))
