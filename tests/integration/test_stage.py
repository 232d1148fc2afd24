"""`stoker stage`, `stoker.fetch` and `stoker.feed` against real servers."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash
from faults import Fault, faulty
from s3_server import S3Server
from test_origins import COMMIT, HUB_FILES, LARGE, TOKEN, hub_server
from web_server import WebServer, write_noise

import stoker
from stoker.errors import BadShardError, ChangedError
from stoker.manifest import FileRecord, Manifest, ShardRecord, write_manifest
from stoker.stage import fetch
from stoker.storage import open_store
from stoker.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.integration

LOCAL = {"NO_PROXY": "127.0.0.1"}


@pytest.fixture(scope="module")
def s3(s3: S3Server, large_dataset: Path) -> S3Server:
    shutil.copytree(large_dataset, s3.root / "bucket" / "corpus")
    return s3


@pytest.fixture
def corpus(web: WebServer, large_dataset: Path) -> Iterator[Path]:
    """A copy of the dataset on the web, to be spoilt."""
    shutil.copytree(large_dataset, web.root / "corpus")
    yield web.root / "corpus"
    shutil.rmtree(web.root / "corpus")


def books(cache: Path) -> list[str]:
    """What is not whole, or held."""
    return [str(p) for name in ("parts", "leases", "pins") for p in (cache / ".stoker" / name).rglob("*")]


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_hundred_thousand_small_files_come_in_little_memory(
    s3: S3Server, bucket: Path, tmp_path: Path
) -> None:
    count = 100_000
    for number in range(count):
        path = bucket / "many" / f"{number // 1000:03d}" / f"{number:06d}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(number.to_bytes(4, "little") * 256)
    code = "import resource, sys, stoker.cli; failed = stoker.cli.run(sys.argv[1:]); "
    code += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(failed)"
    command = [sys.executable, "-c", code, "stage", "s3://bucket/many", "--cache", str(tmp_path / "cache")]
    done = subprocess.run(command, env={**os.environ, **s3.environ()}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 300_000  # KiB; 111,000 were seen
    landed = list((tmp_path / "cache" / "s3").rglob("many/*/*"))
    assert len(landed) == count
    assert all(path.read_bytes()[:4] == int(path.name).to_bytes(4, "little") for path in landed[::997])


def test_a_dataset_comes_from_a_bucket_once(
    s3: S3Server, run_stoker: Any, large_dataset: Path, snapshot: Any, tmp_path: Path
) -> None:
    ran = run_stoker("stage", "s3://bucket/corpus", "--cache", tmp_path / "c", env=s3.environ())
    assert ran.rc == 0, ran.stderr
    beside = {"statistics.json", "tokenizer.json"}  # no file of the manifest's
    found = snapshot(tmp_path / "c/s3/bucket/corpus")
    assert found == {name: data for name, data in snapshot(large_dataset).items() if name not in beside}
    assert f"path     {tmp_path}/c/s3/bucket/corpus" in ran.stdout
    again = run_stoker("stage", "s3://bucket/corpus", "--cache", tmp_path / "c", "--json", env=s3.environ())
    assert json.loads(again.stdout)[0]["fetched_bytes"] == 0
    assert "all of it was here" in again.stderr
    assert books(tmp_path / "c") == []
    listed = run_stoker("stage", "ls", "--cache", tmp_path / "c")
    assert listed.stdout.startswith(f"{tmp_path}/c/s3/bucket/corpus  ")


def test_what_changed_on_the_disk_is_fetched_again_if_one_asks(
    web: WebServer, run_stoker: Any, snapshot: Any, tmp_path: Path
) -> None:
    write_noise(web.root / "worn", shards=2, shard_bytes=9 << 20)
    options = [f"{web.url}/worn", "--cache", tmp_path / "c", "--json"]
    place = Path(json.loads(run_stoker("stage", *options, env=LOCAL).stdout)[0]["path"])
    for name, at in (("s0.bin", 5_000_000), ("s1.idx", 7), ("blocks.xxh3", 1)):
        data = bytearray((place / name).read_bytes())
        data[at] ^= 1
        (place / name).write_bytes(data)
    believed = run_stoker("stage", *options, env=LOCAL)
    assert json.loads(believed.stdout)[0]["damaged"] == []
    healed = run_stoker("stage", *options, "--verify", env=LOCAL)
    assert healed.rc == 0, healed.stderr
    assert json.loads(healed.stdout)[0]["damaged"] == ["blocks.xxh3", "s0.bin", "s1.idx"]
    assert "s0.bin: damaged on the disk, fetched again" in healed.stderr
    assert snapshot(place) == snapshot(web.root / "worn")
    again = json.loads(run_stoker("stage", *options, "--verify", env=LOCAL).stdout)[0]
    assert (again["damaged"], again["fetched_bytes"]) == ([], 0)


def test_books_too_large_for_a_bundle_come_too(web: WebServer, run_stoker: Any, tmp_path: Path) -> None:
    far = web.root / "long"
    far.mkdir()
    data = os.urandom(18 << 20)
    (far / "s0.bin").write_bytes(data)
    record = FileRecord(name="s0.bin", bytes=len(data), xxh3=xxhash.xxh3_64_hexdigest(data))
    shard = ShardRecord(name="s0", samples=1, tokens=1, files=(record,))
    manifest = Manifest(format="webdataset", shards=(shard,), block_bytes=16, plan="x" * (9 << 20))
    write_manifest(open_store(far), manifest, blocks=np.arange(len(data) // 16, dtype=np.uint64))
    assert min((far / name).stat().st_size for name in ("manifest.json", "blocks.xxh3")) > 8 << 20
    ran = run_stoker("stage", f"{web.url}/long", "--cache", tmp_path / "c", "--json", env=LOCAL)
    assert ran.rc == 0, ran.stderr
    place = Path(json.loads(ran.stdout)[0]["path"])
    assert {path.name: path.read_bytes() for path in place.iterdir()} == {
        path.name: path.read_bytes() for path in far.iterdir()
    }


def test_each_node_stages_its_share(web: WebServer, run_stoker: Any, snapshot: Any, tmp_path: Path) -> None:
    write_noise(web.root / "noise", shards=4, shard_bytes=9 << 20)
    visible = Path("http") / web.url.removeprefix("http://") / "noise"
    found = []
    for node in range(2):
        options = ["--cache", tmp_path / str(node), "--share", f"{node}/2"]
        ran = run_stoker("stage", f"{web.url}/noise", *options, env=LOCAL)
        assert ran.rc == 0, ran.stderr
        found.append(snapshot(tmp_path / str(node) / visible))
    assert {**found[0], **found[1]} == snapshot(web.root / "noise")
    assert [sum(name.endswith(".bin") for name in part) for part in found] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["s3://bucket/nothing"], 2, "error: there is nothing at s3://bucket/nothing"),
        (["s3://bucket/corpus", "--share", "3/2"], 2, "error: there is no node 3 of 2"),
        (["s3://bucket/corpus", "--budget", "1MB"], 1, "and the whole budget is 1.0 MB"),
        (["s3://bucket/corpus", "--budget", "lots"], 2, "'lots' is not a size"),
        (["s3://bucket/corpus/manifest.json", "--share", "0/2"], 0, ""),
        (["s3://bucket/corpus/tokenizer.json", "--share", "0/2"], 2, "no manifest to share out"),
    ],
)
def test_the_exit_code_says_how_it_went(
    arguments: list[str], code: int, said: str, s3: S3Server, run_stoker: Any, tmp_path: Path
) -> None:
    (s3.root / "bucket/corpus/tokenizer.json").write_text("{}")
    ran = run_stoker("stage", *arguments, "--cache", tmp_path / "c", env=s3.environ())
    assert ran.rc == code, ran.stderr
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr


def test_an_interrupted_run_leaves_what_has_landed(
    web: WebServer, corpus: Path, stoker_environ: Any, run_stoker: Any, tmp_path: Path
) -> None:
    (corpus.parent / "large").write_bytes(os.urandom(1 << 20) * 64)
    arguments = ["stage", f"{web.url}/large", "--cache", str(tmp_path / "c")]
    with subprocess.Popen(
        [sys.executable, "-m", "stoker.cli", *arguments, "--limit-rate", "20MB"],
        env=stoker_environ(**LOCAL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_until(lambda: any(map(landed, (tmp_path / "c").glob(".stoker/parts/*/0"))))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-2:] == [
        "error: interrupted",
        "hint: run the same command again: prepare and stage go on where they stopped",
    ]
    (left,) = (tmp_path / "c/.stoker/parts").glob("*")
    assert "~left-" in left.name
    ran = run_stoker(*arguments, "--json", env=LOCAL)
    assert ran.rc == 0, ran.stderr
    assert 0 < json.loads(ran.stdout)[0]["fetched_bytes"] < 64 << 20
    assert books(tmp_path / "c") == []
    (corpus.parent / "large").unlink()


def landed(path: Path) -> bool:
    return path.stat().st_blocks * 512 > 4 << 20


# --- what may happen to a file --------------------------------------------------------------------


def test_an_object_replaced_meanwhile_is_noticed_and_then_fetched(web: WebServer, tmp_path: Path) -> None:
    target = web.root / "object"
    target.write_bytes(b"1" * (20 << 20))
    with stoker.Cache(tmp_path / "c") as cache:
        near = cache.at(f"{web.url}/object")
        target.write_bytes(b"2" * (20 << 20))
        os.utime(target, (1, 1))
        with pytest.raises(ChangedError):
            near.local_path("object")
        assert not (near.folder / "object").exists()
        assert list((tmp_path / "c/.stoker/parts").rglob("*")) == []
        assert set(cache.local_path(f"{web.url}/object").read_bytes()) == {ord("2")}


def test_an_object_that_is_not_what_its_manifest_says_never_shows(
    web: WebServer, corpus: Path, tmp_path: Path
) -> None:
    victim = sorted(corpus.glob("*.bin"))[0]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(bytes(data))
    with stoker.Cache(tmp_path / "c") as cache:
        near = cache.at(f"{web.url}/corpus")
        with pytest.raises(BadShardError, match=f"{victim.name} arrived as"):
            near.local_path(victim.name)
        assert not (near.folder / victim.name).exists()
    assert books(tmp_path / "c") == []


def test_a_block_that_was_damaged_on_the_way_is_fetched_again_alone(web: WebServer, tmp_path: Path) -> None:
    write_noise(web.root / "flipped", shards=1, shard_bytes=24 << 20)
    (shard,) = (web.root / "flipped").glob("*.bin")
    asked: list[int] = []

    def first_of_shard(number: int, head: str) -> Fault | None:
        if shard.name in head and not asked:
            asked.append(number)
            return Fault(flip_at=12345)
        return None

    with faulty(web.url, first_of_shard) as proxy, stoker.Cache(tmp_path / "c") as cache:
        near = cache.at(f"{proxy.endpoint}/flipped")
        assert near.local_path(shard.name).read_bytes() == shard.read_bytes()
    assert sum(count for count in proxy.sent if count >= 1 << 20) == (24 << 20) + (1 << 20)
    shutil.rmtree(web.root / "flipped")


@contextmanager
def mounted(folder: Path, size: str, skip_or_fail: Callable[[str], None]) -> Iterator[Path]:
    folder.mkdir()
    options = f"size={size},mode=0700"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True
    )
    if done.returncode:
        skip_or_fail(f"cannot mount a small filesystem, run as root: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("surprise", [False, True], ids=["known before", "while writing"])
def test_a_full_disk_is_left_clean(
    surprise: bool, web: WebServer, tmp_path: Path, skip_or_fail: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        (web.root / f"object-{number}").write_bytes(bytes([number]) * (20 << 20))
    if surprise:  # another fills the disk after room was found
        monkeypatch.setattr("stoker.stage.disk.room.Room._short_bytes", lambda self, unit: 0)
    with mounted(tmp_path / "small", "64m", skip_or_fail) as disk, stoker.Cache(disk) as cache:
        held = cache.local_path(f"{web.url}/object-0")
        cache.local_path(f"{web.url}/object-1")
        (disk / "foreign").write_bytes(bytes(10 << 20))
        with pytest.raises(stoker.StokerError, match=r"does not fit .* 41\.9 MB that process"):
            cache.local_path(f"{web.url}/object-2")
        assert held.read_bytes() == bytes(20 << 20)
        assert list((disk / ".stoker/parts").rglob("*")) == []
        (disk / "foreign").unlink()
        monkeypatch.undo()
        with stoker.Cache(disk, budget="45MB") as other:
            cache.close()
            assert other.local_path(f"{web.url}/object-2").stat().st_size == 20 << 20


# --- feeding --------------------------------------------------------------------------------------

FEED = """
import hashlib, sys, stoker
digest = hashlib.sha256()
with stoker.feed(sys.argv[1], device="cpu", batch_size=4, seq_len=512) as feeder:
    for batch in feeder:
        digest.update(batch["input_ids"].numpy().tobytes())
