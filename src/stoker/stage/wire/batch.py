"""HTTP pipelining: many small files, a lane sends the next requests before it has read the first answer.

So the way to a distant server and back is paid once for all requests under way, without a thread for
each. At 30 ms a request, 800 files came in 1.2 s; four threads with a request each would need 6 s.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from stoker.errors import DeniedError
from stoker.stage.wire.answers import Busy
from stoker.stage.wire.flight import FILE_BYTES, Flight, can_fly, take_flight
from stoker.stage.wire.http import NetworkError
from stoker.stage.wire.readers import Reader, Source, begin, finish, hear, read_whole, renew
from stoker.stage.wire.transfer import Abandoned, Course, Lane, Means

if TYPE_CHECKING:
    from stoker.stage.origins.origin import RemoteFile

_FILES_A_TURN = 1024  # after so many a lane sees whether another transfer waits

Landed = tuple["RemoteFile", memoryview]  # a small file and all of its bytes
_Asked = tuple[Source, Reader]


class BatchTransfer:
    """Whole small files. `take` and `is_over` are called with the lock held, what `take` gives without."""

    def __init__(
        self,
        files: Sequence[RemoteFile],
        *,
        deliver: Callable[[Sequence[Landed]], None],
        on_bytes: Callable[[int], None],
        means: Means,
    ) -> None:
        self.active = 0
        self.course = Course(f"{files[0].url} and {len(files) - 1:,} more", means)
        addresses = means.book.look_up([file.url for file in files])
        sources = (Source(file, addresses[file.url]) for file in files)
        self._pending = deque(sorted(sources, key=lambda source: source.file.bytes > FILE_BYTES))
        self._is_plain = not means.bucket.rate  # a flight is not slowed down on its way
        self._deliver, self._on_bytes, self._means = deliver, on_bytes, means

    @property
    def is_over(self) -> bool:
        return not self.active and (not self._pending or self.course.error is not None)

    def take(self, others: int) -> Callable[[Lane], None] | None:
        if not self._pending or not self._wants_more(self._pending[0]):
            return None
        self._means.company.lanes += 1
        return self._run

    def _run(self, lane: Lane) -> None:
        try:
            self._bring(lane)
        finally:
            with self._means.lock:
                self._means.company.lanes -= 1

    def _bring(self, lane: Lane) -> None:
        while self._is_plain and (sources := take_flight(self._pending, self._means.client)):
            try:
                self._fly(sources, lane)
            finally:
                self._pending.extend(sources)  # what is left of them
        self._bring_singly(lane)

    def _fly(self, sources: list[Source], lane: Lane) -> None:
        """Bring these files together; what has come is taken off the list."""
        flight = Flight(sources, client=self._means.client)
        self._call_others(sources[0])
        self.course.enter(flight)
        try:
            landed = flight.run(lane)
        finally:
            self.course.leave(flight)
        if self.course.error:
            raise Abandoned
        if flight.is_odd:
            self._is_plain = False
        if landed:
            self._deliver([(source.file, data) for source, data in landed])
            arrived = {id(source) for source, _ in landed}
            sources[:] = [source for source in sources if id(source) not in arrived]
            self._landed(sum(len(data) for _, data in landed))

    def _bring_singly(self, lane: Lane) -> None:
        flight: deque[_Asked] = deque()
        company = self._means.company
        try:
            for source in self._turn():
                flight.append((source, self._ask(source)))
                self._call_others(source)
                while len(flight) >= company.depth(near=self._is_near(source)):
                    self._receive(*flight.popleft(), lane)
            while flight:
                self._receive(*flight.popleft(), lane)
        except (NetworkError, Busy):
            while flight:  # the other answers are on their way and may be good
                with suppress(NetworkError, Busy):
                    self._receive(*flight.popleft(), lane)
            raise
        finally:
            for _, reader in flight:
                self.course.leave(reader)

    def _call_others(self, source: Source) -> None:
        if self._is_near(source):
            return
        with self._means.lock:  # that it is far shows only now
            self._means.pace.go_far()
            if self._wants_more(source):
                self._means.wake()

    def _wants_more(self, source: Source) -> bool:
        flies = self._is_plain and can_fly(source, self._means.client)
        return self._means.company.wants_more(near=self._is_near(source), flies=flies)

    def _is_near(self, source: Source) -> bool:
        return source.on_the_web and self._means.client.is_near(source.address)

    def _turn(self) -> Iterator[Source]:
        with suppress(IndexError):  # another lane took the last one
            for _ in range(_FILES_A_TURN):
                yield self._pending.popleft()

    def _ask(self, source: Source) -> Reader:
        means = self._means
        try:
            reader = begin(source, 0, source.file.bytes, client=means.client, book=means.book)
        except BaseException:
            self._pending.append(source)
            raise
        self.course.enter(reader)
        return reader

    def _receive(self, source: Source, reader: Reader, lane: Lane) -> None:
        try:
            self._deliver([(source.file, self._read(source, reader, lane))])
        except BaseException as error:
            self._pending.append(source)
            if isinstance(error, DeniedError):
                renew(source, source.address, error, book=self._means.book)
            raise
        finally:
            self.course.leave(reader)
        if self._means.company.landed(source.file.bytes, now=time.monotonic()):
            self._means.wake()
        self._landed(source.file.bytes)

    def _landed(self, count: int) -> None:
        self.course.landed(count)
        self._on_bytes(count)

    def _read(self, source: Source, reader: Reader, lane: Lane) -> memoryview:
        count = source.file.bytes
        self.course.wait_for_rate(count)
        hear(source, reader, 0, count)
        view = lane.buffer(count)
        read_whole(source, reader, view)
        finish(source, reader)
        if self.course.error:
            raise Abandoned
        return view
