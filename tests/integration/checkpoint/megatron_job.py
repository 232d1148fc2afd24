"""Megatron saves a small checkpoint of its own kind, torch_dist, on a machine without a GPU.

megatron_job.py FOLDER
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch


def main() -> None:
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
    # what it asks of a GPU while it saves
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.distributed.init_process_group("gloo")
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    parallel_state.initialize_model_parallel(1, 1)
    weight = torch.arange(12.0).reshape(3, 4)
    state = {
        "model": {
            "decoder.weight": ShardedTensor.from_rank_offsets("decoder.weight", weight, (0, 0, 1)),
            "extra": ShardedObject("decoder._extra_state", {"a": 1}, (1,), (0,)),
        },
        "args": argparse.Namespace(lr=1e-3, layers=2),
        "iteration": 100,
    }
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    dist_checkpointing.save(state, folder)


if __name__ == "__main__":
    main()
