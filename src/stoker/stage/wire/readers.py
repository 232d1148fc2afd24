"""Range reads: one run of bytes of one file, from a mounted filesystem, the web, or obstore.

A reader is opened, read by one thread until its run is over, and ended; another thread may interrupt it.
"""

from __future__ import annotations

import errno
import os
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

from stoker.errors import DeniedError
from stoker.stage.origins.address import AddressBook
from stoker.stage.wire.answers import (
    changed,
    check_encoding,
    check_facts,
    is_etag,
    pin_line,
    range_line,
    refuse,
    says_version,
    version_of,
)
from stoker.stage.wire.client import Client, Exchange
from stoker.stage.wire.heads import Answer
from stoker.stage.wire.http import Address, NetworkError
from stoker.storage import is_local, local_path, named_errors

if TYPE_CHECKING:
    from stoker.stage.origins.origin import RemoteFile

_OBJECT_STORES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
# A server of files that came back: what was open is not, and opening it again helps.
_PASSING = frozenset((errno.ESTALE, errno.ETIMEDOUT))


class Reader(Protocol):
    """Bytes in their order, from where the run begins."""

    def read_into(self, view: memoryview) -> int: ...
    def finish(self) -> bool: ...
    def interrupt(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Source:
    """A file, and what has been learned of it on the way: where it is, its version, whether it has ranges."""

    file: RemoteFile
    address: Address
    version: str = ""
    is_settled: bool = False  # the first answer is in: the version is known, and whether ranges work
    has_ranges: bool = True
    was_renewed: bool = False

    def __post_init__(self) -> None:
        self.version = self.version or self.file.version
        self.is_settled = not self.on_the_web or self._is_known
        self.has_ranges = self.has_ranges and not self.needs_one_answer

    @property
    def _is_known(self) -> bool:
        """Whether a first answer has nothing to tell: an object store has ranges, and leads nowhere else."""
        is_object = self.file.url.partition("://")[0] in _OBJECT_STORES
        return is_object and bool(self.file.digest or is_etag(self.version))

    @property
    def needs_one_answer(self) -> bool:
        """Whether nothing would show that two answers are of two versions of the file."""
        return self.is_doubtful and not self.file.version

    @property
    def is_doubtful(self) -> bool:
        """Whether only what a plain web server says of a file tells its versions apart. An object store heeds
        the condition that each request carries, and shows no object that is being written."""
        return self.file.url.startswith(("http://", "https://")) and not self.file.digest

    @property
    def on_the_web(self) -> bool:
        return self.address.url.startswith(("http://", "https://"))


def read_some(source: Source, reader: Reader, view: memoryview) -> int:
    """Fill the view, or less of it if that is all that came before the connection failed."""
    count = reader.read_into(view)
    if not count:
        raise changed(source.file.url, "the server's answer is too short")
    return count


def read_whole(source: Source, reader: Reader, view: memoryview) -> None:
    got = 0
    while got < len(view):
        got += read_some(source, reader, view[got:])


def finish(source: Source, reader: Reader) -> None:
    """What was asked for is read: a server that said no length may have more."""
    if not reader.finish():
        raise changed(source.file.url, "the server's answer is too long")


def begin(source: Source, start: int, stop: int, *, client: Client, book: AddressBook) -> Reader:
    """Ask for these bytes. `hear` comes next: until then a server need not have answered."""
    if is_local(source.address.url):
        return LocalReader(source.file, start)
    if not source.on_the_web:
        return StoreReader(source, start, book)
    wanted = range_line(start, stop) if _needs_range(source, start, stop) else ""
    return Exchange(client, source.address, headers=wanted + pin_line(source.version))


def hear(source: Source, reader: Reader, start: int, stop: int) -> None:
    """Read the head of a server's answer and learn from it; the body is what remains to be read. It is
    the whole file from its beginning where a server turns out to have no ranges."""
    if not isinstance(reader, Exchange):
        return
    file, answer = source.file, reader.answer()
    if answer.status not in (200, 206):
        refuse(answer, reader.text(), url=file.url)
    _check_version(source, answer, start)
    if source.address == reader.asked:  # else it was renewed meanwhile
        source.address = reader.address  # ask there directly next time
    if answer.status == 200 and _needs_range(source, start, stop):
        source.has_ranges = False
    if not source.is_settled:
        source.version = _pinned(source.version, version_of(answer))
        source.is_settled = True


def renew(source: Source, asked: Address, error: DeniedError, *, book: AddressBook) -> NoReturn:
    """The signature of the address that was asked may have run out, or a redirect's: ask once more from
    the beginning, unless another lane has seen to that."""
    if source.address == asked:
        if source.was_renewed:
            raise error
        source.was_renewed = True
        source.address = book.look_up([source.file.url])[source.file.url]
    raise NetworkError("the address was renewed")


def confirm(source: Source, *, client: Client) -> None:
    """Ask once more, when all bytes are here: a file that was written to while its server sent it is another
    now, although each answer said the same."""
    with closing(Exchange(client, source.address, headers=range_line(0, 1))) as exchange:
        answer = exchange.answer()
        if answer.status in (200, 206):
            _check_version(source, answer, 0)


def _check_version(source: Source, answer: Answer, start: int) -> None:
    file = source.file
    if source.is_doubtful:
        check_encoding(answer, url=file.url)
    check_facts(answer, url=file.url, bytes=file.bytes, version=source.version, start=start)
    if source.is_doubtful and source.version and not says_version(answer, source.version):
        raise changed(file.url, "the server does not say any more which version it sends")


def _needs_range(source: Source, start: int, stop: int) -> bool:
    """A whole file is asked for without a range, which any server can answer."""
    return source.has_ranges and (start > 0 or stop < source.file.bytes)


def _pinned(known: str, said: str) -> str:
    """The version to insist on: an ETag we came for, or else what the first answer says; it was given
    for the time of change that we came for, and an ETag tells two changes within a second apart."""
    return said if is_etag(said) and not is_etag(known) else known or said


class LocalReader:
    """Bytes of a file on a mounted filesystem. Any thread may read another run of the same file."""

    def __init__(self, file: RemoteFile, start: int) -> None:
        self._file, self._at = file, start
        self._path = local_path(file.url)
        with named_errors("read", self._path):
            self._handle = os.open(
                self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            )  # a FIFO has no size
        try:
            self._check()
        except BaseException:
            os.close(self._handle)
            raise

    def read_into(self, view: memoryview) -> int:
        got = 0
        while got < len(view):
            count = self._read(view[got:])
            if not count:
                raise changed(self._file.url, f"it ends at byte {self._at:,} of {self._file.bytes:,}")
            got += count
            self._at += count
        self._check()
        return got

    def finish(self) -> bool:
        return True

    def interrupt(self) -> None:
        """A read of a mounted filesystem ends when it ends."""

    def close(self) -> None:
        os.close(self._handle)

    def _read(self, view: memoryview) -> int:
        try:
            return os.preadv(self._handle, [view], self._at)
        except OSError as error:
            if error.errno in _PASSING:
                raise NetworkError(f"{self._path}: {error.strerror}") from error
            with named_errors("read", self._path):
                raise

    def _check(self) -> None:
        """The file must still be what was asked for: a slice counts only if it was so after the read."""
        with named_errors("read", self._path):
            facts = os.fstat(self._handle)
        if facts.st_size != self._file.bytes:
            raise changed(self._file.url, f"it has {facts.st_size:,} bytes now and had {self._file.bytes:,}")
        if self._file.version and self._file.version != str(facts.st_mtime_ns):
            raise changed(self._file.url, "it was written to")


class StoreReader:
    """Bytes of an object through obstore, a request a slice: for stores that cannot sign a URL."""

    def __init__(self, source: Source, start: int, book: AddressBook) -> None:
        self._store, self._path = book.store(source.file.url)
        self._at, self._version = start, source.version

    def read_into(self, view: memoryview) -> int:
        data = self._store.read_range(self._path, self._at, len(view), version=self._version)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def finish(self) -> bool:
        return True

    def interrupt(self) -> None:
        """A slice is short enough to wait for."""

    def close(self) -> None:
        """Nothing is held between two slices."""
