"""Is an HTTP client of our own worth its lines beside obstore, urllib3 and httpx?

Question: seconds and CPU seconds to bring 4 x 256 MiB and 4,000 x 64 KiB from a web server to memory (tmpfs),
over http and https, from next door and at 20 ms to the first byte.
Method: nginx on the loopback, two workers, serving from tmpfs; for distance it sends each answer so much
later (tests/integration/far_store.py). Each client runs in a process of its own with the same work around it:
files written in place, nothing hashed, the same authority trusted. The others are asked for ranges of 16 MiB
by 8 threads, and for small files by 16, from afar by 64; ours chooses for itself, and compares versions in
every answer. Interleaved rounds; imports are not timed.
Command: python benchmarks/http_clients.py [--rounds 5] [--scale 1] [--delays 0,20] [--schemes http,https]
(needs the `bench` extra.) About 5 minutes on two quiet cores. Writes benchmarks/results/http_clients.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

from kept_runs import keep
from stage_far import certificate, serving

HERE = Path(__file__).parent
MIB = 1 << 20
CASES = {"large": (4, 256 * MIB), "small": (4000, 64 << 10)}
LABELS = {"large": "4 x 256 MiB", "small": "4,000 x 64 KiB"}
CLIENTS = ("stoker", "obstore", "urllib3", "httpx")
RANGE = 16 * MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the counts, to try it out")
    parser.add_argument("--delays", default="0,20", help="ms to the first byte")
    parser.add_argument("--schemes", default="http,https")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "http_clients.json")
    parser.add_argument("--turn", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn:
        print(json.dumps(turn(*options.turn)))
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        runs = measure(Path(scratch), options)
    print(json.dumps(medians(runs), indent=1))


def medians(runs: dict[str, list[dict]]) -> dict[str, dict[str, float]]:
    return {
        key: {what: statistics.median(run[what] for run in some) for what in ("wall_s", "cpu_s")}
        for key, some in runs.items()
    }


def measure(scratch: Path, options: argparse.Namespace) -> dict[str, list[dict]]:
    runs: dict[str, list[dict]] = {}
    root = scratch / "root"
    counts = {case: max(1, int(count * options.scale)) for case, (count, _) in CASES.items()}
    for case, count in counts.items():
        (root / "bucket" / case).mkdir(parents=True)
        for number in range(count):
            (root / "bucket" / case / str(number)).write_bytes(os.urandom(CASES[case][1]))
    authority, chain = certificate(scratch / "tls")
    for delay, scheme in itertools.product(options.delays.split(","), options.schemes.split(",")):
        folder = scratch / f"{delay}-{scheme}"
        folder.mkdir()
        with serving(folder, root, float(delay), chain if scheme == "https" else None, authority) as servers:
            for number, case in itertools.product(range(options.rounds), CASES):
                for name in CLIENTS[number % len(CLIENTS) :] + CLIENTS[: number % len(CLIENTS)]:
                    with tempfile.TemporaryDirectory(dir=scratch) as target:
                        where = [f"{servers.endpoint}/bucket", target, str(counts[case]), delay]
                        command = [sys.executable, __file__, "--turn", name, case, *where]
                        done = subprocess.run(
                            command, check=True, stdout=subprocess.PIPE, text=True, env=servers.environ
                        )
                    key = f"{LABELS[case]}, {delay} ms, {scheme}: {name}"
                    runs.setdefault(key, []).append(json.loads(done.stdout))
                    print(key, runs[key][-1], file=sys.stderr, flush=True)
        report = {"scale": options.scale, "versions": {name: version(name) for name in CLIENTS}}
        keep(options.results, {**report, "median": medians(runs), "runs": runs})
    return runs


def turn(client: str, case: str, url: str, target: str, count: str, delay: str) -> dict[str, float]:
    size, files = CASES[case][1], int(count)
    threads = 8 if size > RANGE else 16 if delay == "0" else 64
    make = {"stoker": stoker, "obstore": obstore, "urllib3": urllib3, "httpx": httpx}[client]
    bring = make(url, threads)
    used = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    bring(case, files, size, Path(target))
    wall_s, now = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    assert sum(path.stat().st_size for path in Path(target).iterdir()) == files * size
    cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return {"wall_s": wall_s, "cpu_s": cpu_s}


def stoker(url: str, threads: int):
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


def by_ranges(get, threads: int):
    """Bring files through `get(path, start, stop) -> bytes`, as one would with any client."""

    def bring(case: str, count: int, size: int, target: Path) -> None:
        def one(number: int, start: int) -> None:
            stop = min(start + RANGE, size)
            data = get(f"{case}/{number}", start, stop)
            handle = os.open(target / str(number), os.O_WRONLY | os.O_CREAT)
            os.pwrite(handle, data, start)
            os.close(handle)

        with ThreadPoolExecutor(threads) as pool:
            jobs = [pool.submit(one, n, start) for n in range(count) for start in range(0, size, RANGE)]
            for job in jobs:
                job.result()

    return bring


def obstore(url: str, threads: int):
    import obstore
    from obstore.store import HTTPStore

    store = HTTPStore.from_url(url, client_options={"allow_http": True})
    return by_ranges(lambda path, start, stop: obstore.get_range(store, path, start=start, end=stop), threads)


def urllib3(url: str, threads: int):
    import urllib3

    parts, trusted = urlsplit(url), {"cert_reqs": "CERT_REQUIRED", "ca_certs": os.environ["SSL_CERT_FILE"]}
    https = parts.scheme == "https"
    kind = urllib3.HTTPSConnectionPool if https else urllib3.HTTPConnectionPool
    pool = kind(parts.hostname, parts.port, maxsize=threads, **(trusted if https else {}))

    def get(path: str, start: int, stop: int) -> bytes:
        wanted = {"Range": f"bytes={start}-{stop - 1}"}
        return pool.request("GET", f"{parts.path}/{path}", headers=wanted).data

    return by_ranges(get, threads)


def httpx(url: str, threads: int):
    import httpx

    limits = httpx.Limits(max_connections=threads, max_keepalive_connections=threads)
    context = ssl.create_default_context(cafile=os.environ["SSL_CERT_FILE"])
    client = httpx.Client(limits=limits, timeout=60, verify=context)

    def get(path: str, start: int, stop: int) -> bytes:
        return client.get(f"{url}/{path}", headers={"Range": f"bytes={start}-{stop - 1}"}).content

    return by_ranges(get, threads)


if __name__ == "__main__":
    main()
