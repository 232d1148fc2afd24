"""A cache folder, fed from a folder that stands for a slow filesystem."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
from contextlib import ExitStack
from pathlib import Path

import pytest

import stoker
from stoker.errors import CacheFullError, StorageError, UsageError
from stoker.stage.cache import default_folder
from stoker.stage.disk.holdings import held_folders
from stoker.stage.landing.part import Part
from stoker.stage.leases.lease import Claim
from stoker.stage.run import parse_share, stage

BIG = 9 << 20  # above what travels in bundles: a unit of its own


@pytest.fixture
def origin(tmp_path) -> Path:
    """Three large files and some small ones."""
    folder = tmp_path / "origin"
    (folder / "deep").mkdir(parents=True)
    for number in range(3):
        (folder / f"big-{number}").write_bytes(bytes([number + 1]) * BIG)
    for number in range(5):
        (folder / "deep" / f"small-{number}").write_bytes(bytes([number]) * number)
    return folder


@pytest.fixture
def near_of(tmp_path):
    """Make caches on one folder; closed at the end."""
    caches = []

    def make(origin, **options):
        caches.append(stoker.Cache(tmp_path / "cache", **options))
        return caches[-1].at(origin)

    make.caches = caches
    yield make
    for cache in caches:
        cache.close()


def inodes(folder):
    return {path.name: path.stat().st_ino for path in folder.rglob("*") if path.is_file()}


def books(cache_folder, *names):
    return [p.name for name in names for p in (cache_folder / ".stoker" / name).rglob("*")]


def test_a_folder_is_staged_whole(origin, tmp_path, snapshot):
    assert snapshot(stoker.fetch(str(origin), cache=tmp_path / "cache")) == snapshot(origin)
    assert books(tmp_path / "cache", "parts", "leases", "pins") == []


def test_names_that_are_not_utf_8_are_staged(tmp_path):
    name = os.fsdecode(b"\xff\xfe")
    (tmp_path / "origin").mkdir()
    (tmp_path / "origin" / name).write_bytes(b"x")
    path = stoker.fetch(str(tmp_path / "origin"), cache=tmp_path / "cache")
    assert (path / name).read_bytes() == b"x"


def test_an_empty_url_is_not_the_working_folder(tmp_path):
    with stoker.Cache(tmp_path / "cache") as cache, pytest.raises(UsageError, match="empty"):
        cache.at("")


def test_staging_again_fetches_nothing(origin, tmp_path):
    with stoker.Cache(tmp_path / "cache") as cache:
        first = stage(str(origin), cache)
    with stoker.Cache(tmp_path / "cache") as cache:
        before = inodes(first.path)
        again = stage(str(origin), cache)
    assert (first.fetched_bytes, again.fetched_bytes) == (first.bytes, 0)
    assert inodes(again.path) == before


def test_a_single_file_gives_its_own_path(origin, tmp_path):
    path = stoker.fetch(str(origin / "big-1"), cache=tmp_path / "cache")
    assert path.name == "big-1"
    assert path.read_bytes() == (origin / "big-1").read_bytes()


def test_a_file_is_fetched_when_it_is_first_used(origin, near_of):
    near = near_of(origin)
    path = near.local_path("big-0")
    assert path.read_bytes() == (origin / "big-0").read_bytes()
    assert not (near.folder / "big-1").exists()


def test_a_file_that_changed_at_its_origin_is_fetched_anew(origin, near_of):
    near = near_of(origin)
    path = near.local_path("big-0")
    near.release("big-0")
    (origin / "big-0").write_bytes(b"n" * BIG)
    assert near_of(origin).local_path("big-0") == path
    assert path.read_bytes() == b"n" * BIG


def test_what_gives_way_takes_no_file_along_that_another_reads(origin, near_of, tmp_path):
    small = origin / "deep"
    near_of(small).cache.local_path(small / "small-1")
    near_of(small).local_path("small-1")
    (small / "small-5").write_bytes(b"the folder is cut into other units now")
    path = near_of(small, budget=2 * BIG).local_path("small-1")
    for cache in near_of.caches[:-1]:
        cache.close()
    near_of.caches[-1].room.empty()
    assert path.read_bytes() == (small / "small-1").read_bytes()
    assert len(list(near_of.caches[-1].shelf.records())) == 1


def test_a_record_that_took_its_predecessors_inode_is_read(origin, near_of):
    reader, other = near_of(origin), near_of(origin)
    reader.local_path("big-0")
    (old,) = (unit for unit in reader.units if unit.files[0].name == "big-0")
    assert reader.cache.shelf.holds(old)
    reader.release("big-0")
    record = other.cache.folder / ".stoker/units" / f"{old.key}.json"
    new, before = record.read_text().replace(old.files[0].version, "1"), record.stat()
    while record.stat().st_ctime_ns == before.st_ctime_ns:  # a clock of some milliseconds
        record.write_text(new)
    assert record.stat().st_ino == before.st_ino
    assert not reader.cache.shelf.holds(old)


def test_a_deleted_file_is_fetched_again_by_who_holds_it(origin, near_of):
    near = near_of(origin)
    near.local_path("big-0").unlink()
    assert near.local_path("big-0").read_bytes() == (origin / "big-0").read_bytes()
    near.release("big-0")
    near.cache.room.empty()
    assert not (near.folder / "big-0").exists(), "it is held once"


def test_a_deleted_file_is_fetched_again(origin, near_of):
    path = near_of(origin).local_path("big-0")
    path.unlink()
    assert near_of(origin).local_path("big-0").stat().st_size == BIG


def test_threads_that_want_the_same_file_fetch_it_once(origin, near_of):
    near, paths = near_of(origin), []
    threads = [threading.Thread(target=lambda: paths.append(near.local_path("big-2"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({(path, path.stat().st_ino) for path in paths}) == 1


def test_prefetching_brings_all_in_the_background(origin, near_of):
    near = near_of(origin)
    near.prefetch(["big-2", "deep/small-3"])
    wait_until(lambda: (near.folder / "big-2").exists() and (near.folder / "deep/small-3").exists())
    assert not (near.folder / "big-1").exists()


def test_an_unknown_name_is_said(origin, near_of):
    with pytest.raises(UsageError, match="there is no big-9"):
        near_of(origin).local_path("big-9")


def test_one_file_by_its_address(origin, tmp_path):
    with stoker.Cache(tmp_path / "cache") as cache:
        assert cache.local_path(origin / "big-0").stat().st_size == BIG
        with pytest.raises(UsageError, match="not one file"):
            cache.local_path(origin)


# --- budget ---------------------------------------------------------------------------------------


def test_the_longest_unused_gives_way(origin, near_of):
    near = near_of(origin, budget=2 * BIG + 1000)
    for name in ("big-0", "big-1"):
        near.release(near.local_path(name).name)
    os.utime(next(iter((near.cache.folder / ".stoker/units").glob("big-1*"))), (1, 1))
    near.local_path("big-2")
    assert sorted(path.name for path in near.folder.iterdir()) == ["big-0", "big-2"]


def test_what_is_read_never_gives_way(origin, near_of):
    near = near_of(origin, budget=2 * BIG)
    held = [near.local_path("big-0"), near.local_path("big-1")]
    with pytest.raises(CacheFullError, match=rf"that process {os.getpid()} on .* reads") as caught:
        near.local_path("big-2")
    assert "raise the budget" in caught.value.hint
    assert [path.stat().st_size for path in held] == [BIG, BIG]
    assert books(near.cache.folder, "parts", "leases") == []


READER = """
import sys, stoker
near = stoker.Cache(sys.argv[1]).at(sys.argv[2])
print(near.local_path("big-0"), near.local_path("big-1"), flush=True)
sys.stdin.read()
"""


def test_a_living_reader_holds_what_it_reads_and_a_killed_one_nothing(origin, tmp_path, stoker_environ):
    with (
        subprocess.Popen(
            [sys.executable, "-c", READER, tmp_path / "cache", origin],
            env=stoker_environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as reader,
        stoker.Cache(tmp_path / "cache", budget=2 * BIG) as cache,
    ):
        held = [Path(path.decode()) for path in reader.stdout.readline().split()]
        with pytest.raises(CacheFullError, match=f"that process {reader.pid} on .* reads"):
            cache.at(origin).local_path("big-2")
        assert [path.stat().st_size for path in held] == [BIG, BIG]
        reader.kill()
        reader.wait()
        assert cache.at(origin).local_path("big-2").exists()
        assert sum(path.exists() for path in held) == 1


@pytest.mark.parametrize("budget", [0, 2 * BIG])
def test_what_was_begun_and_left_gives_way(budget, origin, near_of, monkeypatch):
    near = near_of(origin, budget=budget)
    shelf = near.cache.shelf
    left = [unit for unit in near.units if unit.bytes == BIG][1:]
    for unit in left:
        Part(shelf.part_path(unit.key, "left-x"), unit, grounds=shelf.grounds).close()
    monkeypatch.setattr("stoker.stage.disk.room.Room._free", lambda self: 4 * BIG)
    assert near.local_path("big-0").exists()
    assert shelf.parts() == {}


def test_what_another_brings_does_not_give_way(origin, near_of):
    near = near_of(origin, budget=2 * BIG)
    shelf = near.cache.shelf
    others = [unit for unit in near.units if unit.bytes == BIG][1:]
    with ExitStack() as stack:
        for unit in others:
            stack.enter_context(Claim(shelf.lease_path(unit.key)).try_take())
            Part(shelf.part_path(unit.key, "x"), unit, grounds=shelf.grounds).close()
        with pytest.raises(CacheFullError, match="on its way"):
            near.local_path("big-0")


@pytest.mark.parametrize(
    ("number", "said", "hint"),
    [
        (errno.EDQUOT, "Disk quota exceeded", "quota is used up"),
        (errno.EACCES, "Permission denied", "permissions"),
    ],
)
@pytest.mark.parametrize("where", ["mkdir", "write"])
def test_what_the_filesystem_refuses_is_told(number, said, hint, where, origin, near_of, monkeypatch):
    def refuse(*args, **more):
        raise OSError(number, os.strerror(number))

    near = near_of(origin)
    target = (
        "stoker.stage.landing.slices.write_all"
        if where == "write"
        else "stoker.stage.landing.part.Part._write_header"
    )
    monkeypatch.setattr(target, refuse)
    with pytest.raises(StorageError, match=said) as caught:
        near.local_path("big-0")
    assert hint in caught.value.hint


def test_a_full_disk_is_not_blamed_on_the_budget(origin, near_of, monkeypatch):
    near = near_of(origin, budget="1TB")
    monkeypatch.setattr("stoker.stage.disk.room.Room._free", lambda self: 1000)
    with pytest.raises(CacheFullError, match=r"a disk with 1\.0 kB free, of which 16\.8 MB stay for others"):
        near.local_path("big-0")


def test_books_that_cannot_be_written_while_the_disk_is_full_hide_nothing(origin, near_of, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    near = near_of(origin)
    monkeypatch.setattr(Part, "sync", full)
    monkeypatch.setattr(Part, "_say", full)
    with pytest.raises(CacheFullError, match="does not fit"):
        near.local_path("deep/small-3")
    assert near.cache.shelf.parts() == {}


def test_without_a_budget_nothing_gives_way(origin, near_of, monkeypatch):
    near = near_of(origin)
    near.release(near.local_path("big-0").name)
    monkeypatch.setattr("stoker.stage.disk.room.Room._free", lambda self: BIG)
    with pytest.raises(CacheFullError, match="that nobody reads") as caught:
        near.local_path("big-1")
    assert "budget" in caught.value.hint
    assert (near.folder / "big-0").exists()


def test_more_than_the_budget_is_refused_at_once(origin, tmp_path):
    with (
        stoker.Cache(tmp_path / "cache", budget=BIG) as cache,
        pytest.raises(CacheFullError, match=r"the whole budget is 9\.4 MB"),
    ):
        stage(str(origin), cache)


def test_prefetching_waits_until_the_reader_has_moved_on(origin, near_of):
    near = near_of(origin, budget=2 * BIG + 1000)
    near.local_path("big-0")
    near.prefetch(["big-0", "big-1", "big-2"])
    wait_until(lambda: (near.folder / "big-1").exists())
    assert (near.folder / "big-0").exists()
    near.local_path("big-1")
    near.release("big-0")
    wait_until(lambda: (near.folder / "big-2").exists())
    assert not (near.folder / "big-0").exists()


# --- processes ------------------------------------------------------------------------------------


def test_a_cache_can_be_sent_to_a_spawned_process(origin, near_of):
    near = pickle.loads(pickle.dumps(near_of(origin)))
    assert near.local_path("big-0").stat().st_size == BIG
    near.cache.close()


def test_a_forked_child_is_refused(origin, near_of):
    near = near_of(origin)
    near.local_path("big-0")
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of what this is about
        child = os.fork()
    if not child:
        try:
            near.local_path("big-1")
        except StorageError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    assert "forked" in said
    assert "spawn" in said


def test_a_closed_cache_is_said(origin, tmp_path):
    with stoker.Cache(tmp_path / "cache") as cache:
        near = cache.at(origin)
    cache.close()
    with pytest.raises(UsageError, match="closed"):
        near.local_path("big-0")


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no /dev/shm here")
def test_files_can_be_read_from_memory(origin, near_of, monkeypatch):
    folder = Path(f"/dev/shm/kept-{os.getpid()}")
    monkeypatch.setattr("stoker.stage.preload.shm_folder", lambda: folder)
    near = near_of(origin, preload="shm")
    path = near.local_path("big-0")
    assert path.is_relative_to(folder)
    assert path.read_bytes() == (origin / "big-0").read_bytes()
    near.cache.close()
    assert not path.exists()
    assert [p for p in folder.rglob("*") if p.is_file()] == []
    subprocess.run(["rm", "-r", folder], check=True)


def test_what_does_not_fit_into_memory_is_read_from_the_disk(origin, near_of, monkeypatch, tmp_path):
    monkeypatch.setattr("stoker.stage.preload.shm_folder", lambda: tmp_path / "shm")
    monkeypatch.setattr("stoker.machine.allowed.free_bytes", lambda: BIG)
    near = near_of(origin, preload="shm")
    assert near.local_path("big-0") == near.folder / "big-0"


def test_a_folder_that_somebody_else_made_in_memory_is_not_believed(origin, near_of, monkeypatch, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "shm").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr("stoker.stage.preload.shm_folder", lambda: tmp_path / "shm")
    near = near_of(origin, preload="shm")
    with pytest.raises(StorageError, match="belongs to somebody else"):
        near.local_path("big-0")


def test_the_page_cache_can_be_asked(origin, near_of):
    assert near_of(origin, preload="page-cache").local_path("big-0").exists()


def test_a_lease_that_is_just_being_made_is_no_pin(origin, tmp_path, snapshot):
    making = tmp_path / "cache/.stoker/pins/1-00000000.lease.0123456789abcdef.new"
    making.mkdir(parents=True)
    assert snapshot(stoker.fetch(str(origin), cache=tmp_path / "cache")) == snapshot(origin)
    assert making.exists()


def test_an_unknown_preload_is_said(tmp_path):
    with pytest.raises(UsageError, match="preload='ram'"):
        stoker.Cache(tmp_path, preload="ram")


# --- places ---------------------------------------------------------------------------------------


def test_the_default_folder_is_the_users_own(tmp_path, monkeypatch):
    assert default_folder({"STOKER_CACHE": str(tmp_path)}) == tmp_path
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = default_folder({})
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o077 == 0
    folder.rmdir()
    folder.symlink_to("/")
    with pytest.raises(StorageError, match="belongs to somebody else"):
        default_folder({})


def test_what_lies_in_a_cache_can_be_listed(origin, near_of):
    near = near_of(origin)
    near.local_path("big-0")
    (held,) = held_folders(near.cache.folder)
    assert (held.path, held.files, held.bytes) == (near.folder, 1, BIG)
    assert f"process {os.getpid()}" in held.holders[0]
    with pytest.raises(UsageError, match="no cache folder"):
        held_folders(origin)


@pytest.mark.parametrize("text", ["", "3", "3/3", "-1/2", "a/b", "1/2/3"])
def test_an_impossible_share_is_said(text):
    with pytest.raises(UsageError):
        parse_share(text)


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def test_a_file_that_became_a_folder_at_its_origin_is_told_what_is_in_the_way(origin, tmp_path):
    (origin / "late").write_bytes(b"a file")
    whole = stoker.fetch(str(origin), cache=tmp_path / "cache")
    (origin / "late").unlink()
    (origin / "late").mkdir()
    (origin / "late" / "inner").write_bytes(b"in a folder")
    with pytest.raises(StorageError, match=r"is in the way.*\n.*delete") as error:
        stoker.fetch(str(origin), cache=tmp_path / "cache")
    assert str(whole / "late") in error.value.hint
    (whole / "late").unlink()
    again = stoker.fetch(str(origin), cache=tmp_path / "cache")
    assert (again / "late" / "inner").read_bytes() == b"in a folder"


def test_without_a_thread_to_prefetch_files_come_when_they_are_used(origin, near_of, monkeypatch):
    start = threading.Thread.start

    def refuse(self):
        if self.name == "stoker-prefetch":
            raise RuntimeError("can't start new thread")
        start(self)

    near = near_of(origin)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    near.prefetch()
    assert near.local_path("big-0").exists()


@pytest.mark.parametrize("folder", [True, 5, b"x"])
def test_what_is_no_folder_is_not_made_one(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="not a folder for a cache"):
        stoker.Cache(folder)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ttl_s", [0, -1.0])
def test_a_lease_that_nobody_could_hold_is_refused(ttl_s, tmp_path):
    with pytest.raises(UsageError, match="lets nobody hold a lease"):
        stoker.Cache(tmp_path, ttl_s=ttl_s)


def test_a_cache_is_not_staged_into_itself(origin, tmp_path):
    with pytest.raises(UsageError, match="lies in"):
        stoker.fetch(str(origin), cache=origin / "cache")
    assert stoker.fetch(str(origin / "deep"), cache=origin / "cache").is_dir()


def test_sweeping_leaves_a_lease_alone_that_is_just_being_made(origin, near_of):
    cache = near_of(origin).cache
    making = cache.shelf.lease_path("x").with_name("x.0123456789abcdef.new")
    making.mkdir()
    inode = making.stat().st_ino
    cache.room.sweep()
    assert making.stat().st_ino == inode


def test_what_few_may_read_at_its_origin_few_may_read_here(origin, tmp_path):
    (origin / "secret").write_bytes(b"s")
    (origin / "secret").chmod(0o600)
    (origin / "deep/link").symlink_to(origin / "secret")
    path = stoker.fetch(str(origin), cache=tmp_path / "cache")
    assert [(path / name).stat().st_mode & 0o777 for name in ("secret", "deep/link")] == [0o600, 0o600]
    assert (path / "big-0").stat().st_mode & 0o777 == 0o644


def test_a_version_that_somebody_reads_is_not_disturbed_by_the_next(origin, near_of, snapshot):
    before = near_of(origin)
    old = before.local_path("big-0")
    (origin / "big-0").write_bytes(b"n" * BIG)
    after = near_of(origin)
    new = after.local_path("big-0")
    assert new.parent != old.parent
    assert old.read_bytes() == bytes([1]) * BIG
    assert new.read_bytes() == b"n" * BIG
    before.cache.close()
    assert near_of(origin).local_path("big-0") == new, "it stays where it is"


def test_a_version_that_nobody_reads_makes_way(origin, near_of):
    with stoker.Cache(near_of(origin).cache.folder) as first:
        old = first.at(origin).local_path("big-0")
    (origin / "big-0").write_bytes(b"n" * BIG)
    assert near_of(origin).local_path("big-0") == old
    assert old.read_bytes() == b"n" * BIG
