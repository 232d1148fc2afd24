"""Trust in a cache folder: whose it is, who else may write to it, and ways in that follow no link.

A cache folder is other people's input. It is *private* by default: ours (or root's), and nobody else may
write to it; what was planted before that is not believed either. Or it is *shared* (`Cache(shared=True)`),
by a group whose members do not trust each other: then its owner and root are trusted, every folder in it has
the sticky bit, so that nobody can take away what is another's, and what another wrote is believed only by
its digest.

Nothing in here follows a link below the cache's folder, so nothing outside of it can be written or deleted,
whatever its records say and whoever swaps a folder meanwhile: every step is taken from an open folder.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import StorageError, UsageError
from stoker.storage import named_errors

BOOKS = ".stoker"
NAMES = ("units", "parts", "leases", "pins", "wants")  # of the folders in there
_NAME_BYTES = 255  # what Linux filesystems allow for one name
_PRIVATE, _SHARED = 0o700, 0o3770  # of the cache's own folder; 3: setgid and sticky
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# without O_NONBLOCK a FIFO in the place of a file would be waited for
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, kw_only=True, slots=True)
class Grounds:
    """A cache folder, and who is trusted in it."""

    folder: Path
    trusted: frozenset[int]  # user ids whose books and files are believed as they are
    mine: frozenset[int]  # under which our own files appear: a server may give them to nobody
    shared: bool = False

    @classmethod
    def of(cls, folder: Path, *, shared: bool = False) -> Grounds:
        """The folder, made if need be; refused if others could write where they must not."""
        _make(folder, _SHARED if shared else _PRIVATE)
        _check_link(folder)
        facts = folder.stat()
        mine = frozenset({os.geteuid()}) if facts.st_uid == os.geteuid() else ids_in(folder)
        if shared:
            _check_shared(folder, facts)
            grounds = cls(folder=folder, trusted=mine | {0, facts.st_uid}, mine=mine, shared=True)
            for name in NAMES:  # by somebody who is trusted, before any other can
                grounds.books(name)
            return grounds
        _check_private(folder, facts, mine | {0})
        return cls(folder=folder, trusted=mine | {0}, mine=mine)

    @classmethod
    def seen(cls, folder: Path) -> Grounds:
        """A folder of anybody's, to look at."""
        facts, me = folder.stat(), os.geteuid()
        shared = bool(facts.st_mode & 0o020)
        return cls(
            folder=folder, trusted=frozenset({me, 0, facts.st_uid}), mine=frozenset({me}), shared=shared
        )

    def books(self, name: str) -> Path:
        """One of the folders with our records: real, and of somebody who is trusted."""
        path = self.folder / BOOKS / name
        for each in (path.parent, path):
            with named_errors("use the cache's books", each):
                self._make_one(each)
                facts = each.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid not in self.trusted:
                raise StorageError(
                    f"{each} is not a folder of {self._whom()}, and is not trusted",
                    hint=f"remove it; or let the owner of {self.folder} be the first to stage there"
                    if self.shared
                    else "remove it, or choose another cache folder",
                )
        return path

    @contextmanager
    def below(self, folder: str) -> Iterator[int]:
        """An open folder below the cache's, reached without following a link; FileNotFoundError if it is not
        there."""
        with self._walked(folder, lambda part, at: None) as handle:
            yield handle

    @contextmanager
    def made(self, folder: str) -> Iterator[int]:
        """The same; what is missing of it is made."""
        with self._walked(folder, self._make_part) as handle:
            yield handle

    def trusts(self, path: str, facts: os.stat_result) -> bool:
        """Whether only those who are trusted can have put this file under this name: whoever owns a folder
        may also give another's file another name."""
        if facts.st_uid not in self.trusted:
            return False
        above = Path(path).relative_to(self.folder).parents if self.shared else ()
        return all(os.lstat(self.folder / each).st_uid in self.trusted for each in above)

    def is_removable(self, owner: int) -> bool:
        """Whether the kernel lets us remove what this user made here."""
        return not self.shared or owner in self.mine or os.geteuid() in (0, self.folder.stat().st_uid)

    @contextmanager
    def _walked(self, folder: str, step: Callable[[str, int], None]) -> Iterator[int]:
        handle = os.open(self.folder, _FOLDER_FLAGS & ~os.O_NOFOLLOW)
        try:
            for part in parts_below(folder):
                try:
                    step(part, handle)
                    before, handle = handle, os.open(part, _FOLDER_FLAGS, dir_fd=handle)
                except OSError as error:
                    raise _no_way(error, part, handle, self.folder / folder) from error
                os.close(before)
            yield handle
        finally:
            os.close(handle)

    def _make_part(self, part: str, handle: int) -> None:
        with suppress(FileExistsError):
            os.mkdir(part, 0o755, dir_fd=handle)
            if self.shared:  # whatever the umask says
                os.chmod(part, _SHARED, dir_fd=handle)

    def _make_one(self, path: Path) -> None:
        with suppress(FileExistsError):
            path.mkdir(mode=0o755)
            if self.shared:
                path.chmod(_SHARED)

    def _whom(self) -> str:
        return f"users {', '.join(map(str, sorted(self.trusted)))}"


