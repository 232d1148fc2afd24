"""How fast do loaders turn token shards on a warm disk into [8, 2048] int64 batches, and what do they cost?

Method: one corpus of random uint16 tokens, written in each loader's own format. Every loader gets turns
in one run, interleaved, each turn in a fresh process that reports its import time apart, then
construction, first batch, batches for some seconds, CPU time and peak PSS. Medians over the turns. All
shuffle; stoker verifies checksums, nobody else does. With --cold also a first epoch of eight times the
corpus (the same files under eight names) read with O_DIRECT, past the page cache, in batches of 64 and of 8
rows, in turns with bare O_DIRECT reads of the same files: all of it with the construction of the loader, and
after its first GB. Bare reads go into the same 4 MiB again and again, which on a virtual machine need not
leave the cache of the host's processor; beside them reads of which one byte in each cache line is looked at.
With --disk-gb-s the same once more on a disk that the kernel keeps at that speed.

    python benchmarks/load_tokens.py                    # 800 MB, 3 turns: some minutes
    python benchmarks/load_tokens.py --megabytes 60 --seconds 1 --turns 1     # does it work?
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path

from kept_runs import keep
from load_packings import counted, make_documents
from load_packings import turns as packing_turns
from slow_disk import slow_disk

SEQ_LEN, BATCH = 2048, 8
SHARD_TOKENS = 32 << 20
RESULTS = Path(__file__).parent / "results"
PEERS = ("torch", "litdata", "mosaicml-streaming", "webdataset", "numpy", "xxhash")


# --- corpora ------------------------------------------------------------------------------------------


def make_corpora(folder: Path, tokens: int) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    shards = [min(SHARD_TOKENS, tokens - at) for at in range(0, tokens, SHARD_TOKENS)]
    (folder / "stoker").mkdir(parents=True)
    for number, count in enumerate(shards):
        rng.integers(0, 50_000, count, dtype=np.uint16).tofile(folder / "stoker" / f"s{number:04d}.bin")
    index_stoker(folder / "stoker")
    make_documents(folder)
    for make in (make_litdata, make_mosaic, make_webdataset):
        try:
            make(folder)
        except Exception as error:  # a peer that cannot even write is left out, and said so
            print(f"left out: {make.__name__}: {error!r}", file=sys.stderr)


def index_stoker(folder: Path) -> None:
    import numpy as np

    from stoker.formats import megatron
    from stoker.prepare.check import adopt

    for path in sorted(folder.glob("*.bin")):
        count = path.stat().st_size // 2
        lengths = np.full(count // 1024, 1024)
        lengths[-1] += count % 1024
        path.with_suffix(".idx").write_bytes(megatron.index_bytes(lengths, dtype=np.dtype("<u2")))
    adopt(str(folder))


def windows(folder: Path):
    import numpy as np

    for path in sorted((folder / "stoker").glob("*.bin")):
        ids = np.memmap(path, np.uint16, "r")
        for start in range(0, len(ids) - SEQ_LEN, SEQ_LEN):
            yield np.asarray(ids[start : start + SEQ_LEN + 1])


def make_litdata(folder: Path) -> None:
    import torch
    from litdata.streaming import TokensLoader
    from litdata.streaming.cache import Cache

    out = folder / "litdata"
    out.mkdir()
    block = SEQ_LEN + 1
    per_chunk = block * (SHARD_TOKENS // block)
    cache = Cache(str(out), chunk_size=per_chunk, item_loader=TokensLoader(block_size=block))
    for number, window in enumerate(windows(folder)):
        cache._add_item(number, torch.from_numpy(window.astype("int32")))
    cache.done()
    cache.merge()


def make_mosaic(folder: Path) -> None:
    _let_mosaic_import()
    from streaming import MDSWriter

    with MDSWriter(out=str(folder / "mosaic"), columns={"tokens": "ndarray:uint16"}) as writer:
        for window in windows(folder):
            writer.write({"tokens": window})


def _let_mosaic_import() -> None:
    """streaming imports torchvision for its image datasets; a torchvision built for another torch than
    this one fails to import, which need not stop it from reading tokens."""
    import types

    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("torchvision", "torchvision.datasets", "torchvision.transforms"):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__spec__ = ModuleSpec(name, None)
        sys.modules["torchvision.datasets"].VisionDataset = object
        sys.modules["torchvision.transforms"].functional = types.ModuleType("functional")
        sys.modules["torchvision.transforms.functional"] = types.ModuleType("functional")
        sys.modules["torchvision.transforms.functional"].to_tensor = None


def make_webdataset(folder: Path) -> None:
    import webdataset

    out = folder / "webdataset"
    out.mkdir()
    with webdataset.ShardWriter(f"{out}/%06d.tar", maxcount=8192, verbose=0) as writer:
        for number, window in enumerate(windows(folder)):
            writer.write({"__key__": f"{number:09d}", "npy": window})


# --- loaders: each gives an iterator of batches without end -----------------------------------------------


def stoker_inline(folder: Path, options: dict):
    return _stoker(folder, workers="inline", **options)


def stoker_thread(folder: Path, options: dict):
    return _stoker(folder, **options)


def _stoker(folder: Path, **options):
    import stoker

    loader = stoker.Loader(folder / "stoker", batch_size=BATCH, seq_len=SEQ_LEN, **options)
    while True:
        yield from loader


def dataloader_memmap(folder: Path, options: dict):
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Windows(Dataset):
        def __init__(self) -> None:
            self.ids = [np.memmap(path, np.uint16, "r") for path in sorted((folder / "stoker").glob("*.bin"))]
            self.ends = np.cumsum([(len(ids) - 1) // SEQ_LEN for ids in self.ids])

        def __len__(self) -> int:
            return int(self.ends[-1])

        def __getitem__(self, index: int):
            shard = int(np.searchsorted(self.ends, index, side="right"))
            start = (index - (int(self.ends[shard - 1]) if shard else 0)) * SEQ_LEN
            window = torch.from_numpy(self.ids[shard][start : start + SEQ_LEN + 1].astype(np.int64))
            return window[:-1], window[1:]

    loader = DataLoader(Windows(), batch_size=BATCH, shuffle=True, num_workers=options["workers"])
    while True:
        yield from loader


def litdata(folder: Path, options: dict):
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import TokensLoader

    dataset = StreamingDataset(
        str(folder / "litdata"), item_loader=TokensLoader(block_size=SEQ_LEN + 1), shuffle=True
    )
    loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=options["workers"])
    while True:
        for batch in loader:
            wide = batch.long()
            yield wide[:, :-1], wide[:, 1:]


def mosaic(folder: Path, options: dict):
    import torch

    _let_mosaic_import()
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    def collate(samples):
        import numpy as np

        wide = torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))
        return wide[:, :-1], wide[:, 1:]

    dataset = StreamingDataset(local=str(folder / "mosaic"), shuffle=True, batch_size=BATCH)
    loader = DataLoader(dataset, batch_size=BATCH, num_workers=options["workers"], collate_fn=collate)
    while True:
        yield from loader


def webdataset_npy(folder: Path, options: dict):
    import webdataset

    shards = sorted(map(str, (folder / "webdataset").glob("*.tar")))
    data = webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False).shuffle(1000)
    data = data.decode().to_tuple("npy").batched(BATCH)
    loader = webdataset.WebLoader(data, batch_size=None, num_workers=options["workers"])
    while True:
        for (tokens,) in loader:
            wide = tokens.long() if hasattr(tokens, "long") else tokens.astype("int64")
            yield wide[:, :-1], wide[:, 1:]


TURNS = {
    "stoker inline": (stoker_inline, {}),
    "stoker threads": (stoker_thread, {}),
    "DataLoader+memmap": (dataloader_memmap, {"workers": 0}),
    "DataLoader+memmap, 2 workers": (dataloader_memmap, {"workers": 2}),
    "litdata": (litdata, {"workers": 0}),
    "litdata, 2 workers": (litdata, {"workers": 2}),
    "mosaicml-streaming": (mosaic, {"workers": 0}),
    "mosaicml-streaming, 2 workers": (mosaic, {"workers": 2}),
    "webdataset npy": (webdataset_npy, {"workers": 0}),
    "webdataset npy, 2 workers": (webdataset_npy, {"workers": 2}),
    **packing_turns(BATCH, SEQ_LEN),
}


# --- measuring ----------------------------------------------------------------------------------------


def measure_turn(folder: Path, name: str, seconds: float, extra: dict) -> dict:
    """One turn, in this process; printed as JSON for the process that started it."""
    import torch  # noqa: F401 - everybody needs it; not counted as start-up
    from torch.utils.data import DataLoader  # noqa: F401

    if name.startswith("stoker"):
        import stoker.load.device.streams
        import stoker.load.loader  # noqa: F401
    make, options = TURNS[name]
    before = pss_bytes()
    begin = time.perf_counter()
    batches = make(folder, {**options, **extra})
    next(batches)
    first_s = time.perf_counter() - begin
    count, cpu = 0, cpu_s()
    begin = time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
        for _ in range(10):
            next(batches)
        count += 10
    tokens, real = count * BATCH * SEQ_LEN, 1.0
    if "packing" in options:  # rows of any width, and padding: what some more batches hold, for all
        cells, kept = counted(batches, 200)
        tokens, real = count * cells // 200, kept / cells
    return {
        "real_share": real,
        "mtok_s": tokens / elapsed / 1e6,
        "first_batch_ms": first_s * 1e3,
        "cpu_s_per_mtok": (cpu_s() - cpu) / (tokens / 1e6),
        "pss_mb": pss_bytes() / 1e6,
        "pss_before_mb": before / 1e6,
    }


def cpu_s() -> float:
    """Of this process and its living children (workers are not reaped until the end)."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    own = usage.ru_utime + usage.ru_stime
    return own + sum(_stat_cpu(pid) for pid in _children())


