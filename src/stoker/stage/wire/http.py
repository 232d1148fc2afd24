"""HTTP/1.1 on one connection: a request out, an answer's head in, the body straight into our buffer.

Why not http.client: a body is received with MSG_WAITALL into a buffer that is reused, so that a slice of
1 MiB costs one system call and one turn of the interpreter; and a head costs 14 µs to split instead of
65 µs in the email parser, which is half of what a 64 KiB object costs altogether.
"""

from __future__ import annotations

import ctypes
import re
import select
import socket
import time
from base64 import b64encode
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import quote, unquote, urljoin

from stoker.errors import StorageError
from stoker.native import native
from stoker.stage.wire.heads import Answer, BadHead, Body, chunk_bytes, read_head

LOW_SPEED = 1024  # bytes a second, below which a connection is as good as dead
LATE = -3  # what flight.c says where nothing came for too long; below: something else than was asked for
_MOST_INTERIM = 8
_WAKE_BYTES = 256 << 10  # what a sleeping read is woken for
_MUCH_BYTES = 1 << 20  # and of what: a slice, which a lane wants at once only where that comes in 20 ms
HEAD_BYTES = 16 << 10  # the most that nginx and S3 themselves take as a head
_SAFE = "/%:@!$&'()*+,;=~?"  # what may stand in a request's target as it is, beside letters and digits
_HOST = re.compile(r"https?://(?:[\w.-]+|\[[0-9a-fA-F:.]+\])(?::\d+)?", re.ASCII).fullmatch
_FIT = re.compile(rf"[\w.\-{re.escape(_SAFE)}]+", re.ASCII).fullmatch


class NetworkError(Exception):
    """The connection failed; asking again may help."""


class NetworkTimeout(NetworkError):
    """Nothing came for too long: perhaps we ask for too much at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a file's bytes are asked for, and what must be said to get them."""

    url: str
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, url: str) -> Address:
        """A web address as a user wrote it: a name and password in it become a header."""
        scheme, _, rest = url.partition("://")
        host, slash, path = rest.partition("/")
        secret, at, host = host.rpartition("@")
        if not at:
            return cls(url=url)
        key = b64encode(unquote(secret).encode()).decode()
        return cls(url=f"{scheme}://{host}{slash}{path}", headers=(("Authorization", f"Basic {key}"),))

    @property
    def root(self) -> str:
        """`https://host:port`, which tells connections apart."""
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{rest.partition('/')[0]}"

    @property
    def target(self) -> str:
        """What stands in a request. A signed URL is fit for it; one that a user wrote may not be."""
        target = self.url[len(self.root) :].partition("#")[0] or "/"
        return target if _FIT(target) else quote(target, safe=_SAFE)

    def moved(self, location: str) -> Address:
        """Where a redirect leads. Another host is not told what this one was (a hub's token)."""
        url = urljoin(self.url, location)
        there = Address(url=url)
        if not _HOST(there.root) or (self.url.startswith("https:") and not url.startswith("https:")):
            raise StorageError(
                f"{self.root} redirects to {there.root[:80]!r}, and stoker does not follow there",
                hint="check the URL in a browser; if plain http will do, name the address it leads to",
            )
        return Address(url=url, headers=self.headers) if there.root == self.root else there


def ascii_host(host: str) -> str:
    """A host, perhaps with its port, as the network knows it: names of other scripts written out (IDNA)."""
    if host.isascii():
        return host
    name, colon, port = host.partition(":")  # an IPv6 address has no such letters
    return name.encode("idna").decode() + colon + port


