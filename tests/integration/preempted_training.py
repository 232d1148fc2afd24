"""A rank of examples/preemptible that writes its losses down, and in its first run waits for the warning."""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "preemptible" / "train.py"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("corpus")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--hold-at", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--cache")
    given = parser.parse_args()
    spec = importlib.util.spec_from_file_location("preemptible", EXAMPLE)
    assert spec
    assert spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    rank, checkpoint = os.environ["RANK"], given.folder / "state.pt"
    holds = given.hold_at and not checkpoint.exists()
    losses = given.folder / f"losses-{rank}"
    notice = example.Notice()
    for step, loss in example.train(
        given.corpus, steps=given.steps, checkpoint=checkpoint, notice=notice, cache=given.cache
    ):
        with losses.open("a") as file:
            file.write(f"{step} {loss!r}\n")
        while holds and step == given.hold_at and not notice.came:
            time.sleep(0.01)


if __name__ == "__main__":
    main()
