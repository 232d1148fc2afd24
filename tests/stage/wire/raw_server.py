"""A server on the loopback that answers with the very bytes it is given."""

from __future__ import annotations

import socket
import ssl
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


ADDRESS = "127.0.0.1"
HOST = {"127.0.0.1": "127.0.0.1", "::1": "[::1]"}


def plain(body: bytes, *, more: str = "") -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


class Server:
    """Answers on the loopback with the bytes it is given: the n-th time that a path is asked for. With a
    chain of certificates over TLS, and without a farewell when it closes, as many servers do."""

    chain: Path | None = None

    def __init__(self, answer: Callable[[str, int], tuple[bytes, bool] | None]) -> None:
        self._answer = answer
        family = socket.AF_INET6 if ":" in ADDRESS else socket.AF_INET
        self._listener = socket.create_server((ADDRESS, 0), backlog=128, family=family)
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        port = self._listener.getsockname()[1]
        self.url = f"https://localhost:{port}" if self.chain else f"http://{HOST[ADDRESS]}:{port}"
        self._context = _context(self.chain) if self.chain else None
        self.asked: Counter[str] = Counter()
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._open.append(client)
                self._threads.append(threading.Thread(target=self._serve, args=(client,)))
                self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            if not self._context:
                self._talk(client)
                return
            with self._context.wrap_socket(client, server_side=True) as secured:
                self._talk(secured)

    def _talk(self, client: socket.socket) -> None:
        with client.makefile("rb") as requests:
            while line := requests.readline().decode():
                while requests.readline().strip():
                    pass
                path = line.split()[1]
                self.asked[path] += 1
                answer = self._answer(path, self.asked[path])
                if answer is None:
                    requests.readline()  # nothing, until the other side gives up
                    return
                client.sendall(answer[0])
                if answer[1]:
                    return


def _context(chain: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, chain.with_suffix(".key"))
    return context


@contextmanager
def answering(answer: Callable[[str, int], tuple[bytes, bool] | None]) -> Iterator[Server]:
    with ExitStack() as stack:
        server = Server(answer)
        stack.callback(server.close)
        yield server
