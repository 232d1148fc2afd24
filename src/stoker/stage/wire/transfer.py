"""Range transfers and their retries: the missing runs of one file, by as many lanes as there are.

The runs are cut into ranges as lanes ask for them; what a lane could not bring goes back and is asked
for again, from the slice where it ended. The first answer is waited for before others ask: it says which
version of the file this is and whether the server has ranges at all.

Retries: a transfer's `Course` owns them, nobody else in here. `http` and `client` raise NetworkError,
`answers` raises Busy; the lane's loop (`wire.Wire._run`) hands both to `Course.trouble`, which waits
(`pace.backoff_s`, or what the server asks for), shrinks the congestion window, and fails after `patience_s`
without progress. Any other error ends the transfer. A refused signature is renewed once and counts as a
NetworkError (`readers.renew`); questions before a transfer have a few tries of their own (`origins.origin`).
"""

from __future__ import annotations

import ctypes
import mmap
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from stoker.errors import DeniedError, StorageError
from stoker.redact import redact_text
from stoker.stage.origins.address import AddressBook
from stoker.stage.wire.answers import Busy
from stoker.stage.wire.client import Client, Exchange
from stoker.stage.wire.hosts import Host, Hosts
from stoker.stage.wire.http import NetworkError, NetworkTimeout
from stoker.stage.wire.pace import SLICE_BYTES, Bucket, Pace, Pieces, backoff_s
from stoker.stage.wire.readers import (
    Reader,
    Source,
    begin,
    confirm,
    finish,
    hear,
    read_some,
    read_whole,
    renew,
)

if TYPE_CHECKING:
    from stoker.stage.origins.origin import RemoteFile

Span = tuple[int, int]

_MOVES_BYTES = 64 << 10  # what comes between two failures: less of it is as good as nothing
_TELL_AFTER_S = 5.0


class Sink(Protocol):
    """Takes bytes as they come; called from the wire's threads, slices in any order. A slice has at most
    1 MiB and never crosses a 1 MiB boundary of the file; its memory is used again after the call."""

    def write(self, offset: int, data: memoryview) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Means:
    """What all transfers of a wire share; `lock` guards what their lanes share."""

    client: Client
    book: AddressBook
    hosts: Hosts
    bucket: Bucket
    patience_s: float
    wake: Callable[[], None]  # there may be work for one more lane
    tell: Callable[[str], None] = lambda text: None  # a person, what is being waited for
    lock: threading.RLock = field(default_factory=threading.RLock)


class Abandoned(NetworkError):
    """The transfer has failed elsewhere: nothing more is brought for it."""


