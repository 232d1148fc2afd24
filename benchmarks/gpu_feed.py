"""How close does feeding a GPU come to what the machine can do, and does training notice it?

Method, all on one machine in one run:
  1. pinned copy: host to device from pinned memory, the ceiling of everything below
  2. page cache to GPU: `stoker.feed` over a corpus that is in memory, the verifying first pass and what comes
     after it apart; as bytes read a second and as a share of 1. Read by threads, and (mmap) taken by
     the card itself. A chunk that is still on the card when it is needed again does not count
  3. disk to GPU: O_DIRECT, against bare O_DIRECT reads of the same files before and after; again the
     verifying first pass and what comes after it apart
  4. cuFile: the same batches through libcufile or kvikio, or the reason why not
  5. training: steps of a small GPT fed by stoker, against the same steps on a batch that lies on the GPU,
     and against the tutorial pipeline (webdataset with json members, or its plain-Python equivalent)

    python benchmarks/gpu_feed.py --tests            # first the GPU tests, then everything
    python benchmarks/gpu_feed.py --gigabytes 1 --seconds 2    # quick
    python benchmarks/gpu_feed.py --device cpu --gigabytes 0.1 --seconds 1   # does it work?
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from kept_runs import keep

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import stoker
from stoker.formats import megatron, tar
from stoker.formats.checksums import HashingFile
from stoker.load.reading.engines import Direct, page_aligned
from stoker.manifest import FileRecord, Manifest, ShardRecord, write_manifest
from stoker.storage import open_store

RESULTS = Path(__file__).parent / "results"
SHARD_BYTES = 512 << 20
VOCABULARY = 50_000


# --- corpus -------------------------------------------------------------------------------------------


def make_corpus(folder: Path, size: int) -> Path:
    folder.mkdir(parents=True)
    count = max(1, round(size / SHARD_BYTES))
    tokens = size // count // 2
    with ThreadPoolExecutor(8) as threads:
        shards = list(threads.map(lambda number: make_shard(folder, number, tokens), range(count)))
    manifest = Manifest(format="megatron", dtype="uint16", shards=tuple(record for record, _ in shards))
    digests = np.array([digest for _, found in shards for digest in found], np.uint64)
    write_manifest(open_store(folder), manifest, blocks=digests)
    return folder


def make_shard(folder: Path, number: int, tokens: int):
    ids = np.random.default_rng(number).integers(0, VOCABULARY, tokens, dtype=np.uint16)
    lengths = np.full(tokens // 1000, 1000)
    lengths[-1] += tokens % 1000
    records, digests = [], []
    contents = {".bin": ids.tobytes(), ".idx": megatron.index_bytes(lengths, dtype=np.dtype("<u2"))}
    for suffix, content in contents.items():
        name = f"s{number:04d}{suffix}"
        with (folder / name).open("wb") as file:
            hashing = HashingFile(file)
            hashing.write(content)
            file.flush()
            os.fsync(file.fileno())
        records.append(FileRecord(name=name, bytes=hashing.bytes, xxh3=hashing.digest()))
        digests += hashing.blocks()
    record = ShardRecord(name=f"s{number:04d}", samples=len(lengths), tokens=tokens, files=tuple(records))
    return record, digests


def drop_from_cache(folder: Path) -> None:
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def bring_to_cache(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.read(16 << 20):
                pass


# --- 1 to 4: bytes a second ---------------------------------------------------------------------------


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def pinned_copy(device: str, seconds: float) -> float:
    """GB/s from pinned memory, 32 MiB at a time: what a group of batches is."""
    source = torch.empty(32 << 20, dtype=torch.uint8, pin_memory=device.startswith("cuda"))
    target = torch.empty(32 << 20, dtype=torch.uint8, device=device)
    for _ in range(3):
        target.copy_(source, non_blocking=True)
    synchronize(device)
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        for _ in range(8):
            target.copy_(source, non_blocking=True)
        synchronize(device)
        count += 8
    return count * source.numel() / (time.perf_counter() - begin) / 1e9


def direct_reads(folder: Path, threads: int, seconds: float, block: int = 4 << 20) -> float:
    """GB/s of O_DIRECT reads: the ceiling of the disk."""
    engine, files = Direct(), sorted(folder.glob("*.bin"))
    end = time.perf_counter() + seconds

    def read(number: int) -> int:
        buffer, done = page_aligned(block), 0
        handles = [engine.open(path) for path in files]
        at = [(handle, offset) for handle in handles for offset in range(0, SHARD_BYTES - block, block)]
        for handle, offset in at[number::threads]:
            if time.perf_counter() > end:
                break
            done += os.preadv(handle, [buffer.data], offset)
        for handle in handles:
            engine.close(handle)
        return done

    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        done = sum(pool.map(read, range(threads)))
    return done / (time.perf_counter() - begin) / 1e9


def feed_speed(folder: Path, device: str, seconds: float, passes: int = 2, **options) -> list[dict]:
    """GB/s that arrive in a first pass over the corpus, then GB/s of the chunks that are read in stretches of
    so many seconds; and the CPU seconds that a GB takes."""
    turns = []
    with stoker.feed(folder, device=device, **options) as feeder:
        for turn in range(passes):
            before, begin, cpu = feeder.report(), time.perf_counter(), time.process_time()
            for _ in passing(feeder, begin + seconds) if turn else feeder:
                pass
            synchronize(device)
            wall, cpu, after = time.perf_counter() - begin, time.process_time() - cpu, feeder.report()
            arrived = (after.batches - before.batches) * options["batch_size"] * options["seq_len"] * 2
            read = (after.samples_read - before.samples_read) * options["seq_len"] * 2
            size = (read if turn else arrived) / 1e9
            turns.append({"gb_s": size / wall, "cpu_s_gb": cpu / size if size else 0.0})
        print(f"  {feeder.report().reader}; {feeder.report().choices[-1]}", file=sys.stderr)
    return turns


def passing(feeder, end: float):
    """Batches of one pass after the other."""
    while True:
        for batch in feeder:
            yield batch
            if time.perf_counter() > end:
                return


def measure_paths(folder: Path, given: argparse.Namespace, report: dict):
    """Fills in the report, a part at a time."""
    device, seconds = given.device, given.seconds
    large = {"batch_size": 1024, "seq_len": 4096, "memory": 4 << 30}
    if given.gigabytes < 1:
        large["batch_size"] = 64
    bring_to_cache(folder)
    pinned, tried = [], []
    for (chunk, readers), reader in itertools.product(given.settings, ("pread", "mmap")):
        pinned.append(pinned_copy(device, seconds))
        options = {"chunk_bytes": chunk << 20, "readers": readers, "reader": reader, "lanes": 24, **large}
        first, *after = feed_speed(folder, device, seconds, passes=4, **options)
        pinned.append(pinned_copy(device, seconds))
        tried.append(
            {
                "reader": reader,
                "chunk_mib": chunk,
                "readers": readers,
                "verifying_gb_s": first["gb_s"],
                "gb_s": [turn["gb_s"] for turn in after],
                "cpu_s_gb": statistics.median(turn["cpu_s_gb"] for turn in after),
                # of the copies just before and after: the machine is faster at one moment than at the next
                "share": statistics.median(turn["gb_s"] for turn in after) / statistics.mean(pinned[-2:]),
            }
        )
        print(tried[-1], file=sys.stderr)
    best = {
        reader: max((one for one in tried if one["reader"] == reader), key=lambda one: one["share"])
        for reader in ("pread", "mmap")
    }
    report |= {
        "pinned_copy_gb_s": statistics.median(pinned),
        "pinned_copies_gb_s": pinned,
        "page_cache_to_gpu": tried,
        "page_cache_share_of_pinned": {reader: one["share"] for reader, one in best.items()},
        "page_cache_cpu_s_gb": {reader: one["cpu_s_gb"] for reader, one in best.items()},
    }
    yield
    report["disk"] = measure_disk(folder, device, seconds, large)
    yield
    report["cufile"] = measure_cufile(folder, device, seconds, large)
    yield


def measure_disk(folder: Path, device: str, seconds: float, large: dict) -> dict:
    """Between two whole passes of bare reads each: a shared disk is faster at one moment than at the next."""
    drop_from_cache(folder)
    try:
        threads = max((4, 5, 8), key=lambda count: direct_reads(folder, count, seconds))
        options = {**large, "chunk_bytes": 128 << 20, "reader": "direct", "readers": threads, "lanes": 8}
        bare, verifying, after = [direct_reads(folder, threads, 10**9)], [], []
        for _ in range(5):
            first, second = feed_speed(folder, device, 4 * seconds, passes=2, **options)
            bare.append(direct_reads(folder, threads, 10**9))
            verifying.append(first["gb_s"] / statistics.mean(bare[-2:]))
            after.append(second["gb_s"] / statistics.mean(bare[-2:]))
    except (OSError, stoker.StokerError) as error:
        return {"left_out": str(error)}
    return {
        "threads": threads,
        "direct_ceiling_gb_s": bare,
        "shares_verifying": verifying,
        "shares": after,
        "share_verifying": statistics.median(verifying),
        "share": statistics.median(after),
    }


def measure_cufile(folder: Path, device: str, seconds: float, large: dict) -> dict:
    options = {**large, "chunk_bytes": 16 << 20, "readers": 8, "reader": "cufile"}
    with stoker.feed(folder, device=device, **options) as feeder:
        reason = feeder.report().reader
    try:
        first, second = feed_speed(folder, device, seconds, passes=2, **options)
    except (OSError, stoker.StokerError) as error:
        return {"reader": reason, "failed": str(error)}
    return {"reader": reason, "verifying_gb_s": first["gb_s"], "after_gb_s": second["gb_s"]}


# --- 5: training --------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.after(x))


class GPT(torch.nn.Module):
    def __init__(self, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(VOCABULARY, width), torch.nn.Embedding(length, width)
        self.blocks = torch.nn.Sequential(*(Block(width, width // 64) for _ in range(depth)))
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        logits = self.head(self.blocks(x))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def train(batches, model, optimiser, device: str, steps: int) -> dict:
    """Seconds per step, and the share of them spent waiting for the next batch."""
    on_gpu = device.startswith("cuda")
    waited, batches = 0.0, iter(batches)
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        ids, labels = next(batches)
        waited += time.perf_counter() - asked
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=on_gpu):
            loss = model(ids, labels)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    synchronize(device)
    wall = time.perf_counter() - begin
    return {"step_ms": wall / steps * 1e3, "wait_share": waited / wall}


def endless(feeder):
    while True:
        for batch in feeder:
            yield batch["input_ids"], batch["labels"]


def measure_training(folder: Path, given: argparse.Namespace) -> dict:
    device, small = given.device, given.device == "cpu"
    rows, length = (2, 128) if small else (16, 2048)
    model = GPT(128 if small else 1024, 2 if small else 12, length).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not small)
    steps = 5 if small else 40
    fixed = torch.randint(0, VOCABULARY, (rows, length + 1), device=device)
    resident = iter(lambda: (fixed[:, :-1], fixed[:, 1:]), None)
    tars = make_tutorial_tars(folder.parent / "tars", rows * (steps + 2), length)
    turns: dict[str, list[dict]] = {"on the GPU already": [], "stoker": [], "tutorial": []}
    train(resident, model, optimiser, device, steps)
    with stoker.feed(folder, device=device, batch_size=rows, seq_len=length) as feeder:
        fed = endless(feeder)
        next(fed)
        for _ in range(3):
            turns["on the GPU already"].append(train(resident, model, optimiser, device, steps))
            turns["stoker"].append(train(fed, model, optimiser, device, steps))
            tutorial = tutorial_batches(tars, rows, length, device)
            turns["tutorial"].append(train(tutorial, model, optimiser, device, steps))
    report = {
        name: {key: statistics.median(turn[key] for turn in found) for key in found[0]}
        for name, found in turns.items()
    }
    report["slower_than_resident"] = report["stoker"]["step_ms"] / report["on the GPU already"]["step_ms"] - 1
    return report


def make_tutorial_tars(folder: Path, samples: int, length: int) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)
    with (folder / "000000.tar").open("wb") as file:
        writer = tar.TarWriter(file)
        for number in range(samples):
            ids = rng.integers(0, VOCABULARY, length + 1).tolist()
            writer.add(
                f"{number:08d}", [("token_ids.json", json.dumps(ids).encode()), ("text.txt", b"-" * 4000)]
            )
        writer.close()
    return folder / "000000.tar"


def tutorial_batches(path: Path, rows: int, length: int, device: str):
    """What tutorials do: webdataset, json members, Python lists padded to tensors, pageable copies. Where
    webdataset is not installed: the same steps over Python's tarfile."""
    pending = []
    while True:
        for ids in tutorial_samples(path):
            pending.append(torch.tensor(ids[: length + 1]))
            if len(pending) == rows:
                batch = torch.nn.utils.rnn.pad_sequence(pending, batch_first=True).to(device)
                pending = []
                yield batch[:, :-1], batch[:, 1:]


