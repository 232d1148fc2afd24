"""A rank of examples/preemptible that writes its losses down, and in its first runs waits for its fate."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import threading
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "preemptible" / "train.py"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("corpus")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--hold-at", type=int, nargs="*", default=[], help="of the first run, the second, …")
    parser.add_argument("--hold-rank", help="only this one waits; the others wait for it in a collective")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--cache")
    given = parser.parse_args()
    spec = importlib.util.spec_from_file_location("preemptible", EXAMPLE)
    assert spec
    assert spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    rank, checkpoints = os.environ["RANK"], given.folder / "checkpoints"
    hold_at = [*given.hold_at, 0][: _run_number(given.folder, rank)][-1]
    holds = hold_at and given.hold_rank in (None, rank)
    (given.folder / f"pid-{rank}").write_text(str(os.getpid()))
    losses, warned = given.folder / f"losses-{rank}", threading.Event()
    for one in (signal.SIGUSR1, signal.SIGTERM):  # before the checkpointer's, which calls it
        signal.signal(one, lambda *_: warned.set())
    for step, loss in example.train(given.corpus, steps=given.steps, folder=checkpoints, cache=given.cache):
        with losses.open("a") as file:
            file.write(f"{step} {loss!r}\n")
        if holds and step == hold_at:
            warned.wait()


def _run_number(folder: Path, rank: str) -> int:
    starts = folder / f"starts-{rank}"
    with starts.open("a") as file:
        file.write("once more\n")
    return len(starts.read_text().splitlines())


if __name__ == "__main__":
    main()
