"""How fast does raw text become shards, beside the tools people use for it?

Question: MB of text a second from JSONL to Megatron shards on two workers, and where the time goes.
Method: one corpus (the text of this Python installation, a document a file) and one 32k byte-level BPE.
Every contender is a process of its own, timed from its start to its end; rounds are interleaved, so
that a noisy minute hurts all alike; medians and the whole spread are written. The files are warm in the
page cache. Ids are compared: stoker's shards in the sources' order must equal Megatron's byte for byte.
Command: python benchmarks/prepare.py [--megabytes 300] [--rounds 3]
Writes benchmarks/results/prepare.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path

from kept_runs import keep

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))
import corpus as made  # noqa: E402 - the examples folder is no package

BARE = ("--no-shuffle", "--no-dedup")
PACKAGES = ("gigatoken", "tokenizers", "datatrove", "megatron-core", "webdataset", "numpy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=300)
    parser.add_argument("--large-megabytes", type=float, default=1000, help="for the memory check")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "prepare.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as scratch:
        report = measure(Path(scratch), options)
    keep(options.results, report)
    print(json.dumps(report["ratios"], indent=1))


def measure(scratch: Path, options: argparse.Namespace) -> dict:
    corpus, tokenizer = made.make(scratch, megabytes=options.megabytes)
    sample, _ = made.make(scratch, megabytes=min(20, options.megabytes))
    hundred, _ = made.make(scratch, megabytes=100)
    large, _ = made.make(scratch, megabytes=options.large_megabytes)
    contenders = {
        "stoker default": (stoker, corpus, ()),
        "stoker bare": (stoker, corpus, BARE),
        "stoker default, 100 MB": (stoker, hundred, ()),
        "stoker default, large": (stoker, large, ()),
        "stoker bare, large": (stoker, large, BARE),
        "engine alone, large": (peer, large, "engine_alone"),
        "datatrove": (peer, corpus, "datatrove"),
        "megatron-core": (peer, corpus, "megatron"),
        "Hugging Face encode per line, one core": (peer, sample, "encode_lines"),
        "stoker bare, one worker": (stoker, corpus, (*BARE, "--workers", "1")),
        "webdataset TarWriter": (peer, sample, "write_tar_webdataset"),
        "stoker TarWriter": (peer, sample, "write_tar_stoker"),
    }
    runs: dict[str, list[dict]] = {name: [] for name in contenders}
    identical = []
    for number in range(options.rounds):
        for name, (run, source, how) in contenders.items():
            out = scratch / "out" / name.replace(" ", "-").replace(",", "")
            runs[name].append(run(source, tokenizer, out, how))
            print(f"round {number} {name}: {runs[name][-1]}", file=sys.stderr, flush=True)
        identical.append(same_bytes(scratch / "out"))
        shutil.rmtree(scratch / "out")
    return report(runs, identical, options)


def stoker(source: Path, tokenizer: Path, out: Path, flags: tuple[str, ...]) -> dict:
    workers = () if "--workers" in flags else ("--workers", "2")
    command = ["-m", "stoker.cli", "prepare", source, "--tokenizer", tokenizer, "--out", out, "--json"]
    return timed([*command, *workers, *flags], source) | {"out_bytes": folder_bytes(out)}


def peer(source: Path, tokenizer: Path, out: Path, name: str) -> dict:
    out.mkdir(parents=True)
    return timed([HERE / "peers.py", name, source, tokenizer, out], source)


def timed(command: list, source: Path) -> dict:
    """Run to the end; wall and CPU seconds, and the largest memory of any one process of the tree."""
    source.read_bytes()  # warm the page cache for everyone
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    watch = PeakWatch(process.pid)
    assert process.stdout is not None
    said = json.loads(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(f"{command} failed with {process.returncode}")
    return {
        "megabytes": source.stat().st_size / 1e6,
        "wall_s": round(wall, 3),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 3),
        "peak_rss_mb": round(watch.peak_kib() * 1024 / 1e6, 1),
        **{key: said[key] for key in ("seconds", "tokens", "text_bytes", "stage_seconds") if key in said},
    }


class PeakWatch(threading.Thread):
    """Looks fifty times a second at every process of a tree; the kernel keeps each one's high-water mark."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self._root, self._peak, self._over = root, 0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.wait(0.02):
            self._peak = max([self._peak, *map(high_water_kib, family(self._root))])

    def peak_kib(self) -> int:
        self._over.set()
        self.join()
        return self._peak


def family(root: int) -> list[int]:
    try:
        children = Path(f"/proc/{root}/task/{root}/children").read_text().split()
    except OSError:
        return []
    return [root, *(pid for child in children for pid in family(int(child)))]


def high_water_kib(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)


def same_bytes(out: Path) -> bool:
    """stoker's bare shards, one after another, against the one file Megatron's builder wrote."""
    ours = b"".join(path.read_bytes() for path in sorted((out / "stoker-bare").glob("shard-*.bin")))
    theirs = (out / "megatron-core" / "corpus.bin").read_bytes()
    trove = b"".join(path.read_bytes() for path in sorted((out / "datatrove" / "tokens").glob("*.bin")))
    return ours == theirs == trove


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def report(runs: dict[str, list[dict]], identical: list[bool], options: argparse.Namespace) -> dict:
    rate = {name: median_rate(results) for name, results in runs.items()}
    best_peer = max(rate["datatrove"], rate["megatron-core"])
    engine_s = statistics.median(r["seconds"] for r in runs["engine alone, large"])
    stage_s = statistics.median(r["stage_seconds"]["write"] for r in runs["stoker bare, large"])
    whole_s = statistics.median(r["wall_s"] for r in runs["stoker bare, large"])
    tars = [
        statistics.median(r["seconds"] for r in runs[n]) for n in ("webdataset TarWriter", "stoker TarWriter")
    ]
    return {
        "question": "raw text to Megatron shards: MB/s of JSONL, whole processes, two workers",
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "system": platform.platform(),
        },
        "versions": {name: version(name) for name in ("stoker", *PACKAGES)},
        "rounds": options.rounds,
        "ids_identical": all(identical),
        "best_peer_mb_per_s": round(best_peer, 2),
        "median_mb_per_s": {name: round(value, 2) for name, value in rate.items()},
        "ratios": {
            "default over the better peer": round(rate["stoker default"] / best_peer, 2),
            "bare over the better peer": round(rate["stoker bare"] / best_peer, 2),
            "bare, one worker, over Hugging Face encode per line": round(
                rate["stoker bare, one worker"] / rate["Hugging Face encode per line, one core"], 2
            ),
            "bare, large, over the engine alone": round(engine_s / stage_s, 3),
            "bare, large, whole process with its start, over the engine alone": round(engine_s / whole_s, 3),
            "tar writing over webdataset": round(tars[0] / tars[1], 2),
            "peak RSS at 100 MB": max(r["peak_rss_mb"] for r in runs["stoker default, 100 MB"]),
            "peak RSS at the large corpus": max(r["peak_rss_mb"] for r in runs["stoker default, large"]),
        },
        "runs": runs,
    }


def median_rate(results: list[dict]) -> float:
    """MB/s of whole processes; a peer that timed only its own work (to be spared its start-up) by that."""
    return statistics.median(r["megabytes"] / r.get("seconds", r["wall_s"]) for r in results)


if __name__ == "__main__":
    main()