def own_folder(path: Path, *, hint: str) -> Path:
    """A folder of this user's in a place where anybody may make one: what lies in it is believed."""
    with named_errors("make the cache folder", path):
        path.mkdir(mode=0o700, exist_ok=True)
        facts = path.lstat()
    if facts.st_uid != os.getuid() or not stat.S_ISDIR(facts.st_mode):
        raise StorageError(f"{path} belongs to somebody else", hint=hint)
    return path


def parts_below(folder: str) -> list[str]:
    """The parts of a path below the cache's folder; a ValueError where it is not below, or in the books, or
    where no filesystem could have it."""
    parts = folder.split("/") if folder else []
    are_names = all(part not in ("", ".", "..") and "\0" not in part for part in parts)
    if not are_names or parts[:1] == [BOOKS] or any(len(os.fsencode(part)) > _NAME_BYTES for part in parts):
        raise ValueError(f"{folder!r} is no folder for staged files")
    return parts


def read_book(path: Path, *, most: int, owners: frozenset[int] | None = None) -> tuple[bytes, os.stat_result]:
    """A small plain file that others may have laid here: no link, no FIFO, nothing larger than it can be, and
    of one of these users. FileNotFoundError if it is not there, ValueError if it is none of ours."""
    try:
        handle = os.open(path, _FILE_FLAGS)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise ValueError(f"{path} is no plain file") from error
        raise
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > most:
            raise ValueError(f"{path} is no plain file of at most {most:,} bytes")
        if owners is not None and facts.st_uid not in owners:
            raise ValueError(f"{path} belongs to user {facts.st_uid}")
        return _read_all(handle, most), facts
    finally:
        os.close(handle)


def replace_file(folder: int, name: str, data: bytes) -> None:
    """A file in an open folder, whole or not at all."""
    temporary = f".{secrets.token_hex(8)}.tmp"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=folder)
    try:
        with open(handle, "wb") as file:
            file.write(data)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(temporary, dir_fd=folder)
        raise


def remove_tree(path: Path) -> None:
    """Delete what lies in the books under this name, as far as we may; links are removed, not followed."""
    with suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):  # rmtree would wait for whoever writes to a FIFO
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _read_all(handle: int, most: int) -> bytes:
    pieces, left = [], most
    while left and (piece := os.read(handle, min(left, 1 << 20))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _no_way(error: OSError, part: str, handle: int, where: Path) -> Exception:
    if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(part, handle):
        return StorageError(
            f"{part!r} on the way to {where} is a link, and nothing is staged through links",
            hint="remove the link; to keep staged files elsewhere, name that folder with --cache",
        )
    return type(error)(error.errno, error.strerror, str(where))


def _is_link(part: str, handle: int) -> bool:
    with suppress(OSError):
        return stat.S_ISLNK(os.stat(part, dir_fd=handle, follow_symlinks=False).st_mode)
    return False


def _make(folder: Path, mode: int) -> None:
    """Make the cache's own folder if it is not there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=mode & 0o777)
        folder.chmod(mode)


def ids_in(folder: Path) -> frozenset[int]:
    """Our own user ids there: a network filesystem may give what root makes to nobody."""
    ids = {os.geteuid()}
    with suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        ids.add(os.fstat(file.fileno()).st_uid)
    return frozenset(ids)


def _check_link(folder: Path) -> None:
    """In a place where anybody may make links, one to a folder of ours is a trap."""
    facts = folder.lstat()
    if stat.S_ISLNK(facts.st_mode) and facts.st_uid not in (0, os.geteuid()):
        raise UsageError(
            f"the cache folder {folder} is a link that user {facts.st_uid} made",
            hint="name the folder that you mean",
        )


def _check_private(folder: Path, facts: os.stat_result, owners: frozenset[int]) -> None:
    mode = stat.S_IMODE(facts.st_mode)
    if facts.st_uid not in owners:
        raise UsageError(
            f"the cache folder {folder} belongs to user {facts.st_uid}, not to you",
            hint="choose a folder of yours; if its owner is to be trusted, share it: --shared, shared=True",
        )
    if mode & 0o022:
        raise UsageError(
            f"others may write to the cache folder {folder} (mode {mode:o}), and what lies there is believed",
            hint=f"name a folder in it, which is then made for you alone ({folder}/stoker), or chmod go-w "
            f"{folder}; or share it with its group: chmod 3770 {folder}, then --shared",
        )


def _check_shared(folder: Path, facts: os.stat_result) -> None:
    mode = stat.S_IMODE(facts.st_mode)
    if mode & 0o002:
        raise UsageError(
            f"everybody may write to the cache folder {folder} (mode {mode:o})",
            hint=f"share it with a group only: chgrp GROUP {folder}; chmod 3770 {folder}",
        )
    if mode & 0o020 and mode & 0o3000 != 0o3000:
        raise UsageError(
            f"members of its group may take away each other's files in {folder} (mode {mode:o}): it lacks "
            "the setgid or the sticky bit",
            hint=f"chmod 3770 {folder}",
        )
