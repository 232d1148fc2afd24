"""Bulk fetch in C: small files asked for together, over connections of their own, without Python's lock.

Only what is as plain as can be comes this way: whole files, from a server that answers 200 with the length
that is expected. For the rest, and where there is no compiler, there is `BatchTransfer._bring_singly`.
"""

from __future__ import annotations

import select
import time
from collections import deque
from typing import TYPE_CHECKING

from stoker.native import native
from stoker.stage.wire.answers import is_etag, pin_line
from stoker.stage.wire.http import LATE
from stoker.stage.wire.secure import can_lend_tls

if TYPE_CHECKING:
    from stoker.stage.wire.client import Client
    from stoker.stage.wire.readers import Source
    from stoker.stage.wire.transfer import Lane

FILE_BYTES = 256 << 10  # above this a turn of the interpreter is nothing beside the transfer
_FLIGHT_BYTES = 2 << 20  # what a kill may cost of a lane; 4 MiB were no quicker
_NEAR_FLIGHT_BYTES = 1 << 20  # where there is nothing to wait for, less will do
_FLIGHT_FILES = 256
LINES = 32  # as many requests are under way: of files of 64 KiB, all of a flight


class Flight:
    """A few files on their way: asked for when it is made, heard later. One thread's, but any may interrupt
    it."""

    def __init__(self, sources: list[Source], *, client: Client) -> None:
        self.sources = sources
        self.is_odd = False  # what came is not as expected, or nothing did: for others to understand
        self.first_byte_s = 0.0  # from the question to the beginning of the first answer
        self._client, self._endpoint = client, client.endpoint(sources[0].address)
        self._connections = client.connect_all(self._endpoint, min(LINES, len(sources)))
        try:
            self._lines = [connection.lend() for connection in self._connections]
            self._asks = list(map(self._ask, sources))
            self._asked_at = time.monotonic()
            self._asked = native("stage.wire._flight").ask(self._lines, self._asks)
        except BaseException:
            self.close()
            raise

    def is_answered(self, *, within_s: float) -> bool:
        """Whether the first answer begins in time."""
        waiting = select.poll()
        waiting.register(self._lines[0][0], select.POLLIN)
        return bool(waiting.poll(1e3 * within_s))

    def hear(self, lane: Lane) -> list[tuple[Source, memoryview]]:
        """Read all answers: the files that came, in memory that is used again."""
        room = sum(map(slot_bytes, self.sources))
        memory = lane.buffer(room)
        began = time.monotonic()
        places, is_open, waited_s = native("stage.wire._flight").hear(
            self._lines, self._asks, self._asked, lane.address, room
        )
        self.first_byte_s = began + waited_s - self._asked_at
        for connection, usable in zip(self._connections, is_open, strict=True):
            connection.served(reusable=bool(usable))
        self.is_odd = min(places) <= LATE or max(places) < 0
        return [
            (source, memory[place : place + source.file.bytes])
            for source, place in zip(self.sources, places, strict=True)
            if place >= 0
        ]

    def _ask(self, source: Source) -> tuple[bytes, int, bytes]:
        request = self._connections[0].request(source.address, pin_line(source.version))
        return request, source.file.bytes, source.version.encode() if is_etag(source.version) else b""

    def interrupt(self) -> None:
        for connection in self._connections:
            connection.interrupt()

    def close(self) -> None:
        for connection in self._connections:
            self._client.leave(self._endpoint, connection)


def take_flight(pending: deque[Source], client: Client, *, near: bool) -> list[Source]:
    """As many of the next files as travel together; none if the next cannot."""
    taken: list[Source] = []
    room = _NEAR_FLIGHT_BYTES if near else _FLIGHT_BYTES
    while len(taken) < _FLIGHT_FILES:
        try:
            source = pending.popleft()
        except IndexError:  # another lane took the last one
            break
        room -= slot_bytes(source) if can_fly(source, client) else room + 1
        if room < 0 or (taken and taken[0].address.root != source.address.root):
            pending.appendleft(source)
            break
        taken.append(source)
    return taken


def can_fly(source: Source, client: Client) -> bool:
    if not source.on_the_web or source.file.bytes > FILE_BYTES or native("stage.wire._flight") is None:
        return False
    endpoint = client.endpoint(source.address)
    return endpoint.scheme == "http" or (not endpoint.proxy and can_lend_tls())


def slot_bytes(source: Source) -> int:
    head: int = native("stage.wire._flight").HEAD
    return head + source.file.bytes
