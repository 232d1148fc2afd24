"""Is an HTTP client of our own worth its lines beside obstore, urllib3 and httpx?

Question: seconds and CPU seconds to bring 4 x 256 MiB and 4,000 x 64 KiB from a web server to memory (tmpfs).
Method: nginx on the loopback, serving from tmpfs. Each client runs in a process of its own with the same work
around it: files written in place, nothing hashed. The others are asked for ranges of 16 MiB by 8 threads, and
for small files by 16; ours chooses for itself, and compares versions in every answer. Interleaved rounds;
imports are not timed.
Command: python benchmarks/http_clients.py [--rounds 5]      (needs `pip install httpx urllib3 obstore`)
Writes benchmarks/results/http_clients.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from kept_runs import keep

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests" / "integration")]

MIB = 1 << 20
CASES = {"large": (4, 256 * MIB), "small": (4000, 64 << 10)}
CLIENTS = ("stoker", "obstore", "urllib3", "httpx")
RANGE = 16 * MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "http_clients.json")
    parser.add_argument("--turn", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn:
        print(json.dumps(turn(*options.turn)))
        return
    import web_server

    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as scratch,
        web_server.serve_folder(Path(scratch, "web"), nginx="nginx") as server,
    ):
        for case, (count, size) in CASES.items():
            (server.root / case).mkdir()
            for number in range(count):
                (server.root / case / str(number)).write_bytes(os.urandom(size))
        runs = measure(server.url, scratch, options.rounds)
    keep(options.results, {"runs": runs, "clients": {name: version(name) for name in CLIENTS}})
    for case in CASES:
        for name in CLIENTS:
            some = runs[f"{name} / {case}"]
            wall, cpu = (statistics.median(run[key] for run in some) for key in ("wall_s", "cpu_s"))
            print(f"{case} {name:8} {wall:6.2f} s wall, {cpu:6.2f} s CPU")


def measure(url: str, scratch: str, rounds: int) -> dict[str, list[dict]]:
    runs: dict[str, list[dict]] = {}
    for number in range(rounds):
        for case in CASES:
            for name in CLIENTS[number % len(CLIENTS) :] + CLIENTS[: number % len(CLIENTS)]:
                with tempfile.TemporaryDirectory(dir=scratch) as target:
                    command = [sys.executable, __file__, "--turn", name, case, url, target]
                    done = subprocess.run(command, check=True, capture_output=True, text=True)
                runs.setdefault(f"{name} / {case}", []).append(json.loads(done.stdout))
    return runs


def turn(client: str, case: str, url: str, target: str) -> dict[str, float]:
    count, size = CASES[case]
    bring = {"stoker": stoker, "obstore": obstore, "urllib3": urllib3, "httpx": httpx}[client](url)
    used = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    bring(case, count, size, Path(target))
    wall_s, now = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    assert sum(path.stat().st_size for path in Path(target).iterdir()) == count * size
    cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return {"wall_s": wall_s, "cpu_s": cpu_s}


def stoker(url: str):
    from stoker.stage.origins.origin import RemoteFile
    from stoker.stage.wire.wire import Wire

    class Sink:
        def __init__(self, path: Path) -> None:
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT)

        def write(self, offset: int, data: memoryview) -> None:
            os.pwrite(self._handle, data, offset)

    def bring(case: str, count: int, size: int, target: Path) -> None:
        def deliver(landed) -> None:
            for file, data in landed:
                (target / file.name).write_bytes(data)

        def one(file: RemoteFile) -> None:
            wire.fetch(file, missing=[(0, size)], sink=Sink(target / file.name))

        files = [RemoteFile(name=str(n), url=f"{url}/{case}/{n}", bytes=size) for n in range(count)]
        with Wire() as wire, ThreadPoolExecutor(4) as pool:
            wire.fetch_small(files, deliver=deliver) if size < MIB else list(pool.map(one, files))

    return bring


def by_ranges(get):
    """Bring files through `get(path, start, stop) -> bytes`, as one would with any client."""

    def bring(case: str, count: int, size: int, target: Path) -> None:
        def one(number: int, start: int) -> None:
            stop = min(start + RANGE, size)
            data = get(f"{case}/{number}", start, stop)
            handle = os.open(target / str(number), os.O_WRONLY | os.O_CREAT)
            os.pwrite(handle, data, start)
            os.close(handle)

        with ThreadPoolExecutor(8 if size > RANGE else 16) as pool:
            jobs = [pool.submit(one, n, start) for n in range(count) for start in range(0, size, RANGE)]
            for job in jobs:
                job.result()

    return bring


def obstore(url: str):
    import obstore
    from obstore.store import HTTPStore

    store = HTTPStore.from_url(url, client_options={"allow_http": True})
    return by_ranges(lambda path, start, stop: obstore.get_range(store, path, start=start, end=stop))


def urllib3(url: str):
    import urllib3

    pool = urllib3.HTTPConnectionPool(*url.removeprefix("http://").split(":"), maxsize=16)
    return by_ranges(
        lambda path, start, stop: (
            pool.request("GET", f"/{path}", headers={"Range": f"bytes={start}-{stop - 1}"}).data
        )
    )


def httpx(url: str):
    import httpx

    client = httpx.Client(limits=httpx.Limits(max_connections=16, max_keepalive_connections=16), timeout=60)
    return by_ranges(
        lambda path, start, stop: (
            client.get(f"{url}/{path}", headers={"Range": f"bytes={start}-{stop - 1}"}).content
        )
    )


if __name__ == "__main__":
    main()
