"""Does `stoker bench path` measure what fio measures? The same engine, block, threads and order, interleaved.

Each turn runs fio (Debian's) and stoker one after the other on the same disk, on files of their own, past the
page cache or out of it, and the other one first the next time. The figure is the ratio of their rates.

    python benchmarks/bench_path.py [--turns 7] [--seconds 1] [--size 1GiB] [FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from kept_runs import keep
from stoker.bench.drive import Workload
from stoker.bench.path import Trial, bench_path
from stoker.formats.sizes import parse_size

RESULT = Path(__file__).parent / "results" / "bench_path.json"
CASES = {
    "sequential, direct pread 1 MiB × 1": Trial(work=Workload()),
    "sequential, direct pread 1 MiB × 4": Trial(work=Workload(threads=4)),
    "random, direct pread 4 KiB × 1": Trial(work=Workload(block=4096, random=True)),
    "random, direct pread 4 KiB × 16": Trial(work=Workload(block=4096, random=True, threads=16)),
    "random, direct io_uring 4 KiB depth 32": Trial(
        work=Workload(engine="io_uring", block=4096, random=True, depth=32)
    ),
    "sequential, direct pwrite 4 MiB × 1": Trial(work=Workload(block=4 << 20, writes=True)),
    "sequential, page cache pread 1 MiB × 1": Trial(work=Workload(), cache="warm"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--size", type=parse_size, default=1 << 30)
    parser.add_argument("--no-keep", action="store_true", help="print only")
    given = parser.parse_args()
    rates: dict[str, dict[str, list[float]]] = {name: {"fio": [], "stoker": []} for name in CASES}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for turn in range(given.turns):
            for name, trial in CASES.items():
                order = ("fio", "stoker") if turn % 2 else ("stoker", "fio")
                for who in order:
                    run = _fio if who == "fio" else _stoker
                    rates[name][who].append(run(Path(folder), trial, given.size, given.seconds))
    report = {
        "sizes": {"file": given.size, "seconds": given.seconds, "turns": given.turns},
        "fio": subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip(),
        "rates_bytes_s": rates,
        "ratio": {name: statistics.median(_ratios(both)) for name, both in rates.items()},
    }
    for name, both in rates.items():
        ratios = _ratios(both)
        print(f"{name:42} fio {statistics.median(both['fio']) / 1e9:6.2f} GB/s  stoker/fio "
              f"{statistics.median(ratios):.3f} ({min(ratios):.2f}-{max(ratios):.2f})")  # fmt: skip
    if not given.no_keep:
        keep(RESULT, report)


def _ratios(both: dict[str, list[float]]) -> list[float]:
    return [ours / theirs for ours, theirs in zip(both["stoker"], both["fio"], strict=True)]


def _stoker(folder: Path, trial: Trial, size: int, seconds: float) -> float:
    timed = replace(trial, work=replace(trial.work, seconds=seconds))
    return bench_path(folder, size=size, trials=[timed]).figures[-1].value


def _fio(folder: Path, trial: Trial, size: int, seconds: float) -> float:
    work = trial.work
    file = folder / "fio.bin"
    if not file.exists():
        with file.open("wb") as made:
            for _ in range(0, size, 4 << 20):
                made.write(os.urandom(4 << 20))
            made.flush()
            os.fsync(made.fileno())
    what = f"{'rand' if work.random else ''}{'write' if work.writes else 'read'}"
    words = [
        "fio", "--name=one", f"--filename={file}", f"--rw={what}", f"--bs={work.block}",
        f"--size={size // work.threads}", f"--numjobs={work.threads}",
        f"--offset_increment={size // work.threads}", f"--iodepth={work.depth}",
        f"--ioengine={'io_uring' if work.engine == 'io_uring' else 'psync'}",
        f"--direct={int(trial.cache == 'direct')}",
        f"--runtime={seconds}", "--time_based", "--thread", "--group_reporting", "--output-format=json",
        "--invalidate=0", "--gtod_reduce=0",
    ]  # fmt: skip
    if trial.cache == "warm":
        subprocess.run(["cat", str(file)], stdout=subprocess.DEVNULL, check=True)
    said = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    return float(said["jobs"][0]["write" if work.writes else "read"]["bw_bytes"])


if __name__ == "__main__":
    main()
