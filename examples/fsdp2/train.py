"""FSDP2 as torchtitan has it: a device mesh, `fully_shard` on each block, and a loader that knows the mesh.

    torchrun --nproc-per-node=8 examples/fsdp2/train.py CORPUS --steps 100 --checkpoint run/

Kill it at any moment and run it again, also on another number of ranks: what was sharded for some is cut anew
for others, and every sample of the epoch comes once. On SIGTERM or SIGUSR1 all ranks save after the same step
and leave.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import stoker

WIDTH, LENGTH = 64, 128


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            torch.nn.LayerNorm(WIDTH),
            torch.nn.Linear(WIDTH, 4 * WIDTH),
            torch.nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.nn.functional.gelu(self.up(self.norm(hidden))))


def make_model(vocabulary: int, mesh: dist.DeviceMesh) -> torch.nn.Module:
    torch.manual_seed(0)  # the same on all ranks, before it is cut
    layers = [torch.nn.Embedding(vocabulary, WIDTH), Block(), Block(), torch.nn.Linear(WIDTH, vocabulary)]
    model = torch.nn.Sequential(*layers).to(mesh.device_type)
    for layer in layers[1:3]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, default=Path("run"), help="folder that all ranks see")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    given = parser.parse_args()
    world = stoker.World.from_environ()
    if torch.cuda.is_available():
        torch.cuda.set_device(world.local_rank)
    mesh = init_device_mesh(
        "cuda" if torch.cuda.is_available() else "cpu", (world.size,), mesh_dim_names=("dp_shard",)
    )
    tokenizer = stoker.read_manifest(given.corpus).tokenizer
    model = make_model(tokenizer.vocabulary if tokenizer else 1 << 16, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    feeder = stoker.feed(given.corpus, mesh=mesh, batch_size=8, seq_len=LENGTH)
    saver = stoker.Checkpointer(
        given.checkpoint, every=given.every, keep=2, save_on_signal=("SIGTERM", "SIGUSR1")
    )
    state = {"model": model, "optimizer": optimizer, "loader": feeder}
    with feeder, saver:
        step = saver.restore(**state).step  # of the newest good checkpoint; 0 is a fresh start
        while step < given.steps and not saver.should_leave:
            for batch in feeder:  # an epoch, or the rest of one
                step += 1
                logits = model(batch["input_ids"]).flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(logits, batch["labels"].flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if world.rank == 0:
                    print(f"step {step}, loss {loss.item()!r}", flush=True)
                saver.step(step, **state)
                if step == given.steps or saver.should_leave:
                    break
        if not saver.should_leave:
            saver.save(step, final=True, **state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
