"""Connection pool: connections to any number of hosts, kept open; proxies, certificates, redirects."""

from __future__ import annotations

import socket
import struct
import threading
from base64 import b64encode
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlsplit

from stoker.errors import StorageError
from stoker.network import Proxies, certificates
from stoker.stage.wire.heads import Answer
from stoker.stage.wire.http import CONNECT_TIMEOUT_S, HEAD_BYTES, Address, Connection, NetworkError

if TYPE_CHECKING:
    import ssl

_NEAR_S = 0.002  # a round trip within a site takes less than 1 ms
_RTT_AT = 68  # where the kernel's tcp_info has it, in microseconds
_MOST_REDIRECTS = 5
_REDIRECTS = frozenset((301, 302, 303, 307, 308))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host to connect to, and the proxy on the way there."""

    scheme: str
    host: str
    port: int
    proxy: str = ""


class Client:
    """Asks, and keeps connections whose answers were read to the end. Any thread may use it."""

    def __init__(self, *, timeout_s: float = 30.0) -> None:
        self._timeout_s = timeout_s
        self._idle: dict[Endpoint, list[Connection]] = defaultdict(list)
        self._endpoints: dict[str, Endpoint] = {}
        self._quickest: dict[Endpoint, float] = {}
        self._lock = threading.Lock()

    def connect(self, endpoint: Endpoint) -> Connection:
        tls = self._tls if endpoint.scheme == "https" else None
        plug = _plug(endpoint, tls, self._timeout_s)
        took_s = _round_trip_s(plug)
        self._quickest[endpoint] = min(took_s, self._quickest.get(endpoint, took_s))
        return self._connection(endpoint, plug)

    def connect_all(self, endpoint: Endpoint, count: int) -> list[Connection]:
        """So many connections to a host of plain http: idle ones, then new ones, made side by side since
        each takes a round trip. Fewer, but one at least, where it does not want so many."""
        found: list[Connection] = []
        while len(found) < count and (connection := self.idle(endpoint)):
            found.append(connection)
        if not found:
            found.append(self.connect(endpoint))
        plugs = found[0].more(count - len(found))
        timed = (_timed_by_the_kernel(plug, self._timeout_s) for plug in plugs)
        return found + [self._connection(endpoint, plug) for plug in timed]

    def _connection(self, endpoint: Endpoint, plug: socket.socket) -> Connection:
        through_proxy = bool(endpoint.proxy) and endpoint.scheme == "http"
        return Connection(
            plug,
            host=endpoint.host,
            waits_for_all=endpoint.scheme == "http",  # a secured socket gives a record at a time
            window_s=self._timeout_s,
            absolute=f"http://{endpoint.host}:{endpoint.port}" if through_proxy else "",
            always=_proxy_key(endpoint.proxy) if through_proxy else "",
        )

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
        with self._lock:
            self._idle[endpoint].append(connection)

    def endpoint(self, address: Address) -> Endpoint:
        root = address.root
        if root not in self._endpoints:
            self._endpoints[root] = self._found(urlsplit(root))
        return self._endpoints[root]

    def is_near(self, address: Address) -> bool:
        """Whether a round trip costs next to nothing; also as long as nobody has tried."""
        endpoint = self.endpoint(address)
        return not endpoint.proxy and self._quickest.get(endpoint, 0.0) < _NEAR_S

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
        return Endpoint(parts.scheme, parts.hostname or "", port, self._proxies.of(parts))

    @cached_property
    def _proxies(self) -> Proxies:
        return Proxies()

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        import ssl  # 13 ms, and a store next door speaks plain http

        return ssl.create_default_context(cafile=certificates() or None)


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

    def body(self, *, begins_with: bytes) -> bytes:
        """All of it, if it begins so after white space; else nothing: it may be as large as a shard."""
        data, view = bytearray(), memoryview(bytearray(64 << 10))
        while count := self._connection.read_into(view):
            if not data and not bytes(view[:count]).lstrip().startswith(begins_with):
                return b""
            data += view[:count]
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


def _plug(endpoint: Endpoint, tls: ssl.SSLContext | None, timeout_s: float) -> socket.socket:
    """A socket to the endpoint, through its proxy, secured if it is to be."""
    place = urlsplit(endpoint.proxy) if endpoint.proxy else None
    host, port = (place.hostname or "", place.port or 3128) if place else (endpoint.host, endpoint.port)
    try:
        raw = socket.create_connection((_name(host), port), timeout=CONNECT_TIMEOUT_S)
    except OSError as error:
        raise NetworkError(f"cannot connect to {host} port {port}: {error}") from error
    try:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is None:
            return _timed_by_the_kernel(raw, timeout_s)
        if endpoint.proxy:
            _tunnel(raw, endpoint)
        return _secured(raw, tls, endpoint.host, timeout_s)
    except OSError as error:
        raw.close()
        raise NetworkError(f"cannot connect to {endpoint.host}: {error}") from error
    except BaseException:
        raw.close()
        raise


def _name(host: str) -> Any:  # bytes too, which the stubs do not know
    """As bytes a plain name is looked up as it is; text brings in the codec of all the others, 10 ms."""
    return host.encode() if host.isascii() else host


def _timed_by_the_kernel(raw: socket.socket, timeout_s: float) -> socket.socket:
    """MSG_WAITALL needs a socket that blocks; with a timeout of Python's own it would not."""
    raw.settimeout(None)
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return raw


def _round_trip_s(plug: socket.socket) -> float:
    """As the kernel saw it. A clock of ours also counts the time in which this thread could not run: then a
    store on the same busy machine looks far away."""
    info = plug.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT_AT + 4)
    microseconds: int = struct.unpack_from("I", info, _RTT_AT)[0]
    return microseconds / 1e6


def _secured(raw: socket.socket, tls: ssl.SSLContext, host: str, timeout_s: float) -> socket.socket:
    import ssl

    raw.settimeout(timeout_s)
    try:
        return tls.wrap_socket(raw, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        raise StorageError(
            f"the certificate of {host} is not trusted: {error.verify_message}",
            hint="install the certificate's authority on this system, or name its file in SSL_CERT_FILE or "
            "AWS_CA_BUNDLE",
        ) from error


def _tunnel(raw: socket.socket, endpoint: Endpoint) -> None:
    """Ask the proxy for a way through to the endpoint."""
    place = f"{endpoint.host}:{endpoint.port}"
    raw.sendall(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n{_proxy_key(endpoint.proxy)}\r\n".encode())
    head = b""
    while b"\r\n\r\n" not in head:
        received = raw.recv(1)  # byte by byte: what follows the head belongs to the secured connection
        if not received or len(head) > HEAD_BYTES:
            raise NetworkError(f"the proxy closed the connection to {place}")
        head += received
    if head[9:12] != b"200":
        reason = head.splitlines()[0].decode("latin-1")
        raise NetworkError(f"the proxy refuses a connection to {place}: {reason}")


def _proxy_key(proxy: str) -> str:
    parts = urlsplit(proxy)
    if not parts.username:
        return ""
    secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
    return f"Proxy-Authorization: Basic {b64encode(secret).decode()}\r\n"
