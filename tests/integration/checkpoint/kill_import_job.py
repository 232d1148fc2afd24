"""Kills imports with -9 at random moments of their work, and looks what is left each time.

kill_import_job.py FOLDER KILLS SEED     prints how many were cut short, and how many had committed by then
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from stoker.checkpoint.foreign.importing import import_checkpoint
from stoker.checkpoint.foreign.opening import open_source
from stoker.checkpoint.saved.retention import collect
from stoker.checkpoint.saved.tiers import Tiers, local_names


def main() -> None:
    folder, kills, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    folder.mkdir(parents=True)
    torch.save({f"w{at}": torch.rand(1 << 20) for at in range(16)}, folder / "x.pt")
    began = time.monotonic()
    import_checkpoint(open_source(folder / "x.pt"), folder / "run")
    took, known = time.monotonic() - began, 1
    cut = 0
    for _ in range(kills):
        child = os.fork()
        if not child:
            import_checkpoint(open_source(folder / "x.pt"), folder / "run")
            os._exit(0)
        time.sleep(chance.random() * 2.5 * took)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        names = local_names(folder / "run")
        assert len(names) in (known, known + 1)
        cut += len(names) == known
        known = len(names)
        newest = Tiers(root=folder / "run").latest(skipped=[])
        assert newest.name == names[0]
        assert newest.verify() == []
    collect(folder / "run", silent_s=0.0)
    left = [path.name for path in (folder / "run").iterdir() if path.name not in names]
    print(json.dumps({"cut": cut, "committed": known - 1, "left": left}))


if __name__ == "__main__":
    main()
