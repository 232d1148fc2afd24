"""Cache index: what lies in a cache folder, when it was last used, and what is on its way.

    CACHE/s3/bucket/prefix/shard-00001.bin      a file, whole and verified
    CACHE/.stoker/units/KEY.json                which files a published unit has, with their digests; its
                                                modification time is the unit's last use
    CACHE/.stoker/leases/KEY                    who is fetching (or removing) the unit now
    CACHE/.stoker/parts/KEY~OWNER/              a unit on its way, see `part`
    CACHE/.stoker/pins/                         who reads what, see `pins`
    CACHE/.stoker/wants/                        what somebody waits for in a unit on its way, see `wants`

A unit is there if its record is, names the same content, and every file is a plain one of its size. What
somebody wrote who is not trusted here (see `grounds`) counts only if it has the digest that is wanted.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import StorageError
from stoker.stage.disk.grounds import Grounds, read_book, remove_tree
from stoker.stage.disk.records import MOST_BYTES, read_record
from stoker.stage.landing.digest import is_sound
from stoker.stage.landing.maps import entries, reserved_bytes, unit_on_its_way
from stoker.stage.origins.origin import RemoteFile
from stoker.stage.plan import Unit, content_of

_OWNED_BY = "~"  # no key holds one
_FORGOTTEN_S = 24 * 3600.0  # a part that nobody went on with for a day is given up


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A published unit."""

    unit: Unit
    used_at: float
    owner: int  # a user id


