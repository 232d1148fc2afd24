"""How near does self-tuning come to the best fixed number of readers on storage that answers late?

Method: a corpus in the page cache; a small library that is loaded before the C library (LD_PRELOAD) makes
every read of a `.bin` take so many milliseconds longer, as a filesystem or volume over a network does. Each
turn is a process of its own that loads for some seconds, epoch after epoch: with fixed `readers=`, and as the
loader chooses. Settings take turns; medians over the turns. What counts is the ratio of the best fixed
setting to the tuned one, and after how many seconds the tuned loader chose for the last time.

    python benchmarks/load_latency.py                                          # 3 minutes
    python benchmarks/load_latency.py --latencies 20 --seconds 3 --turns 1 --readers 2 16 \\
        --megabytes 64 --out /tmp/latency.json                                 # does it work?
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kept_runs import keep

RESULTS = Path(__file__).parent / "results"

# The descriptor's path is looked up for each read: only shards are slow, not what Python itself reads.
LATE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static void wait_for(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t got = readlink(link, path, sizeof path - 1);
    if (got > 4 && !memcmp(path + got - 4, ".bin", 4)) usleep(atoi(getenv("LATE_US")));
}
ssize_t pread(int fd, void *to, size_t size, off_t at) {
    static ssize_t (*real)(int, void *, size_t, off_t);
    if (!real) real = dlsym(RTLD_NEXT, "pread");
    wait_for(fd);
    return real(fd, to, size, at);
}
ssize_t pread64(int fd, void *to, size_t size, off_t at) { return pread(fd, to, size, at); }
ssize_t preadv(int fd, const struct iovec *to, int count, off_t at) {
    static ssize_t (*real)(int, const struct iovec *, int, off_t);
    if (!real) real = dlsym(RTLD_NEXT, "preadv");
    wait_for(fd);
    return real(fd, to, count, at);
}
ssize_t preadv64(int fd, const struct iovec *to, int count, off_t at) { return preadv(fd, to, count, at); }
"""


def main() -> None:
    options = parse()
    if options.turn:
        print(json.dumps(turn(options.turn, options.fixed, options.seconds)))
        return
    with tempfile.TemporaryDirectory() as folder:
        make_corpus(Path(folder) / "corpus", options.megabytes)
        library = compile_late(Path(folder))
        found = {str(ms): measure(Path(folder), library, ms, options) for ms in options.latencies}
    result = {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "seconds": options.seconds,
        "ms": found,
    }
    keep(options.out, result)
    print(json.dumps(result, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--latencies", type=int, nargs="+", default=[5, 20, 80], help="milliseconds a read")
    parser.add_argument("--readers", type=int, nargs="+", default=[4, 16, 32, 64])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--out", type=Path, default=RESULTS / "load_latency.json")
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    parser.add_argument("--fixed", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_corpus(folder: Path, megabytes: int) -> None:
    import numpy as np

    from stoker.formats import megatron
    from stoker.prepare.check import adopt

    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(-(-megabytes // 64)):
        ids = rng.integers(0, 50_000, 32 << 20, dtype=np.uint16)
        ids.tofile(folder / f"s{number:03d}.bin")
        index = megatron.index_bytes(np.array([len(ids)]), dtype=np.dtype("<u2"))
        (folder / f"s{number:03d}.idx").write_bytes(index)
    adopt(str(folder))


def compile_late(folder: Path) -> Path:
    (folder / "late.c").write_text(LATE)
    library = folder / "late.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, folder / "late.c", "-ldl"], check=True)
    return library


def measure(folder: Path, library: Path, ms: int, options: argparse.Namespace) -> dict[str, object]:
    turns: dict[int, list[dict[str, object]]] = {}
    environ = {**os.environ, "LD_PRELOAD": str(library), "LATE_US": str(ms * 1000)}
    for _ in range(options.turns):
        for readers in (0, *options.readers):
            command = [sys.executable, __file__, "--turn", str(folder / "corpus"), "--fixed", str(readers)]
            command += ["--seconds", str(options.seconds)]
            done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
            turns.setdefault(readers, []).append(json.loads(done.stdout))
    rates = {n: statistics.median(one["batches_s"] for one in some) for n, some in turns.items()}
    best = max(rate for n, rate in rates.items() if n)
    tuned = turns[0][0]
    return {
        "batches_s": {str(n) if n else "tuned": round(rate, 1) for n, rate in rates.items()},
        "best_over_tuned": round(best / rates[0], 3),
        "chosen": tuned["readers"],
        "settled_s": tuned["settled_s"],
        "limit": tuned["limit"],
    }


def turn(corpus: str, readers: int, seconds: float) -> dict[str, object]:
    """Batches a second over the second half: the first is for the tuner; and when it last chose."""
    import stoker

    with stoker.Loader(corpus, batch_size=8, seq_len=2048, readers=readers, output="numpy") as loader:
        began = settled = time.monotonic()
        choices, batches, half = 1, 0, 0
        for _ in itertools.chain.from_iterable(itertools.repeat(loader)):
            batches += 1
            now = time.monotonic()
            if len(loader.report().choices) != choices:
                choices, settled = len(loader.report().choices), now
            if not half and now - began > seconds / 2:
                half, half_at = batches, now
            if now - began > seconds:
                break
        report = loader.report()
    return {
        "batches_s": (batches - half) / (now - half_at),
        "readers": report.choices[-1].setting.readers,
        "settled_s": round(settled - began, 2),
        "limit": report.limit,
        "waited_s": round(report.waited_s, 2),
    }


if __name__ == "__main__":
    main()