def tutorial_samples(path: Path):
    try:
        import webdataset
    except ImportError:
        import tarfile

        with tarfile.open(path) as archive:
            for member in archive:
                if member.name.endswith(".json"):
                    yield json.loads(archive.extractfile(member).read())
        return
    for sample in webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False).decode():
        yield sample["token_ids.json"]


def run_tests() -> None:
    tests = Path(__file__).parent.parent / "tests" / "gpu"
    environment = {**os.environ, "STOKER_REQUIRE_CUDA": "1"}
    subprocess.run([sys.executable, "-m", "pytest", str(tests), "-q"], check=True, env=environment)


def machine(device: str) -> dict:
    facts = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def settings(text: str) -> list[tuple[int, int]]:
    return [tuple(map(int, one.split("x"))) for one in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gigabytes", type=float, default=16)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where the corpus is written")
    parser.add_argument(
        "--settings",
        type=settings,
        default=settings("32x14,64x14"),
        help="chunk MiB x readers",
    )
    parser.add_argument("--tests", action="store_true", help="run the GPU tests first")
    parser.add_argument("--skip-training", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_feed.json")
    given = parser.parse_args()
    if given.tests:
        run_tests()
    with tempfile.TemporaryDirectory(prefix="gpu-feed-", dir=given.folder) as name:
        corpus = make_corpus(Path(name) / "corpus", int(given.gigabytes * 1e9))
        report = {"machine": machine(given.device), "corpus_gb": given.gigabytes}
        if not given.skip_training:
            report["training"] = measure_training(corpus, given)
        for _ in measure_paths(corpus, given, report.setdefault("paths", {})):
            keep(given.out, report)  # what is done so far
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