class Lane:
    """A thread's own memory: used again for every slice."""

    def __init__(self) -> None:
        self.pieces = Pieces()
        self._map(SLICE_BYTES)

    def buffer(self, count: int) -> memoryview:
        if count > len(self._buffer):
            self._map(count)
        return self._buffer[:count]

    def _map(self, count: int) -> None:
        memory = mmap.mmap(-1, count)  # whole pages: O_DIRECT can write from it
        self._buffer = memoryview(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Held(Protocol):
    """What is read for a transfer, by one thread; another may interrupt it."""

    def interrupt(self) -> None: ...
    def close(self) -> None: ...


class Course:
    """How a transfer goes: who reads for it, when it last moved, when to try again, why it failed."""

    def __init__(self, name: str, means: Means, host: Host) -> None:
        self.error: BaseException | None = None
        self.ready_at = 0.0
        self._name, self._means, self._host = name, means, host
        self._tries = 0
        self._failing_since = self._told_at = 0.0
        self._moved_bytes = 0  # since the last trouble
        self._failed = threading.Event()
        self._readers: set[Held] = set()

    def landed(self, count: int) -> None:
        with self._means.lock:
            self._moved_bytes += count
            if self._moved_bytes >= _MOVES_BYTES:
                self._tries = 0
            if self._host.pace.landed(count, now=time.monotonic()):
                self._means.wake()

    def trouble(self, error: Exception) -> None:
        """A request failed: wait and try again, unless waiting has not helped for too long."""
        now = time.monotonic()
        if self.error:
            return  # it was interrupted
        # not since something last came: a job that was suspended meanwhile has not tried
        self._failing_since = self._failing_since if self._tries else now
        if now - self._failing_since > self._means.patience_s:
            self.fail(_out_of_patience(self._name, self._means.patience_s, error))
            return
        with self._means.lock:
            if isinstance(error, (Busy, NetworkTimeout)):
                self._host.slow_down(now=now)
            wait = backoff_s(self._tries, luck=random.random())
            self._tries, self._moved_bytes = self._tries + 1, 0
            self.ready_at = now + max(wait, error.after_s if isinstance(error, Busy) else 0.0)
        self._tell(error, now)

    def _tell(self, error: Exception, now: float) -> None:
        """Say that it is waited for, once that takes long: a mute server is no reason to be mute."""
        has_lasted = isinstance(error, NetworkTimeout) or now - self._failing_since > _TELL_AFTER_S
        if has_lasted and now - self._told_at > _TELL_AFTER_S:
            self._told_at = now
            self._means.tell(redact_text(f"{self._name}: {error}; asking again"))

    def fail(self, error: BaseException) -> None:
        """End it; the first reason is the one that is told."""
        with self._means.lock:
            self.error = self.error or error
            for reader in self._readers:
                reader.interrupt()
        self._failed.set()

    def wait_for_rate(self, count: int) -> None:
        with self._means.lock:
            wait = self._means.bucket.wait_s(count, now=time.monotonic())
        if wait:
            self._failed.wait(wait)

    def enter(self, reader: Held) -> None:
        with self._means.lock:
            self._readers.add(reader)
            if self.error:
                reader.interrupt()

    def leave(self, reader: Held) -> None:
        with self._means.lock:
            self._readers.discard(reader)
        reader.close()


class FileTransfer:
    """The missing runs of one file. `take` and `is_over` are called with the lock held, `run` without."""

    def __init__(
        self,
        file: RemoteFile,
        *,
        missing: Sequence[Span],
        sink: Sink,
        on_bytes: Callable[[int], None],
        means: Means,
    ) -> None:
        self.active = 0
        self._source = Source(file, means.book.look_up([file.url])[file.url])
        self.host = means.hosts.of(self._source.address)
        self.course = Course(file.url, means, self.host)
        self._pending = deque(missing)
        self._sink, self._on_bytes, self._means = sink, on_bytes, means

    @property
    def is_over(self) -> bool:
        return not self.active and (not self._pending or self.course.error is not None)

    def take(self, others: int) -> Callable[[Lane], None] | None:
        """The next range for a lane, if one more may work on this file; so many others are being brought."""
        alone = not self._source.is_settled or not self._source.has_ranges
        if not self._pending or (alone and self.active):
            return None
        span = self._cut(self.host.pace, 1 + others)
        return lambda lane: self._run(span, lane)

    def _cut(self, pace: Pace, files: int) -> Span:
        start, stop = self._pending.popleft()
        left = stop - start + sum(b - a for a, b in self._pending)
        end = start // SLICE_BYTES * SLICE_BYTES + pace.range_bytes(left, files=files)
        if end < stop:
            self._pending.appendleft((end, stop))
        return start, min(stop, end)

    def _run(self, span: Span, lane: Lane) -> None:
        at, stop = span
        try:
            with self._reading(at, stop) as reader:
                if not self._source.has_ranges:
                    self._put_back((at, stop))
                    at = stop
                    if self._source.needs_one_answer:
                        self._begin_anew()
                    self._stream(reader, lane)
                while at < stop:
                    end = min(stop, at + lane.pieces.size, (at // SLICE_BYTES + 1) * SLICE_BYTES)
                    self.course.wait_for_rate(end - at)
                    view, began = lane.buffer(end - at), time.monotonic()
                    count = reader.read_into(view) if at > span[0] else read_some(self._source, reader, view)
                    lane.pieces.took(count, time.monotonic() - began)
                    if not count:  # a proxy may give less than was asked for: the rest is asked for next
                        return
                    self._write(at, view[:count])
                    at += count
                finish(self._source, reader)
        finally:
            self._put_back((at, stop))

    def confirm(self) -> None:
        """All bytes are here. See whether the file still is the one that was asked for, where no digest will
        tell; a server that does not want to be asked again has said so before, or does not matter."""
        if self._source.is_doubtful:
            with suppress(NetworkError, Busy, DeniedError):
                confirm(self._source, client=self._means.client)

    def _begin_anew(self) -> None:
        """What came with an earlier answer may be of another version: nothing would show it."""
        with self._means.lock:
            self._pending = deque([(0, self._source.file.bytes)])

    def _stream(self, reader: Reader, lane: Lane) -> None:
        """The server sends all of the file whatever is asked for: take what is missing as it passes."""
        for start, end in slices(0, self._source.file.bytes):
            view = lane.buffer(end - start)
            self.course.wait_for_rate(end - start)
            read_whole(self._source, reader, view)
            for a, b in self._claim(start, end):
                self._write(a, view[a - start : b - start])

    @contextmanager
    def _reading(self, start: int, stop: int) -> Iterator[Reader]:
        source, asked, book = self._source, self._source.address, self._means.book
        reader = begin(source, start, stop, client=self._means.client, book=book)
        self.course.enter(reader)
        try:
            try:
                hear(source, reader, start, stop)
            except DeniedError as error:
                renew(source, asked, error, book=book)
            began = self._call_others(reader)
            yield reader
            with self._means.lock:
                self.host.pace.read(time.monotonic() - began)
        finally:
            self.course.leave(reader)

    def _call_others(self, reader: Reader) -> float:
        """An answer is in: others may ask now, and more of them if it took long. When that was."""
        with self._means.lock:
            if isinstance(reader, Exchange):
                self.host.pace.heard(reader.first_byte_s)
        self._means.wake()
        return time.monotonic()

    def _write(self, offset: int, view: memoryview) -> None:
        if self.course.error:
            raise Abandoned
        self._sink.write(offset, view)
        self._source.was_renewed = False
        self.course.landed(len(view))
        self._on_bytes(len(view))

    def _claim(self, start: int, stop: int) -> list[Span]:
        """What of this slice is missing; it is not any more."""
        with self._means.lock:
            claimed, self._pending = carve(self._pending, start, stop)
        return claimed

    def _put_back(self, span: Span) -> None:
        with self._means.lock:
            if span[0] < span[1]:
                self._pending.appendleft(span)


def slices(start: int, stop: int) -> Iterator[Span]:
    """Cut at every multiple of SLICE_BYTES."""
    while start < stop:
        end = min(stop, (start // SLICE_BYTES + 1) * SLICE_BYTES)
        yield start, end
        start = end


def carve(spans: Iterable[Span], start: int, stop: int) -> tuple[list[Span], deque[Span]]:
    """What of the spans lies within start and stop, and what lies outside."""
    inside, outside = [], deque[Span]()
    for a, b in spans:
        pieces = [(a, min(b, start)), (max(a, stop), b)]
        outside.extend((x, y) for x, y in pieces if x < y)
        if max(a, start) < min(b, stop):
            inside.append((max(a, start), min(b, stop)))
    return inside, outside


def _out_of_patience(name: str, patience_s: float, error: Exception) -> StorageError:
    return StorageError(
        f"{name} brought nothing for {patience_s:.0f} s: {error}",
        hint="check the network and the server, then run the same command again: it goes on where it ended",
    )
