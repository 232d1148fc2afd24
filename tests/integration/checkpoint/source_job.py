"""One rank of two whose model FSDP2 shards: it begins with what others saved whole; of damage both are told.

source_job.py FOLDER     with model.safetensors, dcp/, bad.safetensors, and truth.pt to compare with
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import stoker
from stoker.errors import StokerError


def make_model() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def main() -> None:
    dist.init_process_group("gloo")
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    truth = torch.load(folder / "truth.pt", weights_only=True)
    for name in ("model.safetensors", "dcp"):
        model = make_model()
        with stoker.Checkpointer(folder / f"run-{name}", timeout_s=60) as ck:
            ck.restore(source=folder / name, model=model)
        for key, one in model.state_dict().items():
            assert torch.equal(one.full_tensor(), truth[key])
    source = "bad.safetensors" if rank == "1" else "model.safetensors"  # its node has a damaged copy
    with stoker.Checkpointer(folder / "run-bad", timeout_s=60) as ck:
        try:
            ck.restore(source=folder / source, model=make_model())
        except StokerError as error:
            (folder / f"said-{rank}").write_text(error.message)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