class Shelf:
    """The books of one folder. Any thread, any process; changing a unit's entry takes its lease."""

    def __init__(self, grounds: Grounds) -> None:
        self.grounds, self.folder = grounds, grounds.folder
        self._books: dict[str, Path] = {}
        self._known: dict[str, tuple[tuple[int, int], Unit]] = {}
        self._sound: dict[str, tuple[int, int, str]] = {}  # others' files whose digest was seen to be right

    def lease_path(self, key: str) -> Path:
        return self._made("leases") / key

    def room_path(self) -> Path:
        return self._made("leases") / "..room"  # no key begins with a dot

    def pins_folder(self) -> Path:
        return self._made("pins")

    def wants_folder(self) -> Path:
        return self._made("wants")

    def part_path(self, key: str, owner: str) -> Path:
        return self._made("parts") / f"{key}{_OWNED_BY}{owner}"

    def parts_of(self, key: str) -> list[Path]:
        """What has landed of a unit, in the folders of whoever began it."""
        return [path for path in entries(self._made("parts")) if path.name.startswith(f"{key}{_OWNED_BY}")]

    def path_of(self, unit: Unit, name: str) -> Path:
        return self.folder / unit.folder / name

    def holds(self, unit: Unit) -> bool:
        """Whether the unit lies here, whole, with the content that is wanted."""
        if self._finds(unit):
            return True
        # A network filesystem may say for a minute that what another node made is not there; reading the
        # folders makes it look again.
        for folder in (self._made("units"), self.folder / unit.folder):
            with suppress(OSError), os.scandir(folder) as found:
                next(found, None)
        return self._finds(unit)

    def _finds(self, unit: Unit) -> bool:
        record = self.record(unit.key)
        if record is None or not record.unit.same_content(unit):
            return False
        try:
            return all(self._is_there(unit, file) for file in unit.files)
        except OSError:
            return False

    def _is_there(self, unit: Unit, file: RemoteFile) -> bool:
        path = f"{self.folder}/{unit.folder}/{file.name}"
        facts = os.lstat(path)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size != file.bytes:
            return False
        return self.grounds.trusts(path, facts) or self._is_vouched(path, file, facts)

    def _is_vouched(self, path: str, file: RemoteFile, facts: os.stat_result) -> bool:
        """Whether a file that somebody else laid here is the one that is wanted, by its digest: read once."""
        seen = facts.st_ino, facts.st_ctime_ns, file.digest
        if file.digest and self._sound.get(path) != seen and is_sound(Path(path), file.digest):
            self._sound[path] = seen
        return self._sound.get(path) == seen

    def other_versions(self, files: Sequence[RemoteFile], folder: str) -> list[str]:
        """The keys of units in this folder that hold one of these files with other content, or will."""
        wanted = {file.name: content_of(file) for file in files}
        coming = (
            unit_on_its_way(part, part.name.rpartition(_OWNED_BY)[0]) for part in entries(self._made("parts"))
        )
        return [
            unit.key
            for unit in (*self.units(), *filter(None, coming))
            if unit.folder == folder
            and any(wanted.get(file.name, content_of(file)) != content_of(file) for file in unit.files)
        ]

    def damaged(self, unit: Unit) -> list[str]:
        """Files of a published unit that are not what they were, by their digests: reads all of them."""
        return [file.name for file in unit.files if not is_sound(self.path_of(unit, file.name), file.digest)]

    def add(self, unit: Unit, record: Path) -> None:
        """The unit's files have their names: now others may know. `record` is moved to its place."""
        os.rename(record, self._record_path(unit.key))

    def touch(self, key: str) -> None:
        """It is used now: a hint to the evictor, not worth an error."""
        with suppress(OSError):
            os.utime(self._record_path(key), follow_symlinks=False)

    def record(self, key: str) -> Record | None:
        path = self._record_path(key)
        try:
            facts = path.lstat()
            # a record is never changed, only replaced; its successor may well get the same inode
            version = facts.st_ino, facts.st_ctime_ns
            known, unit = self._known.get(key, (None, None))
            if unit is None or known != version:
                data, facts = read_book(path, most=MOST_BYTES)
                unit = read_record(key, data)
                self._known[key] = (facts.st_ino, facts.st_ctime_ns), unit
            return Record(unit=unit, used_at=facts.st_mtime, owner=facts.st_uid)
        except (OSError, ValueError, RecursionError, StorageError):  # gone, torn, or none of ours
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
        for folder in entries(self._made("parts")):
            key = folder.name.rpartition(_OWNED_BY)[0]
            whole, rest = reserved_bytes(folder)
            before = found.get(key, (0, 0))
            if key:
                found[key] = (max(whole, before[0]), max(rest, before[1]))
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
        going = {f"{unit.folder}/{file.name}" for file in unit.files}
        folders = {path.rpartition("/")[0] for path in going}
        for path in going.difference(self._paths_near(unit.folder, staying)):
            self._unlink(path)
        for folder in folders:
            self._remove_empty(folder)
        hidden.unlink(missing_ok=True)

    def _unlink(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        may_stay = (PermissionError, IsADirectoryError) if self.grounds.shared else ()  # it is another user's
        with (
            suppress(FileNotFoundError, NotADirectoryError, StorageError, *may_stay),
            self.grounds.below(folder) as at,
        ):
            os.unlink(name, dir_fd=at)

    def _paths_near(self, folder: str, units: Sequence[Unit]) -> Iterator[str]:
        """The files of units that lie in this folder, above or below it."""
        for unit in units:
            if f"{unit.folder}/".startswith(f"{folder}/") or f"{folder}/".startswith(f"{unit.folder}/"):
                yield from (f"{unit.folder}/{file.name}" for file in unit.files)

    def leftovers(self) -> Iterator[str]:
        """Keys of units whose part, lease or half-removed record nobody may come back for."""
        # not of one that somebody is just making
        yield from (path.name for path in entries(self._made("leases")) if path.suffix != ".new")
        for path in entries(self._made("parts")):
            key = path.name.rpartition(_OWNED_BY)[0] or path.name
            if self._is_forgotten(key):
                yield key
        for path in entries(self._made("units")):
            if path.suffix == ".going":
                yield path.stem

    def clear(self, key: str) -> None:
        """Delete a part that nobody goes on with, and end a removal that was cut short. Under its lease."""
        if self._is_forgotten(key):
            self.give_up(key)
        hidden = self._record_path(key).with_suffix(".going")
        with suppress(OSError, ValueError, RecursionError, StorageError):
            unit = read_record(key, read_book(hidden, most=MOST_BYTES)[0])
            if self._record_path(key).exists():
                hidden.unlink()
            else:
                self.remove(unit, hidden, staying=self.units())

    def give_up(self, key: str) -> bool:
        """Delete what was on its way, under its lease; whether that could be done."""
        for path in (*self.parts_of(key), self._made("parts") / key):  # the second as it was once laid out
            remove_tree(path)
        return not self.parts_of(key)

    def _is_forgotten(self, key: str) -> bool:
        parts = self.parts_of(key) or [self._made("parts") / key]
        return self._record_path(key).exists() or min(map(_age_s, parts)) > _FORGOTTEN_S

    def _record_path(self, key: str) -> Path:
        return self._made("units") / f"{key}.json"

    def _made(self, name: str) -> Path:
        path = self._books.get(name)
        if path is None or not path.is_dir():
            path = self._books[name] = self.grounds.books(name)
        return path

    def _remove_empty(self, folder: str) -> None:
        with suppress(OSError, StorageError):  # not empty, or another was quicker
            while folder:
                folder, _, name = folder.rpartition("/")
                with self.grounds.below(folder) as above:
                    os.rmdir(name, dir_fd=above)


def _age_s(path: Path) -> float:
    """How long ago anything changed in a folder."""
    try:
        return time.time() - max(entry.lstat().st_mtime for entry in (path, *entries(path)))
    except OSError:  # it changes just now
        return 0.0
