"""HTTP server for the live page and the metrics: the standard library's, on the loopback by default.

Bound elsewhere it wants a token, as `Authorization: Bearer …` or `?token=…`. On the loopback it wants to be
called by a local name, so that no page of the web can read it through a name that resolves to 127.0.0.1.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from stoker.errors import StorageError, UsageError

_SLOW_CLIENT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where to listen; port 0 takes any that is free."""

    host: str = "127.0.0.1"
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """8080, 0.0.0.0:8080, [::1]:8080."""
        host, _, port = text.rpartition(":")
        if not port.isdigit() or int(port) > 65535:
            raise UsageError(
                f"{text!r} is no port", hint="give a port, or an address and a port: 0.0.0.0:8080"
            )
        return cls(host=host.strip("[]") or "127.0.0.1", port=int(port))

    @property
    def local(self) -> bool:
        """Can only this machine reach it?"""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a path gives."""

    content_type: str
    body: bytes


_GIVEN = "STOKER_TOKEN"
Routes = Mapping[str, Callable[[], Answer]]


def token_for(address: Address, environ: Mapping[str, str] = os.environ) -> str:
    """No token on the loopback; elsewhere that of STOKER_TOKEN, or a new one."""
    return "" if address.local else environ.get(_GIVEN) or secrets.token_urlsafe(24)


def start(thread: threading.Thread) -> None:
    """Start a thread that gets no signals: they are for whoever started the observed program."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Server:
    """Answers GET requests while it is open, each in a thread of its own."""

    def __init__(self, address: Address, routes: Routes, *, token: str = "") -> None:
        if not address.local and not token:
            raise UsageError(
                f"{address.host} can be reached by others", hint="give a token, or listen on 127.0.0.1"
            )
        self._token = token
        self._server = _listen(address, routes, token)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="stoker-page")
        start(self._thread)

    def url_of(self, path: str) -> str:
        """What to open in a browser. A token that was given is known to whoever gave it, and a log is no
        place for it: only one that was made here is told."""
        host, port = self._server.server_address[:2]
        name = f"[{host!s}]" if ":" in str(host) else str(host)
        made = self._token and self._token != os.environ.get(_GIVEN)
        said = f"?token={self._token}" if made else f"?token=${_GIVEN}" if self._token else ""
        return f"http://{name}:{port}{path}{said}"

    def close(self) -> None:
        """Stop listening; safe twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a client that never finishes its request must not keep us from ending

    def __init__(self, address: Address, routes: Routes, token: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.routes, self.token = routes, token
        super().__init__((address.host, address.port), _Request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that closes its tab is no news; anything else is told as usual."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # the library's own


class _Request(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SLOW_CLIENT_S
    server_version = "stoker"
    sys_version = ""

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        if not _may_read(self.headers.get("Host", ""), self._given_token(asked.query), self.server.token):
            self._refuse()
        elif asked.path not in self.server.routes:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self._send(self.server.routes[asked.path]())

    def log_message(self, format: str, *args: object) -> None:
        """Requests are no news to whoever watches a run."""

    def _given_token(self, query: str) -> str:
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return bearer or parse_qs(query).get("token", [""])[0]

    def _refuse(self) -> None:
        self.send_response(HTTPStatus.UNAUTHORIZED)
        self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(b"this page wants its token, or to be called by a local name\n")

    def _send(self, answer: Answer) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")  # the address may carry the token
        self.end_headers()
        self.wfile.write(answer.body)


def _may_read(host: str, given: str, token: str) -> bool:
    if token:  # in constant time: how long it takes must not tell how much of a guess was right
        return hmac.compare_digest(given.encode(), token.encode())
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:  # no name at all
        return False
    return Address(host=name, port=0).local


def _listen(address: Address, routes: Routes, token: str) -> _Server:
    try:
        return _Server(address, routes, token)
    except OSError as error:
        raise StorageError(
            f"cannot listen on {address.host}:{address.port}: {error.strerror}",
            hint="another process may use this port: give another, or 0 for any",
        ) from error
