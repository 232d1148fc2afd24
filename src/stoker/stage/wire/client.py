"""Connection pool: connections to any number of hosts, kept open; proxies, certificates, redirects."""

from __future__ import annotations

import socket
import threading
from collections import defaultdict
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from stoker.errors import StorageError
from stoker.network import Proxies, tls_context
from stoker.stage.wire.dial import Endpoint, dial, dial_more, proxy_key
from stoker.stage.wire.heads import Answer
from stoker.stage.wire.http import Address, Connection, NetworkError, ascii_host
from stoker.stage.wire.secure import tls_handle

if TYPE_CHECKING:
    import ssl

_MOST_REDIRECTS = 5
_REDIRECTS = frozenset((301, 302, 303, 307, 308))


class Client:
    """Asks, and keeps connections whose answers were read to the end. Any thread may use it."""

    def __init__(self, *, timeout_s: float = 30.0) -> None:
        self._timeout_s = timeout_s
        self._idle: dict[Endpoint, list[Connection]] = defaultdict(list)
        self._endpoints: dict[str, Endpoint] = {}
        self._sessions: dict[Endpoint, Any] = {}  # to secure further connections for less
        self._lock = threading.Lock()

    def connect(self, endpoint: Endpoint) -> Connection:
        session = self._sessions.get(endpoint)
        plug = dial(endpoint, self._tls_of(endpoint), timeout_s=self._timeout_s, session=session)
        return self._connection(endpoint, plug)

    def connect_all(self, endpoint: Endpoint, count: int) -> list[Connection]:
        """So many connections to a host that is not behind a tunnel: idle ones, then new ones. Fewer, but one
        at least, where it does not want so many."""
        found: list[Connection] = []
        while len(found) < count and (connection := self.idle(endpoint)):
            found.append(connection)
        if not found:
            found.append(self.connect(endpoint))
        if len(found) == count:
            return found
        plugs = dial_more(
            found[0].plug,
            count - len(found),
            host=endpoint.host,
            tls=self._tls_of(endpoint),
            timeout_s=self._timeout_s,
            session=self._sessions.get(endpoint),
        )
        return found + [self._connection(endpoint, plug) for plug in plugs]

    def _connection(self, endpoint: Endpoint, plug: socket.socket) -> Connection:
        through_proxy = bool(endpoint.proxy) and endpoint.scheme == "http"
        handle = tls_handle(plug) if endpoint.scheme == "https" else 0
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        return Connection(
            plug,
            host=endpoint.host,
            # Python's secured sockets give a record at a time
            waits_for_all=endpoint.scheme == "http" or bool(handle),
            handle=handle,
            window_s=self._timeout_s,
            absolute=f"http://{host}:{endpoint.port}" if through_proxy else "",
            always=proxy_key(endpoint.proxy) if through_proxy else "",
        )

    def _tls_of(self, endpoint: Endpoint) -> ssl.SSLContext | None:
        return self._tls if endpoint.scheme == "https" else None

    def idle(self, endpoint: Endpoint) -> Connection | None:
        while True:
            with self._lock:
                idle = self._idle.get(endpoint)
                connection = idle.pop() if idle else None
            if connection is None or connection.is_quiet():
                return connection
            connection.close()  # the server ended it, or says what nobody asked for

    def leave(self, endpoint: Endpoint, connection: Connection) -> None:
        """Keep it if its last answer was read to the end; it is of no more use otherwise."""
        if not connection.reusable:
            connection.close()
            return
        if endpoint.scheme == "https" and endpoint not in self._sessions:
            self._sessions[endpoint] = getattr(connection.plug, "session", None)
        with self._lock:
            self._idle[endpoint].append(connection)

    def endpoint(self, address: Address) -> Endpoint:
        root = address.root
        if root not in self._endpoints:
            self._endpoints[root] = self._found(urlsplit(root))
        return self._endpoints[root]

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            idle = [connection for each in self._idle.values() for connection in each]
            self._idle.clear()
        for connection in idle:
            connection.close()

    def _found(self, parts: SplitResult) -> Endpoint:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return Endpoint(parts.scheme, ascii_host(parts.hostname or ""), port, self._proxies.of(parts))

    @cached_property
    def _proxies(self) -> Proxies:
        return Proxies()

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return tls_context()


class Exchange:
    """One question and its answer, over as many connections and redirects as it takes."""

    def __init__(self, client: Client, address: Address, *, headers: str = "") -> None:
        self.asked = self.address = address  # redirects change the second
        self._client = client
        self._headers = headers
        self._endpoint = client.endpoint(address)
        self._connection, self._is_left = self._ask(), False

    def answer(self) -> Answer:
        """The head of the answer; `address` is then where it came from."""
        for _ in range(_MOST_REDIRECTS):
            answer = self._hear()
            location = answer.headers.get("location")
            if answer.status not in _REDIRECTS or not location:
                return answer
            self.text()
            self.close()
            self.address = self.address.moved(location)
            self._endpoint = self._client.endpoint(self.address)
            self._connection, self._is_left = self._ask(), False
        raise StorageError(
            f"{self.address.url.partition('?')[0]} redirects without end", hint="check the URL in a browser"
        )

    @property
    def first_byte_s(self) -> float:
        """From the request to the first byte of its answer."""
        return self._connection.first_byte_s

    def read_into(self, view: memoryview) -> int:
        return self._connection.read_into(view)

    def finish(self) -> bool:
        """Whether the body ends here."""
        return not self._connection.read_into(memoryview(bytearray(1)))

    def head(self) -> bytes:
        """The beginning of the body."""
        view = memoryview(bytearray(4096))
        return bytes(view[: self._connection.read_into(view)])

    def text(self) -> str:
        """What a refusal says."""
        return self.head().decode("utf-8", "replace")

    def body(self, *, begins_with: bytes, most: int) -> bytes:
        """All of it, if it begins so after white space; else nothing: it may be as large as a shard. An error
        if it is larger than `most`, or has no end."""
        data, view = bytearray(), memoryview(bytearray(64 << 10))
        while count := self._connection.read_into(view):
            if not data and not bytes(view[:count]).lstrip().startswith(begins_with):
                return b""
            data += view[:count]
            if len(data) > most:
                raise StorageError(
                    f"{self.address.url.partition('?')[0]} is larger than {most:,} bytes, or has no end",
                    hint="look at what the server sends there",
                )
        return bytes(data)

    def interrupt(self) -> None:
        if not self._is_left:
            self._connection.interrupt()

    def close(self) -> None:
        """Give the connection back; safe twice, since it may be another's by then."""
        if not self._is_left:
            self._is_left = True
            self._client.leave(self._endpoint, self._connection)

    def _ask(self) -> Connection:
        while connection := self._client.idle(self._endpoint):
            try:
                connection.send(self.address, self._headers)
                return connection
            except NetworkError:  # the server closed it while it was idle
                connection.close()
        return self._ask_afresh()

    def _ask_afresh(self) -> Connection:
        connection = self._client.connect(self._endpoint)
        try:
            connection.send(self.address, self._headers)
        except NetworkError:
            connection.close()
            raise
        return connection

    def _hear(self) -> Answer:
        try:
            return self._connection.answer()
        except NetworkError:
            if not self._connection.answers:
                raise
            # It has answered before: most likely the server closed it just as we asked.
            self._connection.close()
            self._connection = self._ask_afresh()
            return self._connection.answer()
