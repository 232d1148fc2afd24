"""One rank of a job whose script just ends, without closing its checkpointer, right after a save.

ends_job.py FOLDER REMOTE     the launcher's variables say which rank this is
"""

from __future__ import annotations

import sys

import torch

import stoker


def main() -> None:
    folder, remote = sys.argv[1], sys.argv[2]
    checkpointer = stoker.Checkpointer(folder, remote=remote, overlap=True, chunk_bytes=4096, timeout_s=120)
    for step in range(1, 4):
        checkpointer.save(step, state={f"w{at}": torch.full((9000,), float(step)) for at in range(9)})


if __name__ == "__main__":
    main()
