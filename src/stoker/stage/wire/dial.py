"""Sockets to a host: resolved, through its proxy, secured, timed by the kernel; many side by side."""

from __future__ import annotations

import select
import socket
import struct
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from stoker.errors import StorageError
from stoker.stage.wire.http import HEAD_BYTES, NetworkError
from stoker.stage.wire.secure import tls_handle

if TYPE_CHECKING:
    import ssl

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host to connect to, and the proxy on the way there."""

    scheme: str
    host: str
    port: int
    proxy: str = ""


def dial(endpoint: Endpoint, tls: ssl.SSLContext | None, *, timeout_s: float, session: Any) -> socket.socket:
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
            return timed_by_the_kernel(raw, timeout_s)
        if endpoint.proxy:
            _tunnel(raw, endpoint)
        return _secured(raw, tls, endpoint.host, timeout_s, session)
    except OSError as error:
        raw.close()
        raise NetworkError(f"cannot connect to {endpoint.host}: {error}") from error
    except BaseException:
        raw.close()
        raise


def dial_more(
    like: socket.socket, count: int, *, host: str, tls: ssl.SSLContext | None, timeout_s: float, session: Any
) -> list[socket.socket]:
    """Further sockets to where one leads, made side by side since each takes a round trip or two; those that
    came to be in time."""
    plugs = _connected(like, count)
    if tls is None:
        return [timed_by_the_kernel(plug, timeout_s) for plug in plugs]
    wrapped = []
    for plug in plugs:
        try:
            wrapped.append(
                tls.wrap_socket(plug, server_hostname=host, do_handshake_on_connect=False, session=session)
            )
        except OSError:  # reset already: one fewer
            plug.close()
    return [timed(plug, timeout_s) for plug in _shaken(wrapped)]


def timed_by_the_kernel(raw: socket.socket, timeout_s: float) -> socket.socket:
    """MSG_WAITALL needs a socket that blocks; with a timeout of Python's own it would not."""
    raw.settimeout(None)
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return raw


def timed(plug: ssl.SSLSocket, timeout_s: float) -> socket.socket:
    """A secured socket that does not wait for ever. Python's own reads need Python's timeout."""
    if tls_handle(plug):
        return timed_by_the_kernel(plug, timeout_s)
    plug.settimeout(timeout_s)
    return plug


def proxy_key(proxy: str) -> str:
    """The header line that a proxy wants to see first, if it wants one."""
    parts = urlsplit(proxy)
    if not parts.username:
        return ""
    secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
    return f"Proxy-Authorization: Basic {b64encode(secret).decode()}\r\n"


def _name(host: str) -> Any:  # bytes too, which the stubs do not know
    """As bytes a plain name is looked up as it is; text brings in the codec of all the others, 10 ms."""
    return host.encode() if host.isascii() else host


def _secured(
    raw: socket.socket, tls: ssl.SSLContext, host: str, timeout_s: float, session: Any
) -> socket.socket:
    import ssl

    raw.settimeout(timeout_s)
    try:
        return timed(tls.wrap_socket(raw, server_hostname=host, session=session), timeout_s)
    except ssl.SSLCertVerificationError as error:
        raise StorageError(
            f"the certificate of {host} is not trusted: {error.verify_message}",
            hint="install the certificate's authority on this system, or name its file in SSL_CERT_FILE or "
            "AWS_CA_BUNDLE",
        ) from error


def _tunnel(raw: socket.socket, endpoint: Endpoint) -> None:
    """Ask the proxy for a way through to the endpoint."""
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    place = f"{host}:{endpoint.port}"
    raw.sendall(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n{proxy_key(endpoint.proxy)}\r\n".encode())
    head = b""
    while b"\r\n\r\n" not in head:
        received = raw.recv(1)  # byte by byte: what follows the head belongs to the secured connection
        if not received or len(head) > HEAD_BYTES:
            raise NetworkError(f"the proxy closed the connection to {place}")
        head += received
    status, reason = head[9:12], head.splitlines()[0].decode("latin-1")
    if status == b"407":
        raise StorageError(
            f"the proxy wants a name and a password: {reason}",
            hint="write them before the proxy's own name in HTTPS_PROXY, as NAME:PASSWORD@",
        )
    if status != b"200":
        raise NetworkError(f"the proxy refuses a connection to {place}: {reason}")


def _connected(like: socket.socket, count: int) -> list[socket.socket]:
    try:
        place = like.getpeername()
    except OSError:  # it was reset while it was idle
        return []
    plugs: dict[int, socket.socket] = {}
    with suppress(OSError):  # as many as this process may have open
        while len(plugs) < count:
            plug = begin_another(like, place)
            plugs[plug.fileno()] = plug
    done = [plug for plug in _ready(plugs, dict.fromkeys(plugs, select.POLLOUT)) if not _failed(plug)]
    for plug in plugs.values():
        if plug not in done:
            plug.close()
    return done


def begin_another(like: socket.socket, place: Any) -> socket.socket:  # as the socket's family has it
    plug = socket.socket(like.family, socket.SOCK_STREAM)
    plug.setblocking(False)
    plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    plug.connect_ex(place)
    return plug


def _failed(plug: socket.socket) -> bool:
    return bool(plug.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))


def _ready(plugs: dict[int, socket.socket], wanted: dict[int, int]) -> Iterator[socket.socket]:
    """The sockets as they become ready; one that `wanted` still names after its turn is waited for again."""
    waiting, deadline = select.poll(), time.monotonic() + CONNECT_TIMEOUT_S
    for number, events in wanted.items():
        waiting.register(number, events)
    while wanted and (left_s := deadline - time.monotonic()) > 0:
        for number, _ in waiting.poll(1e3 * left_s):
            events = wanted.pop(number)
            yield plugs[number]
            if number in wanted:
                if wanted[number] != events:
                    waiting.modify(number, wanted[number])
            else:
                waiting.unregister(number)


def _shaken(plugs: list[ssl.SSLSocket]) -> list[ssl.SSLSocket]:
    """Secured sockets, their handshakes done in turn as each is ready."""
    import ssl

    by_number = {plug.fileno(): plug for plug in plugs}
    wanted = dict.fromkeys(by_number, select.POLLOUT)
    done = []
    for plug in _ready(dict(by_number), wanted):
        try:
            plug.do_handshake()  # type: ignore[attr-defined]
            done.append(by_number[plug.fileno()])
        except ssl.SSLWantReadError:
            wanted[plug.fileno()] = select.POLLIN
        except ssl.SSLWantWriteError:
            wanted[plug.fileno()] = select.POLLOUT
        except OSError:  # one fewer
            continue
    for each in plugs:
        if each not in done:
            each.close()
    return done
