"""A loop as Megatron-LM's: `forward_step(data_iterator, model)`, micro-batches, megatron-core's groups of
ranks.

    torchrun --nproc-per-node=8 examples/megatron/train.py CORPUS --tensor-parallel 2 --checkpoint run/

megatron-core says which ranks read the same rows (those of one tensor- and pipeline-parallel group): the
loader gets the data-parallel rank and size, and every rank reads for itself, so `get_batch` broadcasts
nothing. (The model here is not cut, each tensor-parallel rank computes the same: what is shown is the data
and the checkpoints.) The corpus is Megatron's own format: its `GPTDataset` reads it, too. Kill it and run it
again: it goes on bit for bit.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what it would like to have on a GPU
    from megatron.core import parallel_state

import stoker

WIDTH, LENGTH, MICRO_BATCHES = 64, 128, 2
Batch = dict[str, torch.Tensor]


def batches_forever(feeder: stoker.Feeder) -> Iterator[Batch]:
    """What Megatron calls a cyclic data iterator: one epoch after the other."""
    while True:
        yield from feeder


def get_batch(data_iterator: Iterator[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    batch = next(data_iterator)
    return batch["input_ids"], batch["labels"]


def forward_step(data_iterator: Iterator[Batch], model: torch.nn.Module) -> torch.Tensor:
    tokens, labels = get_batch(data_iterator)
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def train_step(
    data_iterator: Iterator[Batch], model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> float:
    """Some micro-batches, their gradients summed over the data-parallel group, one step."""
    total = 0.0
    for _ in range(MICRO_BATCHES):
        loss = forward_step(data_iterator, model) / MICRO_BATCHES
        loss.backward()
        total += loss.item()
    group = parallel_state.get_data_parallel_group()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM, group=group)
        parameter.grad /= group.size()
    optimizer.step()
    optimizer.zero_grad()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, default=Path("run"), help="folder that all ranks see")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks that read the same rows")
    given = parser.parse_args()
    dist.init_process_group()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=given.tensor_parallel)
    device = f"cuda:{stoker.World.here().local_rank}" if torch.cuda.is_available() else "cpu"
    tokenizer = stoker.read_manifest(given.corpus).tokenizer
    vocabulary = tokenizer.vocabulary if tokenizer else 1 << 16
    torch.manual_seed(0)
    layers = [torch.nn.Embedding(vocabulary, WIDTH), torch.nn.Linear(WIDTH, vocabulary)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    world = stoker.World(
        rank=parallel_state.get_data_parallel_rank(), size=parallel_state.get_data_parallel_world_size()
    )
    feeder = stoker.feed(given.corpus, world=world, device=device, batch_size=8, seq_len=LENGTH)
    saver = stoker.Checkpointer(
        given.checkpoint, every=given.every, keep=2, save_on_signal=("SIGTERM", "SIGUSR1")
    )
    state = {"model": model, "optimizer": optimizer, "loader": feeder}
    with feeder, saver:
        step = saver.restore(**state).step  # of the newest good checkpoint; 0 is a fresh start
        data_iterator = batches_forever(feeder)
        while step < given.steps and not saver.should_leave:
            loss = train_step(data_iterator, model, optimizer)
            step += 1
            if dist.get_rank() == 0:
                print(f"step {step}, loss {loss!r}", flush=True)
            saver.step(step, **state)
        if not saver.should_leave:
            saver.save(step, final=True, **state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
