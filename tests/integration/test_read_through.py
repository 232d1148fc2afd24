"""`stoker.feed` reads from files that are still on their way: what a batch needs first comes first."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from s3_server import serve
from web_server import WebServer

import stoker
from stoker.errors import BadShardError, StokerError, StorageError
from stoker.formats import megatron
from stoker.formats.checksums import hash_file
from stoker.manifest import FileRecord, Manifest, ShardRecord, write_manifest
from stoker.stage.disk.wants import wanted
from stoker.stage.landing.maps import SLICE_BYTES
from stoker.stage.tenure import Tenure
from stoker.stage.through.scheduler import _URGENT, AHEAD, BEHIND
from stoker.stage.through.session import _AT_ONCE
from stoker.stage.wire.wire import Wire
from stoker.storage import open_store
from stoker.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stoker.stage.disk.room import When
    from stoker.stage.landing.part import Part
    from stoker.stage.near import Near

pytestmark = pytest.mark.integration

LOCAL = {"NO_PROXY": "127.0.0.1"}
SEQ_LEN = 1024


def write_tokens(folder: Path, *, shards: int, tokens: int, first: int = 0) -> Path:
    """A dataset of random tokens; `first` gives others."""
    folder.mkdir(parents=True)
    records, blocks = [], []
    for number in range(shards):
        ids = np.random.default_rng(first + number).integers(0, 60_000, tokens, dtype=np.uint16)
        index = megatron.index_bytes(np.array([tokens], np.int64), dtype=ids.dtype)
        files = []
        for name, data in ((f"s{number}.bin", ids.tobytes()), (f"s{number}.idx", index)):
            (folder / name).write_bytes(data)
            with (folder / name).open("rb") as file:
                hashed = hash_file(file)
            files.append(FileRecord(name=name, bytes=hashed.bytes, xxh3=hashed.digest()))
            blocks += hashed.blocks()
        records.append(ShardRecord(name=f"s{number}", samples=1, tokens=tokens, files=tuple(files)))
    manifest = Manifest(format="megatron", dtype="uint16", shards=tuple(records))
    write_manifest(open_store(folder), manifest, blocks=np.array(blocks, np.uint64))
    return folder


def total_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


FIRST_BATCH = """
import os, sys, stoker
feeder = stoker.feed(sys.argv[1], cache=sys.argv[2], device="cpu", batch_size=int(sys.argv[3]), seq_len=1024)
batch = next(iter(feeder))
sys.stdout.write(str(batch["input_ids"].shape[0]))
sys.stdout.flush()
os._exit(0)  # at once: what comes behind it is not counted
"""


def first_batch(url: str, cache: Path, environ: dict[str, str], batch_size: int) -> None:
    command = [sys.executable, "-c", FIRST_BATCH, url, str(cache), str(batch_size)]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert ran.stdout == str(batch_size), ran.stderr


@pytest.mark.parametrize(("shards", "tokens"), [(4, 32 << 20), (64, 2 << 20)], ids=["large", "bundled"])
def test_the_first_batch_comes_after_a_few_of_the_bytes(
    shards: int, tokens: int, require_binary: Any, stoker_environ: Any, tmp_path: Path
) -> None:
    rclone, nginx = require_binary("rclone"), require_binary("nginx")
    # slow: what the loader reads ahead while the process ends is little then
    with serve(tmp_path / "s3", rclone=rclone, nginx=nginx, settings="limit_rate 1m;") as s3:
        corpus = write_tokens(s3.root / "bucket/corpus", shards=shards, tokens=tokens)
        first_batch("s3://bucket/corpus", tmp_path / "c", stoker_environ(**s3.environ()), 4)
        assert served_bytes(tmp_path / "s3/access.log") <= 0.05 * total_bytes(corpus)


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "tokens"), [(16, 32 << 20), (256, 2 << 20)], ids=["large", "bundled"])
@pytest.mark.parametrize("batch_size", [8, 64])
def test_the_first_batch_of_a_gigabyte_from_a_slow_s3_comes_after_a_twentieth(
    shards: int, tokens: int, batch_size: int, require_binary: Any, stoker_environ: Any, tmp_path: Path
) -> None:
    rclone, nginx = require_binary("rclone"), require_binary("nginx")
    with serve(tmp_path / "s3", rclone=rclone, nginx=nginx, settings="limit_rate 10m;") as s3:
        corpus = write_tokens(s3.root / "bucket/corpus", shards=shards, tokens=tokens)
        first_batch("s3://bucket/corpus", tmp_path / "c", stoker_environ(**s3.environ()), batch_size)
        assert served_bytes(tmp_path / "s3/access.log") <= 0.05 * total_bytes(corpus)


def served_bytes(log: Path) -> int:
    """Of nginx's usual log; a request is logged when it ends."""
    before = -1
    while before != (size := log.stat().st_size):
        before = size
        time.sleep(0.1)
    return sum(int(line.split('" ')[1].split()[1]) for line in log.read_text().splitlines())


