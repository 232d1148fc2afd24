"""A gate before a real server that can be shut: connections are refused, or swallowed as by a black hole, or
deletions are denied, while the server behind it goes on."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

DENIED = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Gate:
    """Listens on the loopback. `mode`: "open", "shut" (every connection is reset), "hole" (it is taken, and
    nothing ever comes back), "keep" (who asks to delete is denied)."""

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.removeprefix("http://").partition(":")
        self._upstream = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self.mode = "open"
        self.denied = 0
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads[0].start()

    def close(self) -> None:
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(self._upstream) as server:
            way = {client: server, server: client}
            while not self._closing.is_set() and self.mode != "shut":
                for ready in select.select([*way], [], [], 0.05)[0]:
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    if ready is client and self._denies(data):
                        client.sendall(DENIED)
                        return
                    if self.mode != "hole":
                        way[ready].sendall(data)

    def _denies(self, data: bytes) -> bool:
        asks = data.partition(b"\r\n")[0]
        denied = self.mode == "keep" and (asks.startswith(b"DELETE ") or b"?delete" in asks)
        self.denied += denied
        return denied


@contextmanager
def gate_before(upstream: str) -> Iterator[Gate]:
    gate = Gate(upstream)
    try:
        yield gate
    finally:
        gate.close()