print(digest.hexdigest())
"""


def test_ranks_feed_from_far_away_and_fetch_once(
    web: WebServer, corpus: Path, stoker_environ: Any, tmp_path: Path
) -> None:
    def start(rank: int) -> subprocess.Popen[str]:
        ranks = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        environ = stoker_environ(STOKER_CACHE=str(tmp_path / "c"), **LOCAL, **ranks)
        command = [sys.executable, "-c", FEED, f"{web.url}/corpus"]
        return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)

    before = web.served_bytes("/corpus")
    fed = [process.communicate(timeout=100)[0].strip() for process in [start(0), start(1)]]
    assert fed == [digest_of(corpus, rank) for rank in range(2)]
    whole = sum(path.stat().st_size for path in corpus.iterdir())
    manifest = (corpus / "manifest.json").stat().st_size
    assert web.served_bytes("/corpus") - before <= whole + 2 * manifest  # each rank asks what there is


def digest_of(corpus: Path, rank: int) -> str:
    digest = hashlib.sha256()
    world = World(rank=rank, size=2, local_rank=rank, local_size=2)
    with stoker.Loader(corpus, batch_size=4, seq_len=512, world=world, output="numpy") as loader:
        for batch in loader:
            digest.update(batch["input_ids"].tobytes())
    return digest.hexdigest()


# --- hubs -----------------------------------------------------------------------------------------


def test_a_hub_repository_is_found_offline_by_the_hubs_own_library(
    s3: S3Server, run_stoker: Any, stoker_environ: Any, tmp_path: Path
) -> None:
    (s3.root / "bucket/blob").write_bytes(HUB_FILES[LARGE])
    with hub_server(s3.endpoint) as endpoint:
        env = {
            "HF_ENDPOINT": endpoint,
            "HF_TOKEN": TOKEN,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(tmp_path),
            **LOCAL,
        }
        ran = run_stoker(
            "stage", "hf://datasets/org/name@v2", "--cache", tmp_path / "hub", "--hub-cache", env=env
        )
        assert ran.rc == 0, ran.stderr
        plain = run_stoker("stage", "hf://datasets/org/name@v2", "--cache", tmp_path / "plain", env=env)
        assert plain.rc == 0, plain.stderr
        url = f"hf://datasets/org/name@v2/{LARGE}"
        one = run_stoker("stage", url, "--cache", tmp_path / "plain", "--json", env=env)
        assert Path(json.loads(one.stdout)[0]["path"]).read_bytes() == HUB_FILES[LARGE]
    find = (
        "from huggingface_hub import snapshot_download as find; "
        "print(find('org/name', repo_type='dataset', revision='v2'))"
    )
    found = subprocess.run(
        [sys.executable, "-c", find],
        env=stoker_environ(HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE="1"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    for folder in (Path(found.stdout.strip()), tmp_path / "plain/hub/datasets/org/name" / COMMIT):
        assert {name: (folder / name).read_bytes() for name in HUB_FILES} == HUB_FILES


def test_what_a_hub_cache_holds_already_is_linked_and_not_fetched(
    s3: S3Server, run_stoker: Any, tmp_path: Path
) -> None:
    (s3.root / "bucket/blob").write_bytes(HUB_FILES[LARGE])
    repository = tmp_path / "hub/datasets--org--name"
    (repository / "blobs").mkdir(parents=True)
    (tmp_path / "hub").chmod(0o700)
    blobs = {}
    for name, data in HUB_FILES.items():
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        blobs[name] = repository / "blobs" / (hashlib.sha256(data).hexdigest() if name == LARGE else git)
        blobs[name].write_bytes(data)
        link = repository / "snapshots" / COMMIT / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blobs[name], link.parent))
    damaged = next(name for name in HUB_FILES if name != LARGE and HUB_FILES[name])
    blobs[damaged].write_bytes(bytes(len(HUB_FILES[damaged])))
    with hub_server(s3.endpoint) as endpoint:
        env = {"HF_ENDPOINT": endpoint, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        arguments = [
            "stage",
            "hf://datasets/org/name@v2",
            "--cache",
            tmp_path / "hub",
            "--hub-cache",
            "--json",
        ]
        ran = run_stoker(*arguments, env={**env, **LOCAL})
    assert ran.rc == 0, ran.stderr
    (report,) = json.loads(ran.stdout)
    assert report["fetched_bytes"] == len(HUB_FILES[damaged]), "what is not what its name says is fetched"
    here = repository / "snapshots" / COMMIT
    assert {name: (here / name).read_bytes() for name in HUB_FILES} == HUB_FILES
    assert (here / LARGE).stat().st_ino == blobs[LARGE].stat().st_ino, "it lies here once"
    assert blobs[damaged].read_bytes() == bytes(len(HUB_FILES[damaged])), "others' files are left as they are"


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_a_whole_cache_can_be_used_where_it_cannot_be_written(
    large_dataset: Path, tmp_path: Path, snapshot: Any, skip_or_fail: Callable[[str], None]
) -> None:
    with mounted(tmp_path / "disk", "256m", skip_or_fail) as disk:
        whole = stoker.fetch(str(large_dataset), cache=disk / "c")
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with stoker.Cache(disk / "c") as cache:
            assert stoker.fetch(str(large_dataset), cache=cache) == whole
            with stoker.feed(
                str(large_dataset), cache=cache, batch_size=2, seq_len=64, device="cpu"
            ) as feeder:
                assert next(iter(feeder))
            (tmp_path / "other").write_text("x")
            with pytest.raises(stoker.StokerError, match="cannot be written to"):
                cache.local_path(tmp_path / "other")


def test_of_a_large_file_only_the_damaged_slice_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_noise(tmp_path / "far", shards=1, shard_bytes=9 << 20)
    fetched: list[int] = []
    count = fetch._Fetch._count

    def counting(self: fetch._Fetch, size: int) -> None:
        fetched.append(size)
        count(self, size)

    with stoker.Cache(tmp_path / "c") as cache:
        near = cache.at(str(tmp_path / "far"))
        path = near.local_path("s0.bin")
        data = bytearray(path.read_bytes())
        data[5 << 20] ^= 1
        path.write_bytes(data)
        monkeypatch.setattr(fetch._Fetch, "_count", counting)
        near.refetch("s0.bin", damaged=path.stat().st_ino)
        assert path.read_bytes() == (tmp_path / "far/s0.bin").read_bytes()
    assert sum(fetched) == 1 << 20
