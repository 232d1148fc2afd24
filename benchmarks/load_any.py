"""How many samples a second do loaders give from a map-style dataset, and is a resume exact?

Method: one dataset class, with a cheap `__getitem__` (a row of an array) and a costly one (a millisecond of
Python); a Hugging Face dataset of numbers. stoker (inline, threads, 2 processes), torch's DataLoader and
torchdata's StatefulDataLoader (0 and 2 workers) take turns, each turn in a fresh process that begins to count
at the second batch. Medians over the turns. Then each that has a state is stopped in the middle of an epoch
and gone on with in another process: seconds to its first batch there, and whether each sample came once.

    python benchmarks/load_any.py                            # 3 minutes a turn; wants `pip install torchdata`
    python benchmarks/load_any.py --seconds 1 --turns 1 --out /tmp/any.json     # does it work?
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np

from kept_runs import keep

RESULTS = Path(__file__).parent / "results"
SAMPLES, BATCH = 40_000, 64
LOADERS = (
    "stoker inline",
    "stoker threads",
    "stoker 2",
    "DataLoader 0",
    "DataLoader 2",
    "Stateful 0",
    "Stateful 2",
)
DATASETS = ("cheap", "costly", "hugging face")


class Rows:
    """Rows of an array; `work_s` of Python for each."""

    def __init__(self, work_s: float) -> None:
        self._rows, self._work_s = np.random.default_rng(0).random((SAMPLES, 64), np.float32), work_s

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, object]:
        until = time.thread_time() + self._work_s
        while time.thread_time() < until:
            pass
        return {"number": index, "row": self._rows[index]}


def make_dataset(name: str) -> object:
    if name != "hugging face":
        return Rows(0.001 if name == "costly" else 0.0)
    import datasets

    rows = np.random.default_rng(0).integers(0, 1000, (SAMPLES, 16))
    return datasets.Dataset.from_dict({"number": range(SAMPLES), "row": list(rows)})


def make_loader(name: str, dataset: object) -> object:
    kind, _, how = name.partition(" ")
    if kind == "stoker":
        import stoker

        workers = {"inline": "inline", "threads": "thread"}.get(how, "process")
        return stoker.Loader(dataset, batch_size=BATCH, workers=workers)
    workers, dataset = int(how), dataset.with_format("torch") if hasattr(dataset, "with_format") else dataset
    if kind == "DataLoader":
        from torch.utils.data import DataLoader

        return DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=workers)
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=workers)


def speed(name: str, dataset: str, seconds: float) -> dict[str, float]:
    loader = make_loader(name, make_dataset(dataset))
    began = time.monotonic()
    batches: Iterator[object] = iter(loader)
    next(batches)
    first = time.monotonic()
    count = 0
    while time.monotonic() - first < seconds and next(batches, None) is not None:
        count += 1
    return {"samples_s": count * BATCH / (time.monotonic() - first), "first_batch_s": first - began}


def stop(name: str, dataset: str, state: Path) -> dict[str, object]:
    """Half an epoch; the numbers seen, and the state in a file."""
    import torch

    loader = make_loader(name, make_dataset(dataset))
    seen: list[int] = []
    for batch in loader:
        seen += batch["number"].tolist()
        if len(seen) >= SAMPLES // 2:
            break
    torch.save(loader.state_dict(), state)
    return {"seen": seen}


def resume(name: str, dataset: str, state: Path) -> dict[str, object]:
    import torch

    loader = make_loader(name, make_dataset(dataset))
    began = time.monotonic()
    loader.load_state_dict(torch.load(state, weights_only=False))
    seen: list[int] = []
    for batch in loader:
        first = first if seen else time.monotonic()  # noqa: F821 - set by the first turn
        seen += batch["number"].tolist()
    return {"seen": seen, "first_batch_s": first - began}


def child(*arguments: str) -> dict[str, object]:
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "ended"}
    return json.loads(done.stdout)


def measure(options: argparse.Namespace) -> dict[str, object]:
    turns: dict[str, dict[str, list[dict[str, object]]]] = {}
    for _ in range(options.turns):
        for dataset in DATASETS:
            for name in LOADERS:
                found = child("speed", name, dataset, str(options.seconds))
                turns.setdefault(dataset, {}).setdefault(name, []).append(found)
    return {
        dataset: {name: summary(some) for name, some in loaders.items()} for dataset, loaders in turns.items()
    }


def summary(turns: list[dict[str, object]]) -> dict[str, object]:
    good = [one for one in turns if "error" not in one]
    if not good:
        return turns[0]
    rates = sorted(round(one["samples_s"]) for one in good)
    first = statistics.median(one["first_batch_s"] for one in good)
    return {
        "samples_s": statistics.median(rates),
        "range": [rates[0], rates[-1]],
        "first_batch_s": round(first, 3),
    }


def measure_resume(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in (one for one in LOADERS if not one.startswith("DataLoader")):
        state = folder / "state.pt"
        before, after = (child(what, name, "cheap", str(state)) for what in ("stop", "resume"))
        if "error" in before or "error" in after:
            found[name] = {"error": before.get("error") or after.get("error")}
            continue
        seen = before["seen"] + after["seen"]
        once = len(seen) == len(set(seen)) and len(seen) > SAMPLES - BATCH
        found[name] = {"each_once": once, "first_batch_s": round(after["first_batch_s"], 3)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "load_any.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, name, dataset, last = json.loads(options.child)
        work = {"speed": speed, "stop": stop, "resume": resume}[what]
        print(json.dumps(work(name, dataset, float(last) if what == "speed" else Path(last))))
        return
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        resumed = measure_resume(Path(folder))
    versions = {name: version(name) for name in ("torch", "torchdata", "datasets", "numpy")}
    result = {
        "platform": platform.platform(), "cores": os.cpu_count(), "versions": versions,
        "speed": measure(options), "resume": resumed,
    }  # fmt: skip
    keep(options.out, result)
    print(json.dumps(result, indent=1))


def version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
