"""How soon does training begin on a dataset that lies in a slow object store, and what does an epoch fetch?

Question: seconds and bytes from the start of a loader to its first batch, bytes that a node fetches in an
epoch, seconds of that epoch, and batches a second once all lies on the node; of `stoker.feed`, of stoker with
everything staged before it, of MosaicML streaming and of litdata, all with a shuffle of all data.
Method: one corpus of random tokens, in each one's own format in shards of 64 MiB, behind nginx with so many
bytes a second for each connection, and rclone for the rest of S3. Every turn is a process of its own with an
empty cache: one ends at its first batch, another reads the epoch and then some more; seconds are counted
after imports. Bytes are those that nginx logged as sent. Turns are interleaved, medians and all turns are
written. Peers have their defaults, but for workers (0 and 2); whoever fails is written down with its error.
stoker verifies every block, the peers nothing; litdata writes tokens as int32, and its shares are of those
bytes. Peers want versions of transformers and numpy that others here do not: give them a Python of their own
(`python -m venv V; V/bin/pip install mosaicml-streaming litdata`).
Command: python benchmarks/feed_remote.py [--megabytes 1024] [--turns 3] [--rate 10m] [--peers V/bin/python]
    [--only stoker,mosaic] [--dry]    (--dry: nothing is kept)
Writes benchmarks/results/feed_remote.json.
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
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SEQ_LEN, BATCH = 2048, 8
WARM_S, WARM_LEAST_S = 20.0, 2.0  # whole epochs: of half a gigabyte one lasts 0.15 s
SHARD_TOKENS = 32 << 20
PACKAGES = {"stoker": "stoker", "mosaic": "mosaicml-streaming", "litdata": "litdata"}


# --- the loaders: an iterator of batches of one epoch, again and again ------------------------------------


def stoker_feed(cache: Path, workers: int) -> Callable[[], Iterator[Any]]:
    import stoker

    feeder = stoker.feed("s3://bucket/stoker", cache=cache, device="cpu", batch_size=BATCH, seq_len=SEQ_LEN)
    return lambda: iter(feeder)


def stoker_staged(cache: Path, workers: int) -> Callable[[], Iterator[Any]]:
    import stoker

    stoker.fetch("s3://bucket/stoker", cache=cache)
    return stoker_feed(cache, workers)


def mosaic(cache: Path, workers: int) -> Callable[[], Iterator[Any]]:
    import torch

    from load_tokens import _let_mosaic_import

    _let_mosaic_import()
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    def collate(samples: list[Any]) -> Any:
        import numpy as np

        wide = torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))
        return wide[:, :-1], wide[:, 1:]

    clean_stale_shared_memory()  # of the turn before, which ended at once
    dataset = StreamingDataset(
        remote="s3://bucket/mosaic", local=str(cache / "mosaic"), shuffle=True, batch_size=BATCH
    )
    loader = DataLoader(dataset, batch_size=BATCH, num_workers=workers, collate_fn=collate)
    return lambda: iter(loader)


def litdata(cache: Path, workers: int) -> Callable[[], Iterator[Any]]:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import TokensLoader, downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # which it has no option for
    dataset = StreamingDataset(
        "s3://bucket/litdata",
        cache_dir=str(cache),
        item_loader=TokensLoader(block_size=SEQ_LEN + 1),
        shuffle=True,
        storage_options={"endpoint_url": os.environ["AWS_ENDPOINT_URL"]},
    )
    loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers)
    return lambda: iter(loader)


LOADERS = {
    "stoker": (stoker_feed, 0),
    "stoker, staged first": (stoker_staged, 0),
    "mosaic": (mosaic, 0),
    "mosaic, 2 workers": (mosaic, 2),
    "litdata": (litdata, 0),
    "litdata, 2 workers": (litdata, 2),
}


def imported(name: str) -> None:
    """What a loader imports, before the clock starts."""
    import torch  # noqa: F401

    if name.startswith("stoker"):
        import stoker

        stoker.feed, stoker.fetch  # noqa: B018 - they are imported when they are first named
    elif name.startswith("mosaic"):
        from load_tokens import _let_mosaic_import

        _let_mosaic_import()
        import streaming  # noqa: F401
    else:
        import litdata  # noqa: F401


def child(name: str, cache: Path, mode: str) -> None:
    """One turn: say how it went, as JSON."""
    imported(name)
    make, workers = LOADERS[name]
    began = time.monotonic()
    epoch = make(cache, workers)
    batches = epoch()
    next(batches)
    said: dict[str, Any] = {"first_s": time.monotonic() - began}
    if mode == "epoch":
        said["batches"] = 1 + sum(1 for _ in batches)
        said["epoch_s"] = time.monotonic() - began
        warm, begin = 0, time.monotonic()
        while time.monotonic() - begin < WARM_LEAST_S:
            for _ in epoch():
                warm += 1
                if time.monotonic() - begin > WARM_S:
                    break
        said["warm_batches_s"] = warm / (time.monotonic() - begin)
    sys.stdout.write(f"\n{json.dumps(said)}\n")
    sys.stdout.flush()
    os._exit(0)  # at once: what would come behind the first batch is not counted


# --- corpora ------------------------------------------------------------------------------------------


def make(name: str, bucket: Path) -> None:
    """In the format of a loader, from the tokens that were written for stoker."""
    import load_tokens

    if name == "mosaic":
        load_tokens.make_mosaic(bucket)
    else:
        load_tokens.make_litdata(bucket)


def make_tokens(bucket: Path, tokens: int) -> None:
    import numpy as np

    from load_tokens import index_stoker

    folder = bucket / "stoker"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number, at in enumerate(range(0, tokens, SHARD_TOKENS)):
        count = min(SHARD_TOKENS, tokens - at)
        rng.integers(0, 50_000, count, dtype=np.uint16).tofile(folder / f"s{number:04d}.bin")
    index_stoker(folder)


# --- turns --------------------------------------------------------------------------------------------


class Turns:
    """Runs children, and counts what the server sent to each."""

    def __init__(self, folder: Path, environ: dict[str, str], log: Path, peers: str) -> None:
        self._folder, self._log, self._peers = folder, log, peers
        self._environ = {**os.environ, **environ, "PYTHONPATH": os.pathsep.join(_path())}

    def python_of(self, name: str) -> str:
        return sys.executable if name.startswith("stoker") else self._peers

    def make(self, name: str, bucket: Path) -> str:
        command = [self.python_of(name), str(Path(__file__)), "--make", name, "--folder", str(bucket)]
        ran = subprocess.run(command, env=self._environ, capture_output=True, text=True)
        return "" if ran.returncode == 0 else _error(ran.stderr)

    def run(self, name: str, mode: str) -> dict[str, Any]:
        cache = Path(tempfile.mkdtemp(dir=self._folder, prefix="cache-"))
        before = self._sent()
        command = [self.python_of(name), str(Path(__file__)), "--child", name, "--mode", mode]
        ran = subprocess.run(
            [*command, "--folder", str(cache)], env=self._environ, capture_output=True, text=True
        )
        shutil.rmtree(cache, ignore_errors=True)
        if ran.returncode or not ran.stdout.strip():
            return {"error": _error(ran.stderr)}
        return {**json.loads(ran.stdout.strip().splitlines()[-1]), "bytes": self._sent() - before}

    def _sent(self) -> int:
        """Of all requests so far; one is logged when it ends."""
        size = -1
        while size != (now := self._log.stat().st_size):
            size = now
            time.sleep(0.2)
        return sum(int(line.split('" ')[1].split()[1]) for line in self._log.read_text().splitlines())


def _path() -> list[str]:
    """Where children look for modules: beside this script, and where this process was told to."""
    return [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]


def _error(said: str) -> str:
    """The line that names it, of a traceback."""
    lines = [line for line in said.splitlines() if "Error" in line and not line.startswith(" ")]
    return (lines or said.strip().splitlines() or ["no output"])[-1]


def measure(
    turns: Turns, names: list[str], count: int, bucket: Path, *, keep_these: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    found: dict[str, Any] = {name: {"first": [], "epoch": []} for name in names}
    sizes = {one.name: sum(path.stat().st_size for path in one.iterdir()) for one in bucket.iterdir()}
    for turn in range(count):
        for name in names:
            for mode in ("first", "epoch"):
                said = turns.run(name, mode)
                said["share"] = said.get("bytes", 0) / sizes[name.partition(",")[0]]
                found[name][mode].append(said)
                print(f"turn {turn}: {name}, {mode}: {json.dumps(said)}", flush=True)
            loaders = {name: {**one, "medians": _medians(one)} for name, one in found.items() if one["epoch"]}
            keep_these(loaders)  # what is measured stays, whatever comes later
    return loaders


def _medians(found: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    medians = {}
    for mode, figure in (
        ("first", "first_s"),
        ("first", "share"),
        ("epoch", "share"),
        ("epoch", "epoch_s"),
        ("epoch", "warm_batches_s"),
    ):
        if values := [one[figure] for one in found[mode] if figure in one and "error" not in one]:
            medians[f"{mode}_{figure}"] = statistics.median(values)
    return medians


def main() -> None:
    sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "integration")]
    options = parsed()
    if options.child:
        child(options.child, Path(options.folder), options.mode)
    if options.make:
        make(options.make, Path(options.folder))
        return
    import s3_server

    from kept_runs import keep

    rclone = shutil.which("rclone", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or "rclone"
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin") or "nginx"
    with tempfile.TemporaryDirectory(prefix="feed-remote-") as scratch:
        folder = Path(scratch)
        limit = f"limit_rate {options.rate};"
        # boto3 asks with HEAD for the ETag and insists on it: one server must answer both
        s3_server.NGINX = s3_server.NGINX.replace('"^GET (', '"^(GET|HEAD) (')
        with s3_server.serve(folder / "s3", rclone=rclone, nginx=nginx, settings=limit) as s3:
            bucket = s3.root / "bucket"
            make_tokens(bucket, options.megabytes << 19)
            environ = {**s3.environ(), "S3_ENDPOINT_URL": s3.endpoint}
            turns = Turns(folder, environ, folder / "s3/access.log", options.peers)
            wanted = [name for name in LOADERS if name.partition(",")[0] in options.only.split(",")]
            failed = {
                name: error
                for name in dict.fromkeys(one.partition(",")[0] for one in wanted)
                if name != "stoker" and (error := turns.make(name, bucket))
            }
            names = [name for name in wanted if name.partition(",")[0] not in failed]
            report = {
                "megabytes": options.megabytes,
                "rate": options.rate,
                "batch": BATCH,
                "seq_len": SEQ_LEN,
                "cores": os.cpu_count(),
                "python": platform.python_version(),
                "versions": versions(turns, options.only.split(",")),
                "failed": failed,
            }

            def keep_these(loaders: dict[str, Any]) -> None:
                if not options.dry:
                    keep(HERE / "results" / "feed_remote.json", {**report, "loaders": loaders})

            loaders = measure(turns, names, options.turns, bucket, keep_these=keep_these)
    print(json.dumps({name: one["medians"] for name, one in loaders.items()}, indent=1))


def versions(turns: Turns, names: list[str]) -> dict[str, str]:
    found = {}
    for name in (*names, "torch"):
        package = PACKAGES.get(name, name)
        if package == "stoker":
            found[package] = metadata.version(package)
            continue
        asked = f"from importlib.metadata import version; print(version({package!r}))"
        ran = subprocess.run([turns.python_of("peer"), "-c", asked], capture_output=True, text=True)
        found[package] = ran.stdout.strip() or "none"
    return found


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rate", default="10m", help="bytes a second of each connection, as nginx has it")
    parser.add_argument("--peers", default=sys.executable, help="the Python that has the peers")
    parser.add_argument("--only", default="stoker,mosaic,litdata")
    parser.add_argument("--dry", action="store_true", help="keep nothing")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--make", default="", help=argparse.SUPPRESS)
    parser.add_argument("--mode", default="first", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