class Connection:
    """One connection, used by one thread at a time: send, then answer, then read_into until it gives 0."""

    def __init__(
        self,
        plug: socket.socket,
        *,
        host: str,
        waits_for_all: bool,
        handle: int = 0,
        window_s: float = 30.0,
        absolute: str = "",
        always: str = "",
    ) -> None:
        """`absolute` is put before each target and `always` after its headers, as proxies want it. A server
        that sends less than LOW_SPEED over the window is given up. `handle`: see `secure`."""
        self.host, self._window_s = host, window_s
        self._slow = ""  # what was seen of a server that is too slow
        self.answers = 0
        self.reusable = False
        self.first_byte_s = 0.0  # from the last request to the first byte of its answer
        self._asked = 0.0
        self._socket, self._handle = plug, handle
        self._absolute, self._always = absolute, always
        self._body_flags = socket.MSG_WAITALL if waits_for_all else 0
        self._is_tcp = plug.family in (socket.AF_INET, socket.AF_INET6)
        self._wakes_at = 1  # bytes that must be there before a read of ours is woken
        self._buffer = bytearray(HEAD_BYTES)
        self._view = memoryview(self._buffer)
        self._from = self._to = 0  # what of the buffer was received and not yet read
        self._body = Body()

    def send(self, address: Address, headers: str) -> None:
        """Ask for what the address names; `headers` are whole lines."""
        self.reusable, self._asked = False, time.monotonic()
        try:
            self._socket.sendall(self.request(address, headers))
        except OSError as error:
            raise NetworkError(f"cannot ask {self.host}: {error}") from error

    def request(self, address: Address, headers: str) -> bytes:
        """What is sent to ask for it, as this connection and any other to the same host want it."""
        host = ascii_host(address.root.partition("://")[2])
        own = "".join(f"{name}: {value}\r\n" for name, value in address.headers)
        return (
            f"GET {self._absolute}{address.target} HTTP/1.1\r\nHost: {host}\r\n"
            f"User-Agent: stoker\r\nAccept-Encoding: identity\r\n{own}{headers}{self._always}\r\n"
        ).encode("latin-1")

    @property
    def plug(self) -> socket.socket:
        """The socket, to connect further ones to the same place."""
        return self._socket

    def lend(self) -> tuple[int, int]:
        """The socket and its TLS, for `flight.c` to talk through; `served` tells how that ended."""
        self.reusable = False
        return self._socket.fileno(), self._handle

    def served(self, *, reusable: bool) -> None:
        self.reusable = reusable
        self.answers += 1

    def answer(self) -> Answer:
        """The head of the answer; its body can be read afterwards."""
        try:
            for _ in range(_MOST_INTERIM):  # 100 Continue and its kind come before the answer
                answer = read_head(self._head())
                if answer.status >= 200:
                    break
            else:
                raise BadHead("one interim answer after another")
            self._body = Body.of(answer)
        except BadHead as error:
            raise NetworkError(f"{self.host} answers with {error}") from None
        self.answers += 1
        self.reusable = self._is_done()
        return answer

    def is_quiet(self) -> bool:
        """Whether nothing came since the last answer: what nobody asked for would be taken for the next."""
        pending = getattr(self._socket, "pending", None)
        if pending and not self.answers:  # TLS has words of its own to say after its beginning
            return True
        if pending and pending():
            return False
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        return self._from == self._to and not waiting.poll(0)

    def read_into(self, view: memoryview) -> int:
        """Fill the view as far as the body goes. If the connection fails after some bytes these are given,
        and the error when more is asked for; nothing given means that the body has ended."""
        got, began = 0, time.monotonic()
        try:
            while got < len(view) and (count := self._read_some(view[got:])):
                got += count
                self._check_speed(got, began)
        except NetworkError:
            if not got:
                raise
        self.reusable = self._is_done()
        return got

    def _is_done(self) -> bool:
        return self._body.keep and self._body.is_over and self._from == self._to

    def _check_speed(self, got: int, began: float) -> None:
        took_s = time.monotonic() - began
        if took_s > self._window_s and got < LOW_SPEED * took_s:
            self._slow = f"{self.host} sends {got / took_s:.0f} bytes a second"
            raise NetworkTimeout(self._slow)

    def _read_some(self, view: memoryview) -> int:
        body = self._body
        if self._slow:
            raise NetworkTimeout(self._slow)
        if not body.left and not self._next_chunk():
            return 0
        if self._is_tcp:
            self._wake_seldom(len(view))
            if body.left <= len(view):
                self._hurry()
        count = self._receive(view[: body.left])
        if body.until_close:
            body.left = body.left if count else 0
        elif count:
            body.left -= count
        else:
            raise NetworkError(f"{self.host} closed the connection within an answer")
        return count

    def interrupt(self) -> None:
        """Make a read that another thread is in end at once."""
        try:
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        except OSError:  # it is closed already
            return

    def close(self) -> None:
        self.reusable = False
        self._handle = 0  # it goes with the socket
        self._socket.close()

    def _head(self) -> str:
        if self._from == self._to:
            self._from = self._to = 0
        if self._is_tcp:
            self._hurry()
        began, self.first_byte_s = time.monotonic(), 0.0
        while (end := self._buffer.find(b"\r\n\r\n", self._from, self._to)) < 0:
            if self._to == HEAD_BYTES:
                raise NetworkError(f"{self.host} answers with a head of over {HEAD_BYTES:,} bytes")
            count = self._from_network(self._view[self._to :], 0)
            if not count:
                raise NetworkError(f"{self.host} closed the connection before it answered")
            self._to += count
            now = time.monotonic()
            self.first_byte_s = self.first_byte_s or now - self._asked
            if now - began > 2 * self._window_s:
                raise NetworkTimeout(f"{self.host} sends its answer byte by byte")
        head = str(self._view[self._from : end], "latin-1")
        self._from = end + 4
        return head

    def _next_chunk(self) -> bool:
        """Read the size of the next chunk; False when the body is over."""
        body = self._body
        if not body.chunked:
            return False
        try:
            if not body.at_first_chunk and (left_over := self._line()):
                raise BadHead(f"{left_over[:20]!r} after the end of a chunk")
            body.at_first_chunk = False
            body.left = chunk_bytes(self._line())
            if not body.left:
                self._skip_trailers()
                body.chunked = False
        except BadHead as error:
            raise NetworkError(f"{self.host} answers with {error}") from None
        return body.left > 0

    def _skip_trailers(self) -> None:
        size = 0
        while line := self._line():
            size += len(line)
            if size > HEAD_BYTES:
                raise BadHead("trailers without end")

    def _line(self) -> bytes:
        line, byte = bytearray(), memoryview(bytearray(1))
        while not line.endswith(b"\r\n"):
            if self._from == self._to:
                self._from, self._to = 0, self._from_network(self._view, 0)
            if not self._receive(byte) or len(line) > HEAD_BYTES:
                raise NetworkError(f"{self.host} closed the connection within an answer")
            line += byte
        return bytes(line[:-2])

    def _receive(self, view: memoryview) -> int:
        """First from what came together with the head, then from the network."""
        held = self._to - self._from
        if not held:
            return self._from_network(view, self._body_flags)
        count = min(held, len(view))
        view[:count] = self._view[self._from : self._from + count]
        self._from += count
        return count

    def _wake_seldom(self, wanted: int) -> None:
        """Where much is wanted, and as much is sure to come behind it, sleep until a good part of it is
        there: else the kernel wakes this thread for each segment. Over TLS 2 GiB took 2.67 s so instead of
        2.80 s, with the server on the same two cores (medians of four)."""
        behind = self._body.left - wanted  # of which OpenSSL may hold a record already
        is_much = wanted >= _MUCH_BYTES and behind >= 2 * _WAKE_BYTES
        wakes_at = _WAKE_BYTES if is_much else 1
        if wakes_at != self._wakes_at:
            self._wakes_at = wakes_at
            with suppress(OSError):  # it is closed: the read will say so
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wakes_at)

    def _hurry(self) -> None:
        """Acknowledge at once what comes now. Else our kernel keeps that back for up to 40 ms, and a
        server may send the end of its answer only then. Seen with BBR over loopback: 4,000 x 64 KiB took
        0.7 s instead of 0.2 s. The kernel forgets the wish by and by."""
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        except OSError:  # it is closed: the read will say so
            return

    def _from_network(self, view: memoryview, flags: int) -> int:
        if self._handle:
            return self._from_tls(view, flags)
        try:
            return self._socket.recv_into(view, len(view), flags)
        except (BlockingIOError, TimeoutError):
            raise NetworkTimeout(f"{self.host} has sent nothing for too long") from None
        except OSError as error:
            raise NetworkError(f"cannot hear {self.host}: {error}") from error

    def _from_tls(self, view: memoryview, flags: int) -> int:
        place = ctypes.addressof(ctypes.c_char.from_buffer(view))
        count: int = native("stage.wire._flight").read(
            self._socket.fileno(), self._handle, place, len(view), bool(flags)
        )
        if count == LATE:
            raise NetworkTimeout(f"{self.host} has sent nothing for too long")
        if count < 0:
            raise NetworkError(f"cannot hear {self.host}: its secured connection failed")
        return count
