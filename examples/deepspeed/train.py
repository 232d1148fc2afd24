"""A loop with DeepSpeed's engine: it steps, stoker feeds and saves. Started by its launcher or by torchrun.

    deepspeed examples/deepspeed/train.py CORPUS --steps 100 --checkpoint run/
    torchrun --nproc-per-node=8 examples/deepspeed/train.py CORPUS --steps 100 --checkpoint run/

The launcher says RANK, WORLD_SIZE and LOCAL_RANK, and passes --local_rank; the loader takes this rank's share
from them. At ZeRO stage 0 every rank holds the whole optimizer, and `stoker.Checkpointer` saves it. From
stage 1 on it is DeepSpeed's to save: `engine.save_checkpoint(folder, client_state={"loader":
feeder.state_dict()})`, and `feeder.load_state_dict(client_state["loader"])` after `_, client_state =
engine.load_checkpoint(folder)`, which gives None where nothing was saved.

Where DeepSpeed is not installed a stand-in with the same three calls takes its place, so that the loop can be
tried.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import stoker

WIDTH, LENGTH, ROWS = 64, 128, 8


class StandIn:
    """What this loop calls of DeepSpeed's engine, on torch's DDP."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = model, optimizer
        self._model = torch.nn.parallel.DistributedDataParallel(model)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self._model(ids)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def make_engine(model: torch.nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if importlib.util.find_spec("deepspeed") is None:
        dist.init_process_group()
        return StandIn(model, optimizer)
    import deepspeed

    deepspeed.init_distributed()
    config = {"train_micro_batch_size_per_gpu": ROWS, "zero_optimization": {"stage": 0}}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, default=Path("run"), help="folder that all ranks see")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--local_rank", type=int, default=0, help="passed by DeepSpeed's launcher")
    given = parser.parse_args()
    world = stoker.World.from_environ()
    device = f"cuda:{world.local_rank}" if torch.cuda.is_available() else "cpu"
    tokenizer = stoker.read_manifest(given.corpus).tokenizer
    vocabulary = tokenizer.vocabulary if tokenizer else 1 << 16
    torch.manual_seed(0)
    layers = [torch.nn.Embedding(vocabulary, WIDTH), torch.nn.Linear(WIDTH, vocabulary)]
    engine = make_engine(torch.nn.Sequential(*layers).to(device))
    feeder = stoker.feed(given.corpus, device=device, batch_size=ROWS, seq_len=LENGTH)
    saver = stoker.Checkpointer(
        given.checkpoint, every=given.every, keep=2, save_on_signal=("SIGTERM", "SIGUSR1")
    )
    state = {"model": engine.module, "optimizer": engine.optimizer, "loader": feeder}
    with feeder, saver:
        step = saver.restore(**state).step  # of the newest good checkpoint; 0 is a fresh start
        while step < given.steps and not saver.should_leave:
            for batch in feeder:  # an epoch, or the rest of one
                step += 1
                logits = engine(batch["input_ids"]).flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(logits, batch["labels"].flatten())
                engine.backward(loss)
                engine.step()
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
