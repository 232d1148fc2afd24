"""Who of a job still lives: every rank holds a connection to rank 0 for as long as it does.

The kernel closes the connections of a process that dies, however it dies, so rank 0 knows at once; of a node
that is gone the kernel's keepalive tells in less than a minute. It answers for a process that is only slow,
stopped or stuck in native code, too: those are not taken for dead.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

_BYE = b"bye\n"
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 10,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 6,
}  # seconds, seconds, tries


class Line:
    """A rank's connection. Closed by the process itself it says goodbye."""

    def __init__(self, address: str, *, rank: int) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=30)
        _keep_alive(self._socket)
        hello = {"rank": rank, "who": f"process {os.getpid()} on {socket.gethostname()}"}
        self._socket.sendall(json.dumps(hello).encode() + b"\n")
        # a child would hold the connection open after the death of this process
        held = weakref.ref(self._socket)
        os.register_at_fork(after_in_child=lambda: _close(held()))

    def close(self) -> None:
        with suppress(OSError):
            self._socket.sendall(_BYE)
        self._socket.close()


class Watch:
    """Rank 0's side: calls `gone(rank, who, said)` in its own thread when a rank has left, or died."""

    def __init__(self, host: str, *, gone: Callable[[int, str, bool], None]) -> None:
        self._gone = gone
        self._listener = socket.create_server((host, 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="stoker-liveness", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with suppress(OSError):
            self._wake.send(b"x")
        self._thread.join()
        self._wake.close()

    def _run(self) -> None:
        said: dict[socket.socket, bytes] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for ready in [key.fileobj for key, _ in selector.select()]:
                    assert isinstance(ready, socket.socket)
                    if ready is self._woken:
                        _close_all([self._listener, self._woken, *said])
                        return
                    if ready is self._listener:
                        line, _ = self._listener.accept()
                        _keep_alive(line)
                        said[line] = b""
                        selector.register(line, selectors.EVENT_READ)
                    elif not (data := _received(ready)):
                        selector.unregister(ready)
                        ready.close()
                        self._tell(said.pop(ready))
                    else:
                        said[ready] += data

    def _tell(self, said: bytes) -> None:
        hello, _, bye = said.partition(b"\n")
        with suppress(ValueError, KeyError):  # else it was no rank of ours
            who = json.loads(hello)
            self._gone(int(who["rank"]), str(who["who"]), bye == _BYE)


def _keep_alive(line: socket.socket) -> None:
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        line.setsockopt(socket.IPPROTO_TCP, option, value)


def _received(line: socket.socket) -> bytes:
    try:
        return line.recv(4096)
    except OSError:
        return b""


def _close(one: socket.socket | None) -> None:
    if one is not None:
        one.close()


def _close_all(sockets: list[socket.socket]) -> None:
    for one in sockets:
        one.close()