def pss_bytes() -> int:
    return sum(_pss(pid) for pid in (os.getpid(), *_children()))


def _children() -> list[int]:
    listing = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return [int(pid) for pid in listing.read_text().split()] if listing.exists() else []


def _stat_cpu(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def run_turn(folder: Path, name: str, seconds: float, extra: dict | None = None) -> dict | None:
    command = [sys.executable, __file__, "--turn", name, "--folder", folder, "--seconds", seconds]
    command += ["--options", json.dumps(extra or {})]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300 + 10 * seconds)
    if done.returncode:
        print(f"{name}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def read_ceiling(path: Path, *, look: bool = False) -> float:
    """GB/s of O_DIRECT reads of 4 MiB by two threads: what the disk can do. `look`: at every cache line."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    from stoker.load.reading.engines import Direct, page_aligned

    engine, step = Direct(), 4 << 20
    files = sorted(path.glob("*.bin"))

    def read(file: Path) -> int:
        handle, buffer = engine.open(file), page_aligned(step)
        whole = file.stat().st_size // step
        for number in range(whole):
            os.preadv(handle, [buffer.data], number * step)
            if look:
                np.add.reduce(buffer[::64])
        engine.close(handle)
        return whole * step

    begin = time.perf_counter()
    with ThreadPoolExecutor(2) as threads:
        done = sum(threads.map(read, files))
    return done / (time.perf_counter() - begin) / 1e9


def make_cold(folder: Path) -> Path:
    from stoker.prepare.check import adopt

    cold = folder / "cold"
    cold.mkdir()
    for number, path in itertools.product(range(8), (folder / "stoker").glob("s*.*")):
        (cold / f"c{number}-{path.name}").hardlink_to(path)
    adopt(str(cold))
    return cold


def measure_cold(folder: Path) -> dict:
    """stoker with O_DIRECT against the disk's own speed, in turns. Token bytes delivered per second, over a
    first epoch, in which every block is read from the disk and verified: all of it with its construction, and
    after the first gigabyte, when the memory that it reads into has been touched once."""
    bare, looked, ours = [], [], {64: [], BATCH: []}
    for _ in range(7):
        for rows, rates in ours.items():
            bare.append(read_ceiling(folder))
            rates.append(read_first_epoch(folder, rows))
            looked.append(read_ceiling(folder, look=True))

    def over(rates: list[float]) -> dict:
        found = statistics.median(rates)
        return {
            "gb_s": found,
            "ratio": found / statistics.median(bare),
            "ratio_looked_at": found / statistics.median(looked),
            "all": rates,
        }

    return {
        "direct_gb_s": {"median": statistics.median(bare), "all": bare},
        "direct_looked_at_gb_s": {"median": statistics.median(looked), "all": looked},
        "stoker": {
            f"[{rows}, {SEQ_LEN}]": {
                "with construction": over([whole for whole, _ in rates]),
                "after the first GB": over([after for _, after in rates]),
            }
            for rows, rates in ours.items()
        },
    }


def read_first_epoch(folder: Path, rows: int) -> tuple[float, float]:
    """GB/s with the construction of the loader, and after the first gigabyte."""
    import stoker

    size, begin, batches = rows * SEQ_LEN * 2 / 1e9, time.perf_counter(), 0
    with stoker.Loader(
        folder,
        batch_size=rows,
        seq_len=SEQ_LEN,
        dtype=None,
        shuffle="blocks",
        reader="direct",
        readers=4,
        lanes=4,
        chunk_bytes=8 << 20,
    ) as loader:
        first = min(round(1 / size), len(loader) // 2)
        for _ in loader:
            batches += 1
            if batches == first:
                warm = time.perf_counter()
        end = time.perf_counter()
    return batches * size / (end - begin), (batches - first) * size / (end - warm)


def summary(turns: list[dict]) -> dict:
    names = turns[0]
    return {
        name: {
            "median": statistics.median(turn[name] for turn in turns),
            "all": [round(turn[name], 3) for turn in turns],
        }
        for name in names
    }


def ratios(results: dict) -> dict:
    def rate(name: str) -> float:
        return results[name]["mtok_s"]["median"] if name in results else 0.0

    workers = [rate(name) for name in results if name.endswith("2 workers")]
    found = {}
    if rate("DataLoader+memmap"):
        found["inline / DataLoader+memmap"] = rate("stoker inline") / rate("DataLoader+memmap")
    if rate("litdata"):
        found["inline / litdata"] = rate("stoker inline") / rate("litdata")
    if rate("DataLoader, batched"):
        found["inline / DataLoader, batched"] = rate("stoker inline") / rate("DataLoader, batched")
    if workers:
        found["threads / best peer with workers"] = rate("stoker threads") / max(workers)
    return found


def versions() -> dict:
    found = {}
    for name in PEERS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return {**found, "python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=800)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="also O_DIRECT against the disk's ceiling")
    parser.add_argument(
        "--disk-gb-s", type=float, default=0, help="--cold also on so slow a disk; needs root"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "load_tokens.json")
    parser.add_argument("--only", default="", help="loaders whose name contains this")
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, default={}, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.turn:
        print(json.dumps(measure_turn(given.folder, given.turn, given.seconds, given.options)), flush=True)
        os._exit(0)  # some loaders' workers do not end by themselves
    with tempfile.TemporaryDirectory(prefix="load-tokens-") as name:
        folder = Path(name)
        make_corpora(folder, given.megabytes * 1_000_000 // 2)
        measured: dict[str, list[dict]] = {}
        for _ in range(given.turns):
            for loader in (loader for loader in TURNS if given.only in loader):
                found = run_turn(folder, loader, given.seconds)
                if found:
                    measured.setdefault(loader, []).append(found)
                    print(f"{loader:32} {found['mtok_s']:8.1f} Mtok/s", file=sys.stderr)
        results = {loader: summary(turns) for loader, turns in measured.items()}
        report = {
            "question": __doc__.strip().splitlines()[0],
            "corpus_mb": given.megabytes,
            "batch": [BATCH, SEQ_LEN],
            "warm": True,
            "versions": versions(),
            "results": results,
            "ratios": ratios(results),
        }
        if given.cold:
            cold = make_cold(folder)
            report["cold"] = measure_cold(cold)
            if given.disk_gb_s:
                with slow_disk(cold, given.disk_gb_s):
                    report["cold, slow disk"] = {"gb_s": given.disk_gb_s, **measure_cold(cold)}
    keep(given.out, report)
    print(json.dumps(report["ratios"], indent=1))


if __name__ == "__main__":
    main()
