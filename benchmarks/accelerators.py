"""Question: does `stoker bench accelerators` say what MLPerf Storage's dlio_benchmark says of one workload?

Method: dlio_benchmark writes its files (npz, one sample each) and trains on them (PyTorch's reader, one
emulated card); we emulate one card of the same sample size, batch, compute time and number of readers on
files of our own on the same disk. In turn, page cache dropped before each; the utilisation of both.

dlio_benchmark wants tensorflow and DALI, whose readers are not used here: `--dlio PYTHON` names an
environment in which it can be imported (stand-ins for those imports will do; MPI: pip install mpich),
`--dlio-path` what that needs on PYTHONPATH.

    python benchmarks/accelerators.py --dlio PYTHON [--dlio-path DIR] [--turns 3] [FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from kept_runs import RESULTS, keep
from stoker.bench.accelerators import Profile, emulate, samples_in

SAMPLE, BATCH, READERS, FILES = 8 << 20, 4, 4, 96
STEPS_S = {"with time to spare": 0.2, "near what is given": 0.08, "too fast for the reader": 0.02}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--dlio", required=True, help="a Python that has dlio_benchmark")
    parser.add_argument("--dlio-path", default="")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--no-keep", action="store_true")
    given = parser.parse_args()
    report: dict = {
        "workload": {"sample_bytes": SAMPLE, "batch": BATCH, "readers": READERS, "files": FILES},
        "load_before": round(os.getloadavg()[0], 1),
        "utilisation": {},
    }
    with tempfile.TemporaryDirectory(dir=given.folder) as place:
        folder = Path(place)
        _dlio(given, folder, step_s=0.0)
        for name, step_s in STEPS_S.items():
            both: dict[str, list[float]] = {"dlio": [], "stoker": []}
            for turn in range(given.turns):
                for who in ("dlio", "stoker") if turn % 2 else ("stoker", "dlio"):
                    run = _dlio(given, folder, step_s=step_s) if who == "dlio" else _ours(folder, step_s)
                    both[who].append(run)
            report["utilisation"][name] = {"step_s": step_s, **both}
            apart = statistics.median(both["stoker"]) - statistics.median(both["dlio"])
            print(f"{name} ({step_s} s a step): {both}, apart {100 * apart:+.1f} points", flush=True)
    if not given.no_keep:
        keep(RESULTS / "accelerators.json", report)


def _ours(folder: Path, step_s: float) -> float:
    profile = Profile(sample_bytes=SAMPLE, batch=BATCH, step_s=step_s, in_a_file=1, readers=READERS)
    with samples_in(folder, profile, SAMPLE * FILES) as files:
        return emulate(profile, files, cards=1, seconds=FILES / BATCH * step_s + 1.0).utilisation


def _dlio(given: argparse.Namespace, folder: Path, *, step_s: float) -> float:
    """One epoch; without a step it writes the files. Its own figure leaves out the first step."""
    out = folder / "dlio-out"
    data = folder / "dlio-data"
    for path in data.rglob("*.npz"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    settings = {
        "workflow.generate_data": not step_s, "workflow.train": bool(step_s), "workflow.checkpoint": False,
        "dataset.data_folder": data, "dataset.num_files_train": FILES, "dataset.record_length": SAMPLE,
        "dataset.record_length_stdev": 0, "dataset.record_length_resize": 0,
        "reader.batch_size": BATCH, "reader.read_threads": READERS,
        "train.epochs": 1, "train.computation_time": step_s,
    }  # fmt: skip
    words = ["workload=unet3d_h100", *(f"++workload.{name}={value}" for name, value in settings.items())]
    environ = {**os.environ, "PYTHONPATH": given.dlio_path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [given.dlio, "-m", "dlio_benchmark.main", *words, f"hydra.run.dir={out}"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"dlio_benchmark: {done.stderr[-2000:]}{done.stdout[-2000:]}")
    if not step_s:
        return 0.0
    said = json.loads((out / "summary.json").read_text())
    return float(said["metric"]["train_au_mean_percentage"]) / 100


if __name__ == "__main__":
    main()
