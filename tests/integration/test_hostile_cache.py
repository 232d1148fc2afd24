"""A cache folder is other people's input: nothing outside of it is touched, and nothing wrong is served."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hostile_users import ATTACKER, GROUP, VICTIM, Attacker, acting_as
from web_server import write_noise

import stoker
from stoker.errors import StokerError, UsageError
from stoker.stage.disk.records import record_bytes
from stoker.stage.origins.origin import Collection, RemoteFile
from stoker.stage.plan import key_of, units_of
from stoker.stage.run import stage

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.integration

SHARD = 9 << 16  # small: the fuzz stages thousands of times


@pytest.fixture
def place(need_root: None) -> Iterator[Path]:
    """A folder that all users can reach, with an origin, a shared cache and something outside of both."""
    folder = Path(tempfile.mkdtemp(prefix="stoker-users-"))
    folder.chmod(0o755)
    write_noise(folder / "origin", shards=2, shard_bytes=SHARD)
    (folder / "outside/home").mkdir(parents=True)
    (folder / "outside/home/file").write_text("mine!")
    (folder / "outside/secret").write_text("s3cret")
    for path in (folder / "outside").rglob("*"):
        path.chmod(0o777 if path.is_dir() else 0o666)  # whoever is led there could write: nobody may be
    (folder / "outside").chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def shared_cache(place: Path) -> Path:
    cache = place / "cache"
    cache.mkdir()
    os.chown(cache, 0, GROUP)
    cache.chmod(0o3770)
    with stoker.Cache(cache, shared=True):  # its owner begins
        return cache


def facts(folder: Path) -> dict[str, Any]:
    """Everything that a write, a deletion or a touch would change."""
    found = {}
    for path in sorted(folder.rglob("*")):
        seen = path.lstat()
        data = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (seen.st_ino, seen.st_mode, seen.st_uid, seen.st_mtime_ns, seen.st_ctime_ns, data)
    return found


def served_right(place: Path, found: Path) -> bool:
    return all(
        (found / path.name).read_bytes() == path.read_bytes()
        for path in (place / "origin").iterdir()
        if (found / path.name).exists()
    )


def attack(place: Path, *, rounds: int, seed: int) -> dict[str, int]:
    """Mutations by one user, staging and eviction by two others, round by round; what was tried."""
    cache = shared_cache(place)
    with stoker.Cache(place / "own") as own:
        origin = own.at(str(place / "origin"))
    units = units_of(origin.collection, folder=str(origin.folder.relative_to(place / "own")))
    attacker = Attacker(cache, place / "outside", units, seed=seed)
    told = 0
    for number in range(rounds):
        for _ in range(attacker.luck.randrange(1, 4)):
            attacker.act()
        before = facts(place / "outside")  # where the attacker may write, too
        try:
            if number % 2:
                found = bring(place, cache, number)
            else:
                with acting_as(VICTIM):
                    found = bring(place, cache, number)
            assert served_right(place, found), f"something wrong was served in round {number}"
        except StokerError:
            told += 1  # that something is in the way is said
        assert facts(place / "outside") == before, f"something outside was touched in round {number}"
        if number % 5 == 4:
            clear(cache)
    assert told < rounds * 0.9, "staging went well too seldom to show anything"
    return {**attacker.done, "rounds": rounds, "told": told}


def bring(place: Path, cache: Path, number: int) -> Path:
    with stoker.Cache(cache, shared=True, budget=8 * SHARD, ttl_s=0.05) as shared:
        if number % 3 == 0:
            shared.room.empty()
            read_through(place, shared, number)
        return stage(str(place / "origin"), shared).path


def read_through(place: Path, shared: stoker.Cache, number: int) -> None:
    """Some bytes of a file that is not whole yet, as a loader reads them."""
    near, start = shared.at(str(place / "origin")), number * 4096 % SHARD
    path, _ = near.within("s0.bin", start, start + 1)
    with suppress(FileNotFoundError), path.open("rb") as file:  # it was just given its name
        wanted = (place / "origin/s0.bin").read_bytes()[start : start + 100]
        assert os.pread(file.fileno(), len(wanted), start) == wanted


def clear(cache: Path) -> None:
    """Another folder's worth of attacks: what was laid would else be in every later one's way."""
    for path in [*cache.glob(".stoker/*/*"), *cache.glob("local*")]:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def test_what_another_user_lays_into_a_shared_cache_touches_nothing_outside(place: Path) -> None:
    done = attack(place, rounds=60, seed=int.from_bytes(os.urandom(4)))
    assert done["rounds"] == 60


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(7))
def test_thousands_of_mutations_touch_nothing_outside(place: Path, seed: int) -> None:
    done = attack(place, rounds=550, seed=seed)
    print(done)
    assert sum(done.values()) > 1000


def test_a_folder_that_is_swapped_while_it_is_written_to_leads_nowhere(place: Path) -> None:
    """The attacker owns the folder that the files go to, and swaps it for a link again and again."""
    cache, before, stop = shared_cache(place), facts(place / "outside"), threading.Event()
    swapper = os.fork()
    if not swapper:
        _swap_for_ever(cache / "local", place / "outside/home")
    try:
        for number in range(30):
            try:
                served_right(place, bring(place, cache, number))
            except StokerError:
                continue
            assert facts(place / "outside") == before
    finally:
        stop.set()
        os.kill(swapper, 9)
        os.waitpid(swapper, 0)
    assert facts(place / "outside") == before


def _swap_for_ever(folder: Path, aim: Path) -> None:
    os.setgroups([GROUP])
    os.setgid(GROUP)
    os.setuid(ATTACKER)
    while True:
        for make in (lambda: os.mkdir(folder, 0o777), lambda: os.symlink(aim, folder)):
            try:
                make()
                os.rename(folder, f"{folder}-{os.urandom(4).hex()}")
            except OSError:
                continue


# --- what was planted before a folder was ours alone -----------------------------------------------


@pytest.fixture
def private(tmp_path: Path) -> Path:
    (tmp_path / "victim/home").mkdir(parents=True)
    (tmp_path / "victim/home/precious").write_text("mine")
    (tmp_path / "origin").mkdir()
    (tmp_path / "origin/a").write_bytes(b"a" * 1000)
    stoker.fetch(str(tmp_path / "origin"), cache=tmp_path / "cache")
    return tmp_path


def test_a_record_that_leads_out_of_the_folder_deletes_nothing_there(private: Path) -> None:
    file = {"name": "precious", "url": "x", "bytes": 4, "version": "", "digest": ""}
    for number, folder in enumerate(("../victim/home", f"{private}/victim/home", "local/../../victim/home")):
        record = {"folder": folder, "files": [file]}
        for key in (f"forged-{number}", key_of(folder, ["precious"])):
            (private / "cache/.stoker/units" / f"{key}.json").write_text(json.dumps(record))
            (private / "cache/.stoker/units" / f"{key}.going").write_text(json.dumps(record))
    with stoker.Cache(private / "cache", budget=1 << 20) as cache:
        cache.room.sweep()
        cache.room.empty()
    assert (private / "victim/home/precious").read_text() == "mine"
    assert not list((private / "cache").rglob("a")), "what is really there gives way all the same"


@pytest.mark.parametrize("folder", ["x" * 300, "local/" + "x" * 256, "\ud800"])
def test_a_record_of_a_folder_that_cannot_be_keeps_nobody_from_eviction(folder: str, private: Path) -> None:
    with stoker.Cache(private / "cache") as cache:
        file = {"name": "a", "url": "x", "bytes": 1, "version": "", "digest": ""}
        plain = json.dumps({"folder": folder, "files": [file]}).encode()
        for key in (_key_of(folder), "a-0"):
            (private / "cache/.stoker/units" / f"{key}.json").write_bytes(plain)
        cache.room.empty()
        assert list(cache.shelf.records()) == []


def _key_of(folder: str) -> str:
    try:
        return key_of(folder, ["a"])
    except UnicodeEncodeError:
        return "a-1"


def test_a_link_in_the_folder_is_neither_written_nor_deleted_through(private: Path) -> None:
    folder = next((private / "cache/local").rglob("origin"))
    shutil.rmtree(folder)
    folder.symlink_to(private / "victim/home")
    (private / "origin/precious").write_text("theirs")
    with pytest.raises(stoker.StokerError, match="is a link"):
        stoker.fetch(str(private / "origin"), cache=private / "cache")
    assert (private / "victim/home/precious").read_text() == "mine"
    assert [path.name for path in (private / "victim/home").iterdir()] == ["precious"]


def test_a_link_in_the_place_of_a_file_is_replaced_by_the_file(private: Path) -> None:
    (path,) = (private / "cache/local").rglob("a")
    path.unlink()
    path.symlink_to(private / "victim/home/precious")
    assert (stoker.fetch(str(private / "origin"), cache=private / "cache") / "a").read_bytes() == b"a" * 1000
    assert not path.is_symlink()
    assert (private / "victim/home/precious").read_text() == "mine"


def test_a_fifo_in_the_books_is_not_waited_for(private: Path) -> None:
    (record,) = (private / "cache/.stoker/units").iterdir()
    record.unlink()
    os.mkfifo(record)
    os.mkfifo(private / "cache/.stoker/pins/1-0")
    assert (stoker.fetch(str(private / "origin"), cache=private / "cache") / "a").read_bytes() == b"a" * 1000


def test_a_new_cache_is_its_owners_alone(private: Path) -> None:
    assert (private / "cache").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o702])
def test_a_folder_that_others_may_write_to_is_refused_unless_it_is_shared(mode: int, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    with pytest.raises(UsageError, match="others may write"):
        stoker.Cache(tmp_path / "cache")
    with pytest.raises(UsageError, match="everybody may write" if mode & 2 else "sticky"):
        stoker.Cache(tmp_path / "cache", shared=True)


def test_members_of_a_group_share_what_has_digests(place: Path) -> None:
    cache = shared_cache(place)
    with acting_as(ATTACKER), stoker.Cache(cache, shared=True) as theirs:
        first = stage(str(place / "origin"), theirs)
    with acting_as(VICTIM), stoker.Cache(cache, shared=True) as ours:
        again = stage(str(place / "origin"), ours)
    assert (first.fetched_bytes, again.fetched_bytes) == (first.bytes, 0)
    assert (again.path / "s0.bin").stat().st_uid == ATTACKER


def test_what_another_member_staged_without_a_digest_is_not_believed(place: Path) -> None:
    cache = shared_cache(place)
    (place / "plain").mkdir()
    (place / "plain/file").write_bytes(b"right")
    with acting_as(ATTACKER), stoker.Cache(cache, shared=True) as theirs:
        path = stage(str(place / "plain"), theirs).path / "file"
        path.chmod(0o600)
        path.write_bytes(b"wrong")
        path.chmod(0o640)
    with (
        acting_as(VICTIM),
        stoker.Cache(cache, shared=True) as ours,
        pytest.raises(StokerError, match="permitted"),
    ):
        stage(str(place / "plain"), ours)  # the file is another's: it can be neither believed nor replaced


def test_a_unit_has_one_key_and_no_other(tmp_path: Path) -> None:
    file = RemoteFile(name="a", url="http://user:pw@host/a?token=t", bytes=1)
    (unit,) = units_of(Collection(url="http://host", kind="folder", files=(file,)), folder="http/host")
    assert b"pw" not in record_bytes(unit)
    assert b"=t" not in record_bytes(unit)
    assert unit.key == key_of("http/host", ["a"])
