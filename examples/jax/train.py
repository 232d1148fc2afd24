"""JAX fed by stoker: the loader gives numpy arrays, `jax.jit` takes them as they are.

    python examples/jax/train.py CORPUS --steps 100 --checkpoint run/

Kill it and run it again: it goes on where the newest checkpoint was, bit for bit. On SIGTERM or SIGUSR1 it
saves and leaves. On several processes, after `jax.distributed.initialize()`, give the loader
`world=stoker.World(rank=jax.process_index(), size=jax.process_count())`. (`stoker.Checkpointer` needs torch,
whose CPU build is enough.)
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import stoker

WIDTH, LENGTH, RATE = 64, 128, 0.5


class Parameters:
    """A tree of arrays that a checkpointer can save: anything with these two methods will do."""

    def __init__(self, vocabulary: int) -> None:
        embed, head = jax.random.split(jax.random.key(0))
        self.tree = {
            "embed": jax.random.normal(embed, (vocabulary, WIDTH)),
            "head": jax.random.normal(head, (WIDTH, vocabulary)) * WIDTH**-0.5,
        }

    def state_dict(self) -> dict[str, Any]:
        return {name: np.asarray(array) for name, array in self.tree.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tree = {name: jnp.asarray(array) for name, array in state.items()}


def loss_of(tree: dict[str, jax.Array], ids: jax.Array, labels: jax.Array) -> jax.Array:
    logits = tree["embed"][ids] @ tree["head"]
    taken = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    told = labels >= 0  # -100 where there is nothing to predict
    return -(taken * told).sum() / told.sum()


@jax.jit
def train_step(tree: dict[str, jax.Array], ids: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
    loss, slopes = jax.value_and_grad(loss_of)(tree, ids, labels)
    return jax.tree.map(lambda array, slope: array - RATE * slope, tree, slopes), loss


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, default=Path("run"), help="folder of checkpoints")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    given = parser.parse_args()
    tokenizer = stoker.read_manifest(given.corpus).tokenizer
    parameters = Parameters(tokenizer.vocabulary if tokenizer else 1 << 16)
    loader = stoker.Loader(given.corpus, batch_size=8, seq_len=LENGTH, output="numpy", dtype="int32")
    saver = stoker.Checkpointer(
        given.checkpoint, every=given.every, keep=2, save_on_signal=("SIGTERM", "SIGUSR1")
    )
    state = {"parameters": parameters, "loader": loader}
    with loader, saver:
        step = saver.restore(**state).step  # of the newest good checkpoint; 0 is a fresh start
        while step < given.steps and not saver.should_leave:
            for batch in loader:  # an epoch, or the rest of one
                step += 1
                parameters.tree, loss = train_step(parameters.tree, batch["input_ids"], batch["labels"])
                print(f"step {step}, loss {loss.item()!r}", flush=True)
                saver.step(step, **state)
                if step == given.steps or saver.should_leave:
                    break
        if not saver.should_leave:
            saver.save(step, final=True, **state)


if __name__ == "__main__":
    main()
