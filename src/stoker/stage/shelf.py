"""The books of a cache folder: what lies in it, when it was last used, and what is on its way.

    CACHE/s3/bucket/prefix/shard-00001.bin      a file, whole and verified
    CACHE/.stoker/units/KEY.json                which files a published unit has, with their digests; its
                                                modification time is the unit's last use
    CACHE/.stoker/leases/KEY                    who is fetching (or removing) the unit now
    CACHE/.stoker/parts/KEY/OWNER/              a unit on its way, see `part`
    CACHE/.stoker/pins/                         who reads what, see `pins`

A unit is there if its record is, names the same content, and every file has its size.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import StorageError
from stoker.stage.digest import is_sound
from stoker.stage.part import entries, reserved_bytes
from stoker.stage.plan import Unit
from stoker.storage import named_errors
from stoker.wire.origin import RemoteFile

_FORGOTTEN_S = 24 * 3600.0  # a part that nobody went on with for a day is given up


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A published unit."""

    unit: Unit
    used_at: float


class Shelf:
    """The books of one folder. Any thread, any process; changing a unit's entry takes its lease."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.books = folder / ".stoker"
        self._known: dict[str, tuple[tuple[int, int], Unit]] = {}

    def lease_path(self, key: str) -> Path:
        return self._made("leases") / key

    def room_path(self) -> Path:
        return self._made("leases") / "..room"  # no key begins with a dot

    def pins_folder(self) -> Path:
        return self._made("pins")

    def parts_folder(self, key: str) -> Path:
        return self._made("parts") / key

    def path_of(self, unit: Unit, name: str) -> Path:
        return self.folder / unit.folder / name

    def holds(self, unit: Unit) -> bool:
        """Whether the unit lies here, whole, with the content that is wanted."""
        if self._finds(unit):
            return True
        # A network filesystem may say for a minute that what another node made is not there; reading the
        # folders makes it look again.
        for folder in (self.books / "units", self.folder / unit.folder):
            with suppress(OSError), os.scandir(folder) as found:
                next(found, None)
        return self._finds(unit)

    def _finds(self, unit: Unit) -> bool:
        record = self.record(unit.key)
        if record is None or not record.unit.same_content(unit):
            return False
        base = self.folder / unit.folder
        try:
            return all(os.stat(f"{base}/{file.name}").st_size == file.bytes for file in unit.files)
        except OSError:
            return False

    def damaged(self, unit: Unit) -> list[str]:
        """Files of a published unit that are not what they were, by their digests: reads all of them."""
        return [file.name for file in unit.files if not is_sound(self.path_of(unit, file.name), file.digest)]

    def add(self, unit: Unit, record: Path) -> None:
        """The unit's files have their names: now others may know. `record` is moved to its place."""
        os.rename(record, self._record_path(unit.key))

    def touch(self, key: str) -> None:
        """It is used now: a hint to the evictor, not worth an error."""
        with suppress(OSError):
            os.utime(self._record_path(key))

    def record(self, key: str) -> Record | None:
        path = self._record_path(key)
        try:
            facts = path.stat()
            # a record is never changed, only replaced; its successor may well get the same inode
            version = facts.st_ino, facts.st_ctime_ns
            known, unit = self._known.get(key, (None, None))
            if unit is None or known != version:
                unit = _unit_of(key, path.read_bytes())
                self._known[key] = version, unit
            return Record(unit=unit, used_at=facts.st_mtime)
        except (OSError, ValueError, KeyError, TypeError):
            self._known.pop(key, None)
            return None

    def records(self) -> Iterator[Record]:
        """Every published unit."""
        for name in sorted(os.listdir(self._made("units"))):
            if name.endswith(".json") and (record := self.record(name.removesuffix(".json"))):
                yield record

    def parts(self) -> dict[str, tuple[int, int]]:
        """Units on their way: what they will take in the end, and what of it they have yet to take."""
        found: dict[str, tuple[int, int]] = {}
        for unit in entries(self._made("parts")):
            for folder in entries(unit):
                whole, rest = reserved_bytes(folder)
                before = found.get(unit.name, (0, 0))
                found[unit.name] = (max(whole, before[0]), max(rest, before[1]))
        return found

    def forget(self, key: str) -> Path:
        """Take the record away, so that nobody finds the unit any more; to be put back or removed."""
        path = self._record_path(key)
        hidden = path.with_suffix(".going")
        os.rename(path, hidden)
        return hidden

    def put_back(self, key: str, hidden: Path) -> None:
        os.rename(hidden, self._record_path(key))

    def units(self) -> list[Unit]:
        """Every published unit, without its use."""
        return [record.unit for record in self.records()]

    def remove(self, unit: Unit, hidden: Path, *, staying: Sequence[Unit]) -> None:
        """Delete a forgotten unit's files, the folders that this empties, and its record.

        Files that one of the `staying` units has too stay: a folder that has grown is cut into other units,
        and a file may be asked for by its own URL as well."""
        paths = {self.path_of(unit, file.name) for file in unit.files}
        for path in paths.difference(self._paths_near(unit.folder, staying)):
            path.unlink(missing_ok=True)
        for folder in {path.parent for path in paths}:
            self._remove_empty(folder)
        hidden.unlink(missing_ok=True)

    def _paths_near(self, folder: str, units: Sequence[Unit]) -> Iterator[Path]:
        """The files of units that lie in this folder, above or below it."""
        for unit in units:
            if f"{unit.folder}/".startswith(f"{folder}/") or f"{folder}/".startswith(f"{unit.folder}/"):
                yield from (self.path_of(unit, file.name) for file in unit.files)

    def leftovers(self) -> Iterator[str]:
        """Keys of units whose part, lease or half-removed record nobody may come back for."""
        # not of one that somebody is just making
        yield from (path.name for path in entries(self._made("leases")) if path.suffix != ".new")
        yield from (path.name for path in entries(self._made("parts")) if self._is_forgotten(path.name))
        for path in entries(self._made("units")):
            if path.suffix == ".going":
                yield path.stem

    def clear(self, key: str) -> None:
        """Delete a part that nobody goes on with, and end a removal that was cut short. Under its lease."""
        if self._is_forgotten(key):
            self.give_up(key)
        hidden = self._record_path(key).with_suffix(".going")
        with suppress(OSError, ValueError, KeyError, TypeError):
            unit = _unit_of(key, hidden.read_bytes())
            if self._record_path(key).exists():
                hidden.unlink()
            else:
                self.remove(unit, hidden, staying=self.units())

    def give_up(self, key: str) -> bool:
        """Delete what was on its way, under its lease; whether that could be done."""
        shutil.rmtree(self.parts_folder(key), ignore_errors=True)
        return not self.parts_folder(key).exists()

    def _is_forgotten(self, key: str) -> bool:
        return self._record_path(key).exists() or _age_s(self.parts_folder(key)) > _FORGOTTEN_S

    def _record_path(self, key: str) -> Path:
        return self._made("units") / f"{key}.json"

    def _made(self, name: str) -> Path:
        path = self.books / name
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
        return path

    def _remove_empty(self, folder: Path) -> None:
        with suppress(OSError):  # not empty, or another was quicker
            while folder != self.folder:
                folder.rmdir()
                folder = folder.parent


def own_folder(path: Path, *, hint: str) -> Path:
    """A folder of this user's in a place where anybody may make one: what lies in it is believed."""
    with named_errors("make the cache folder", path):
        path.mkdir(mode=0o700, exist_ok=True)
        facts = path.lstat()
    if facts.st_uid != os.getuid() or not stat.S_ISDIR(facts.st_mode):
        raise StorageError(f"{path} belongs to somebody else", hint=hint)
    return path


def _unit_of(key: str, record: bytes) -> Unit:
    plain = json.loads(record)
    return Unit(key=key, folder=plain["folder"], files=tuple(RemoteFile(**file) for file in plain["files"]))


def _age_s(path: Path) -> float:
    """How long ago anything changed in a folder of folders."""
    inside = [file for folder in entries(path) for file in entries(folder)]
    try:
        return time.time() - max(entry.stat().st_mtime for entry in (path, *inside))
    except OSError:  # it changes just now
        return 0.0