EPOCH = """
import hashlib, json, sys, stoker
url, cache, rank, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
world = stoker.World(rank=rank, size=ranks, local_rank=rank, local_size=ranks)
digest = hashlib.sha256()
with stoker.feed(url, cache=cache, device="cpu", batch_size=16, seq_len=1024, world=world) as feeder:
    for number, batch in enumerate(feeder):
        if number == 0:
            print("first", flush=True)
        digest.update(batch["input_ids"].numpy().tobytes())
print(digest.hexdigest(), flush=True)
"""


def start(url: str, cache: Path, rank: int, ranks: int, environ: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", EPOCH, url, str(cache), str(rank), str(ranks)]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def digest_of(corpus: Path, rank: int, ranks: int) -> str:
    digest = hashlib.sha256()
    world = World(rank=rank, size=ranks, local_rank=rank, local_size=ranks)
    with stoker.Loader(corpus, batch_size=16, seq_len=SEQ_LEN, world=world, output="numpy") as loader:
        for batch in loader:
            digest.update(batch["input_ids"].tobytes())
    return digest.hexdigest()


@pytest.fixture
def corpus(web: WebServer) -> Path:
    folder = web.root / "epoch"
    return folder if folder.exists() else write_tokens(folder, shards=6, tokens=8 << 20)


def test_ranks_share_every_byte_while_files_land(
    web: WebServer, corpus: Path, stoker_environ: Any, tmp_path: Path
) -> None:
    before = web.served_bytes("/epoch")
    ranks = [start(f"{web.url}/epoch", tmp_path / "c", rank, 3, stoker_environ(**LOCAL)) for rank in range(3)]
    said = [process.communicate(timeout=120) for process in ranks]
    assert [out.split()[-1:] for out, _ in said] == [[digest_of(corpus, r, 3)] for r in range(3)], said
    books = (corpus / "manifest.json").stat().st_size
    assert web.served_bytes("/epoch") - before <= total_bytes(corpus) + 3 * books
    assert left_over(tmp_path / "c") == []


def left_over(cache: Path, *names: str) -> list[str]:
    names = names or ("parts", "leases", "pins", "wants")
    return [str(path) for name in names for path in (cache / ".stoker" / name).rglob("*")]


def test_a_rank_that_is_killed_while_it_fetches_leaves_what_has_landed_to_the_others(
    require_binary: Any, stoker_environ: Any, tmp_path: Path
) -> None:
    rclone, nginx, cache = require_binary("rclone"), require_binary("nginx"), tmp_path / "c"
    with serve(tmp_path / "s3", rclone=rclone, nginx=nginx, settings="limit_rate 2m;") as s3:
        corpus = write_tokens(s3.root / "bucket/corpus", shards=6, tokens=8 << 20)
        environ = stoker_environ(**s3.environ())
        other = start("s3://bucket/corpus", cache, 1, 2, environ)
        for _ in range(3):
            process = start("s3://bucket/corpus", cache, 0, 2, environ)
            assert process.stdout
            assert process.stdout.readline() == "first\n", process.communicate()
            process.send_signal(signal.SIGKILL)  # in the midst of what it brings
            process.communicate()
        out, errors = other.communicate(timeout=120)
        assert out.split()[-1:] == [digest_of(corpus, 1, 2)], errors
        served = served_bytes(tmp_path / "s3/access.log")
        # a kill costs what is on its way: of each of some 30 requests at most a slice
        assert total_bytes(corpus) <= served <= total_bytes(corpus) + 3 * 32 * SLICE_BYTES
        print("bytes served:", served / total_bytes(corpus))
    visible = cache / "s3/bucket/corpus"
    assert all(path.read_bytes() == (corpus / path.name).read_bytes() for path in visible.iterdir())


# --- in one process -------------------------------------------------------------------------------


@contextmanager
def two_caches(folder: Path) -> Iterator[tuple[stoker.Cache, stoker.Cache]]:
    """As two processes would have them."""
    with stoker.Cache(folder) as mine, stoker.Cache(folder) as others:
        yield mine, others


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def test_what_another_waits_for_comes_before_the_rest(web: WebServer, corpus: Path, tmp_path: Path) -> None:
    size = (corpus / "s0.bin").stat().st_size
    with two_caches(tmp_path / "c") as (mine, others):
        near, far = (cache.at(f"{web.url}/epoch") for cache in (mine, others))
        path, is_whole = near.within("s0.bin", 0, 1000)  # this one holds the lease from here on
        assert not is_whole
        last, is_whole = far.within("s0.bin", size - 1000, size)
        assert not is_whole
        assert path == last, "one copy of it"
        with last.open("rb") as file:
            file.seek(size - 1000)
            assert file.read() == (corpus / "s0.bin").read_bytes()[-1000:]
        assert not (near.folder / "s0.bin").exists(), "it has no name before it is whole"
        assert wanted(mine.shelf, {near.units[1].key, near.units[2].key}) == {}
        assert path.stat().st_blocks * 512 <= 4 * SLICE_BYTES, "nothing else was fetched"


@pytest.mark.parametrize(("is_waited_for", "pieces"), [(False, AHEAD), (True, BEHIND)])
def test_what_nobody_waits_for_comes_in_fewer_pieces_while_somebody_waits(
    is_waited_for: bool, pieces: int, web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (web.root / "ahead").exists():
        write_tokens(web.root / "ahead", shards=2, tokens=40 << 20)
    came, asked, go_on, fetch = threading.Semaphore(0), threading.Event(), threading.Event(), Wire.fetch

    def held(self: Wire, file: Any, **more: Any) -> None:
        """The edge of the machine: a store that answers nobody for a while."""
        if file.name.endswith(".bin"):
            asked.set() if self is cache._urgent else came.release()
            go_on.wait(60)
        fetch(self, file, **more)

    with stoker.Cache(tmp_path / "c") as cache, ThreadPoolExecutor(1) as threads:
        near = cache.at(f"{web.url}/ahead")
        near.local_path("blocks.xxh3")
        monkeypatch.setattr(Wire, "fetch", held)
        if is_waited_for:
            threads.submit(near.within, "s0.bin", 0, 1000)
            assert asked.wait(60)
        near.prefetch()
        cache.through.go()
        assert all(came.acquire(timeout=60) for _ in range(pieces))
        assert not came.acquire(timeout=0.2), "there may be so many, and no more"
        cache.stop()
        go_on.set()


def test_what_is_open_in_pieces_becomes_whole_when_all_of_it_is_asked_for(
    web: WebServer, corpus: Path, tmp_path: Path
) -> None:
    with stoker.Cache(tmp_path / "c") as cache:
        near = cache.at(f"{web.url}/epoch")
        near.within("s1.bin", 0, 1000)
        assert near.local_path("s1.bin").read_bytes() == (corpus / "s1.bin").read_bytes()
        assert near.within("s1.bin", 0, 1000) == (near.folder / "s1.bin", True)
    assert left_over(tmp_path / "c") == []


def test_a_reader_that_is_closed_leaves_its_pieces_to_the_next(
    web: WebServer, corpus: Path, tmp_path: Path
) -> None:
    with stoker.Cache(tmp_path / "c") as cache:
        near = cache.at(f"{web.url}/epoch")
        near.prefetch(["s2.bin"])
        path, _ = near.within("s2.bin", 5 * SLICE_BYTES, 6 * SLICE_BYTES)
        near.close()
        assert not path.exists(), "its folder says that nobody writes there any more"
        before = web.served_bytes("/epoch/s2.bin")
        assert cache.at(f"{web.url}/epoch").local_path("s2.bin").stat().st_size
        fetched = web.served_bytes("/epoch/s2.bin") - before
        assert fetched == (corpus / "s2.bin").stat().st_size - SLICE_BYTES


def test_a_cache_that_is_closed_while_a_reader_opens_a_unit_keeps_no_lease_of_it(
    web: WebServer, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, opening, go_on = Tenure.begin, threading.Event(), threading.Event()

    def begin_late(tenure: Tenure, when: When) -> Part:
        opening.set()
        go_on.wait(30)
        return begin(tenure, when)

    cache = stoker.Cache(tmp_path / "c")
    near = cache.at(f"{web.url}/epoch")
    near.local_path("blocks.xxh3")
    monkeypatch.setattr(Tenure, "begin", begin_late)
    with ThreadPoolExecutor(2) as threads:
        reader = threads.submit(near.within, "s5.bin", 0, 100)
        assert opening.wait(30)
        closing = threads.submit(cache.close)
        wait([closing], timeout=0.5)  # it may well be over: then what comes now comes too late
        go_on.set()
        with pytest.raises(StokerError, match="closed"):
            reader.result(30)
        closing.result(30)
    assert left_over(tmp_path / "c", "leases") == []
    with stoker.Cache(tmp_path / "c") as other:
        assert other.at(f"{web.url}/epoch").local_path("s5.bin").read_bytes() == (
            (corpus / "s5.bin").read_bytes()
        )


def test_readers_of_three_processes_that_come_and_go_fetch_every_byte_once(
    web: WebServer, corpus: Path, tmp_path: Path
) -> None:
    """Random stretches of files by twelve threads over three caches, one of which is closed on the way."""
    whole = {path.name: path.read_bytes() for path in corpus.glob("*.bin")}
    before = web.served_bytes("/epoch/s")

    def read(near: Near, seed: int) -> None:
        luck = random.Random(seed)
        for _ in range(40):
            name, size = luck.choice(sorted(whole)), luck.randrange(1, 3 << 20)
            start = luck.randrange(len(whole[name]) - size)
            assert read_within(near, name, start, start + size) == whole[name][start : start + size]

    with ExitStack() as stack:
        caches = [stack.enter_context(stoker.Cache(tmp_path / "c")) for _ in range(3)]
        nears = [cache.at(f"{web.url}/epoch") for cache in caches]
        threads = stack.enter_context(ThreadPoolExecutor(12))
        readers = [threads.submit(read, nears[n % 3], n) for n in range(12)]
        with suppress(StokerError):  # the cache was closed, before or while it was used
            readers[0].result()
        caches[0].close()
        for reader in readers:
            with suppress(StokerError) if readers.index(reader) % 3 == 0 else nullcontext():
                reader.result()
        for name in whole:
            assert nears[1].local_path(name).read_bytes() == whole[name]
        assert left_over(tmp_path / "c", "wants") == []
    served = web.served_bytes("/epoch/s") - before
    # what was on its way to the cache that was closed comes once more
    on_its_way = (_URGENT + AHEAD * _AT_ONCE) * SLICE_BYTES
    assert total_bytes(corpus) - (1 << 20) <= served <= total_bytes(corpus) + on_its_way


def read_within(near: Near, name: str, start: int, stop: int) -> bytes:
    while True:
        path, _ = near.within(name, start, stop)
        with suppress(FileNotFoundError), path.open("rb") as file:
            return os.pread(file.fileno(), stop - start, start)


def test_a_version_that_is_read_while_it_lands_is_not_disturbed_by_the_next(
    web: WebServer, tmp_path: Path
) -> None:
    folder = write_tokens(web.root / "replaced", shards=2, tokens=8 << 20)
    url, old = f"{web.url}/replaced", (folder / "s0.bin").read_bytes()
    with two_caches(tmp_path / "c") as (mine, others):
        near = mine.at(url)
        path, _ = near.within("s0.bin", 0, 1000)
        shutil.rmtree(folder)
        write_tokens(folder, shards=2, tokens=8 << 20, first=7)
        new = others.at(url)
        assert new.local_path("s0.bin").read_bytes() == (folder / "s0.bin").read_bytes() != old
        assert new.folder != near.folder
        with path.open("rb") as file:
            assert file.read(1000) == old[:1000]


def test_a_reader_that_is_stopped_does_not_wait_for_a_mute_store(
    web: WebServer, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, silence = threading.Event(), threading.Event()
    fetch = Wire.fetch

    def mute(self: Wire, file: Any, **more: Any) -> None:
        """The edge of the machine: a store that takes requests and answers none."""
        asked.set()
        silence.wait(60)
        fetch(self, file, **more)

    with stoker.Cache(tmp_path / "c") as cache, ThreadPoolExecutor(1) as threads:
        near = cache.at(f"{web.url}/epoch")
        near.local_path("blocks.xxh3")
        monkeypatch.setattr(Wire, "fetch", mute)
        reading = threads.submit(near.within, "s3.bin", 0, 1000)
        assert asked.wait(60)
        near.stop()
        with pytest.raises(StorageError, match="closed while it was used"):
            reading.result(60)
        silence.set()


def test_wrong_bytes_reach_no_batch(web: WebServer, corpus: Path, tmp_path: Path) -> None:
    """A server whose every answer of a file is spoilt."""
    spoilt = corpus.parent / "spoilt"
    if not spoilt.exists():
        write_tokens(spoilt, shards=2, tokens=8 << 20)
        for number in range(2):
            data = bytearray((spoilt / f"s{number}.bin").read_bytes())
            data[:: 1 << 17] = bytes(len(data[:: 1 << 17]))
            (spoilt / f"s{number}.bin").write_bytes(bytes(data))
    with (
        stoker.feed(
            f"{web.url}/spoilt", cache=tmp_path / "c", device="cpu", batch_size=4, seq_len=64
        ) as feeder,
        pytest.raises(BadShardError, match=r"arrived as other bytes than its manifest says"),
    ):
        next(iter(feeder))
    assert not list((tmp_path / "c").rglob("s*.bin"))


def test_what_is_damaged_on_the_disk_before_it_is_whole_is_brought_again(
    web: WebServer, corpus: Path, tmp_path: Path
) -> None:
    with stoker.Cache(tmp_path / "c") as cache:
        near = cache.at(f"{web.url}/epoch")
        options: dict[str, Any] = {"batch_size": 16, "seq_len": SEQ_LEN, "output": "numpy", "shuffle": "off"}
        path, _ = near.within("s0.bin", 0, 1000)
        with path.open("r+b") as file:
            file.write(bytes(1000))
        with stoker.Loader(near, **options) as loader, stoker.Loader(corpus, **options) as plain:
            for mine, theirs in zip(loader, plain, strict=True):
                assert (mine["input_ids"] == theirs["input_ids"]).all()
            assert len(loader.report().healed) == 1
