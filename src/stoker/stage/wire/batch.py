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
from stoker.stage.wire.client import Exchange
from stoker.stage.wire.flight import FILE_BYTES, LINES, Flight, can_fly, take_flight
from stoker.stage.wire.http import NetworkError
from stoker.stage.wire.pace import PATIENT_S
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
        addresses = means.book.look_up([file.url for file in files])
        self.host = means.hosts.of(addresses[files[0].url])
        self.course = Course(f"{files[0].url} and {len(files) - 1:,} more", means, self.host)
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
        self.host.company.lanes += 1
        return self._run

    def _run(self, lane: Lane) -> None:
        try:
            self._bring(lane)
        finally:
            with self._means.lock:
                self.host.company.lanes -= 1

    def _bring(self, lane: Lane) -> None:
        self._fly(lane)
        self._bring_singly(lane)

    def _fly(self, lane: Lane) -> None:
        """Bring small files in flights, as many of them in the air as the way is long."""
        air: deque[Flight] = deque()
        try:
            while self._fill(air):
                if not air[0].is_answered(within_s=PATIENT_S):
                    with self._means.lock:
                        self.host.window.unanswered(now=time.monotonic())
                    self._call_others()
                    self._fill(air)
                flight = air.popleft()
                try:
                    self._land(flight, lane)
                finally:
                    self._end(flight)
        finally:
            for flight in air:  # not heard: their connections are closed
                self._end(flight)

    def _fill(self, air: deque[Flight]) -> bool:
        """Ask for more files, as far as is wise; whether any are in the air."""
        while self._is_plain and len(air) < self._most_flights():
            sources = take_flight(self._pending, self._means.client, near=not self.host.window.is_far)
            if not sources:
                break
            try:
                flight = Flight(sources, client=self._means.client)
            except BaseException:
                self._pending.extend(sources)
                raise
            self.course.enter(flight)
            air.append(flight)
        return bool(air)

    def _most_flights(self) -> int:
        window = self.host.window
        depth = self.host.company.depth(window.size, near=not window.is_far, flies=True)
        return max(1, depth // LINES)

    def _end(self, flight: Flight) -> None:
        self.course.leave(flight)
        self._pending.extend(flight.sources)  # what is left of them

    def _land(self, flight: Flight, lane: Lane) -> None:
        """Hear the answers of a flight; what has come is taken off its list."""
        landed = flight.hear(lane)
        if self.course.error:
            raise Abandoned
        self._heard(len(landed), flight.first_byte_s)
        if flight.is_odd:
            self._is_plain = False
        if landed:
            self._deliver([(source.file, data) for source, data in landed])
            arrived = {id(source) for source, _ in landed}
            flight.sources[:] = [source for source in flight.sources if id(source) not in arrived]
            self._landed(sum(len(data) for _, data in landed))

    def _heard(self, count: int, first_byte_s: float) -> None:
        with self._means.lock:
            self.host.window.landed(count, first_byte_s=first_byte_s, now=time.monotonic())
        self._call_others()

    def _bring_singly(self, lane: Lane) -> None:
        flight: deque[_Asked] = deque()
        try:
            for source in self._turn():
                flight.append((source, self._ask(source)))
                while len(flight) >= self._depth(source):
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

    def _depth(self, source: Source) -> int:
        return self.host.company.depth(self.host.window.size, near=self._is_near(source))

    def _call_others(self) -> None:
        with self._means.lock:  # that it is far shows only now
            if self._pending and self._wants_more(self._pending[0]):
                self._means.wake()

    def _wants_more(self, source: Source) -> bool:
        flies = self._is_plain and can_fly(source, self._means.client)
        return self.host.company.wants_more(near=self._is_near(source), flies=flies)

    def _is_near(self, source: Source) -> bool:
        return source.on_the_web and not self.host.window.is_far

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
        if self.host.company.landed(source.file.bytes, now=time.monotonic()):
            self._means.wake()
        self._landed(source.file.bytes)

    def _landed(self, count: int) -> None:
        self.course.landed(count)
        self._on_bytes(count)

    def _read(self, source: Source, reader: Reader, lane: Lane) -> memoryview:
        count = source.file.bytes
        self.course.wait_for_rate(count)
        hear(source, reader, 0, count)
        if isinstance(reader, Exchange):
            self._heard(1, reader.first_byte_s)
        view = lane.buffer(count)
        read_whole(source, reader, view)
        finish(source, reader)
        if self.course.error:
            raise Abandoned
        return view
