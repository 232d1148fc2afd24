"""Does the order whose lanes are drawn anew cost speed beside the one before it, whose lanes were fixed?

Method: the code of a commit before the change in a worktree of its own (with its C files built there), and
this tree, take turns over one corpus on a warm disk: [8, 2048] batches of int64, each turn in a fresh process
that counts from the second batch on. Medians over the turns, of threads and of `workers="inline"`, and the
time to a first batch.

    python benchmarks/load_orders.py                     # 800 MB, 5 turns: 3 minutes
    python benchmarks/load_orders.py --megabytes 60 --seconds 1 --turns 1 --out /tmp/orders.json  # works?
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kept_runs import keep

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
BEFORE = "1cefe2f"  # the last commit of the order with fixed lanes
WORKERS = ("thread", "inline")

TURN = """
import contextlib, importlib, itertools, json, sys, time
import torch, stoker.load.loader
for home in ("stoker.load.device", "stoker.load.device.streams"):  # of torch, then and now
    with contextlib.suppress(ImportError):
        importlib.import_module(home)
folder, workers, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
began = time.perf_counter()
loader = stoker.Loader(folder, batch_size=8, seq_len=2048, workers=workers)
batches = itertools.chain.from_iterable(itertools.repeat(loader))
next(batches)
first, count = time.perf_counter(), 0
while (elapsed := time.perf_counter() - first) < seconds:
    for _ in range(10):
        next(batches)
    count += 10
readers = loader.report().choices[-1].setting.readers
rate, first_ms = count * 8 * 2048 / elapsed / 1e6, (first - began) * 1e3
found = {"mtok_s": rate, "first_batch_ms": first_ms, "readers": readers}
print(json.dumps(found))
loader.close()
"""

MAKE = """
import sys
from pathlib import Path
import numpy as np
from stoker.formats import megatron
from stoker.prepare.check import adopt
folder, megabytes = Path(sys.argv[1]), int(sys.argv[2])
for number in range(-(-megabytes // 64)):
    ids = np.random.default_rng(number).integers(0, 50_000, 32 << 20, dtype=np.uint16)
    ids[: megabytes * 500_000].tofile(folder / f"s{number:03d}.bin")
    lengths = np.array([min(len(ids), megabytes * 500_000)])
    (folder / f"s{number:03d}.idx").write_bytes(megatron.index_bytes(lengths, dtype=np.dtype("<u2")))
adopt(str(folder))
"""


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="load-orders-") as name, before(Path(name) / "tree") as old:
        trees = {"before": old, "now": ROOT}
        corpus = Path(name) / "corpus"
        corpus.mkdir()
        run(ROOT, MAKE, str(corpus), str(options.megabytes))
        turns: dict[str, list[dict[str, float]]] = {}
        for _ in range(options.turns):
            for workers in WORKERS:
                for which, tree in trees.items():
                    found = json.loads(run(tree, TURN, str(corpus), workers, str(options.seconds)))
                    turns.setdefault(f"{which}, {workers}", []).append(found)
    results = {case: summary(some) for case, some in turns.items()}
    ratios = {
        workers: results[f"now, {workers}"]["mtok_s"]["median"]
        / results[f"before, {workers}"]["mtok_s"]["median"]
        for workers in WORKERS
    }
    report = {
        "question": __doc__.strip().splitlines()[0], "before": BEFORE, "corpus_mb": options.megabytes,
        "platform": platform.platform(), "cores": os.cpu_count(), "results": results, "now / before": ratios,
    }  # fmt: skip
    keep(options.out, report)
    print(json.dumps(report, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=800)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "load_orders.json")
    return parser.parse_args()


@contextmanager
def before(folder: Path) -> Iterator[Path]:
    """The tree of the commit before, built."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--detach", str(folder), BEFORE], check=True, capture_output=True)
    try:
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(build, cwd=folder, check=True, capture_output=True)
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True, capture_output=True)


def run(tree: Path, program: str, *arguments: str) -> str:
    """A program with the stoker of a tree, which stands before the installed one on the path."""
    environ = {**os.environ, "PYTHONPATH": str(tree / "src")}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{tree}: {done.stderr.strip()}")
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def summary(turns: list[dict[str, float]]) -> dict[str, dict[str, object]]:
    return {
        name: {
            "median": statistics.median(turn[name] for turn in turns),
            "all": [round(turn[name], 1) for turn in turns],
        }
        for name in turns[0]
    }


if __name__ == "__main__":
    main()
