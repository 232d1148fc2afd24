"""A proxy that stands before a real server and does to a connection what networks do.

Each request that asks for an object may meet a fault; everything else passes, and so do questions for a
manifest, which decide what the objects are. The faults are of the wire: connections are really reset, answers
really cut.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one request. With a status it is answered here; else by the server, and changed."""

    status: int = 0
    headers: tuple[str, ...] = ()
    body: bytes = b""
    cut_after: int | None = None  # bytes of the body, then the connection is reset
    silent_after: int | None = None  # bytes of the body, then nothing more comes
    flip_at: int | None = None  # this byte of the body is changed
    drop: tuple[str, ...] = ()  # headers of the request that the server does not see
    hide: tuple[str, ...] = ()  # headers of the answer that the client does not see
    before: Callable[[], None] = field(default=lambda: None)  # done when the request has come


class FaultyProxy:
    """Listens on the loopback; `faults` says what becomes of the n-th request for an object."""

    def __init__(self, upstream: str, faults: Callable[[int, str], Fault | None]) -> None:
        host, _, port = upstream.removeprefix("http://").partition(":")
        self._upstream, self._faults = (host, int(port)), faults
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._sockets: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept)]
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.requests: list[str] = []  # the heads of all requests for an object
        self.tunnels: list[str] = []  # the heads of requests for a way through
        self.sent: list[int] = []  # bytes of the body of each answer that was passed on
        self.connections = 0
        self.port = self._listener.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._threads[0].start()

    def close(self) -> None:
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for each in self._sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(client,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._open(client))
            server = stack.enter_context(self._open(socket.create_connection(self._upstream)))
            stack.enter_context(suppress(OSError, _HungUp))
            ahead = bytearray()
            while head := _read_head(client, ahead):
                if not self._relay(head, client, server):
                    return

    @contextmanager
    def _open(self, each: socket.socket) -> Iterator[socket.socket]:
        with each:
            with self._lock:
                self._sockets.add(each)
            try:
                yield each
            finally:
                with self._lock:
                    self._sockets.discard(each)

    def _relay(self, head: str, client: socket.socket, server: socket.socket) -> bool:
        """Pass on one request and its answer; False when the connection is of no more use."""
        if head.startswith("CONNECT "):
            self.tunnels.append(head)
            client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            _tunnel(client, server)
            return False
        asks = head.partition("\r\n")[0]
        if not asks.startswith("GET ") or "list-type=" in asks or "/manifest.json " in asks:
            server.sendall(_with(head, "Connection: close").encode("latin-1"))
            while data := server.recv(1 << 16):
                client.sendall(data)
            return False
        with self._lock:
            number = len(self.requests)
            self.requests.append(head)
        fault = self._faults(number, head) or Fault()
        fault.before()
        if fault.status:
            length = () if "chunked" in str(fault.headers) else (f"Content-Length: {len(fault.body)}",)
            said = "".join(f"{line}\r\n" for line in (*fault.headers, *length))
            client.sendall(f"HTTP/1.1 {fault.status} Fault\r\n{said}\r\n".encode() + fault.body)
            return True
        return self._pass_on(_without(head, fault.drop), fault, client, server)

    def _pass_on(self, head: str, fault: Fault, client: socket.socket, server: socket.socket) -> bool:
        server.sendall(head.encode("latin-1"))
        ahead = bytearray()
        answer = _read_head(server, ahead)
        left = int(_header(answer, "content-length"))
        client.sendall(_without(answer, fault.hide).encode("latin-1"))
        stop = min(n for n in (fault.cut_after, fault.silent_after, left) if n is not None)
        sent = 0
        while sent < stop:
            data = bytes(ahead) or server.recv(min(1 << 16, left - sent))
            ahead.clear()
            client.sendall(_flipped(data, fault.flip_at, sent)[: stop - sent])
            sent += len(data)
        self.sent.append(min(sent, stop))
        if fault.silent_after is not None:
            self._closing.wait()
        if fault.cut_after is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        return True


@contextmanager
def faulty(upstream: str, faults: Callable[[int, str], Fault | None]) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(upstream, faults)
    try:
        yield proxy
    finally:
        proxy.close()


def _tunnel(one: socket.socket, other: socket.socket) -> None:
    """Pass bytes both ways until one side ends."""
    way = {one: other, other: one}
    while True:
        for ready in select.select([one, other], [], [])[0]:
            data = ready.recv(1 << 16)
            if not data:
                return
            way[ready].sendall(data)


class _HungUp(Exception):
    """The other side is gone."""


def _read_head(source: socket.socket, ahead: bytearray) -> str:
    """The head; what follows it is left in `ahead`. Nothing if the connection ended before it."""
    while (end := ahead.find(b"\r\n\r\n")) < 0:
        data = source.recv(1 << 16)
        if not data:
            if ahead:
                raise _HungUp
            return ""
        ahead += data
    head = ahead[: end + 4].decode("latin-1")
    del ahead[: end + 4]
    return head


def _header(head: str, name: str) -> str:
    lines = (line.partition(":") for line in head.split("\r\n")[1:])
    return next((value.strip() for key, _, value in lines if key.lower() == name), "0")


def _without(head: str, names: tuple[str, ...]) -> str:
    lines = head.split("\r\n")
    return "\r\n".join(line for line in lines if line.partition(":")[0].lower() not in names)


def _flipped(data: bytes, flip_at: int | None, sent: int) -> bytes:
    at = -1 if flip_at is None else flip_at - sent
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if 0 <= at < len(data) else data


def _with(head: str, line: str) -> str:
    return head[:-2] + f"{line}\r\n\r\n"
