"""HTTP/1.1 as RFC 9112 has it: what is understood, what is refused, and what is never mixed up."""

from __future__ import annotations

import itertools
import random
import socket
import ssl
import threading
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage.wire.raw_server import Server, answering
from stoker.errors import StorageError
from stoker.stage.wire.client import Client, Exchange
from stoker.stage.wire.http import Address, Connection, NetworkError
from stoker.stage.wire.secure import tls_handle

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BODY = b"0123456789"
OK = b"HTTP/1.1 200 OK\r\n"

UNDERSTOOD = {
    "a length": OK + b"Content-Length: 10\r\n\r\n" + BODY,
    "no reason phrase": b"HTTP/1.1 200\r\nContent-Length: 10\r\n\r\n" + BODY,
    "an empty reason phrase": b"HTTP/1.1 200 \r\nContent-Length: 10\r\n\r\n" + BODY,
    "names in any case": OK + b"cOnTeNt-lEnGtH:10\r\n\r\n" + BODY,
    "white space around a value": OK + b"Content-Length: \t 10 \t\r\n\r\n" + BODY,
    "the same length twice": OK + b"Content-Length: 10\r\nContent-Length: 10\r\n\r\n" + BODY,
    "an empty header": OK + b"X:\r\nContent-Length: 10\r\n\r\n" + BODY,
    "a folded header": OK + b"X: a\r\n\tb\r\nContent-Length: 10\r\n\r\n" + BODY,
    "a folded length": OK + b"Content-Length:\r\n 10\r\n\r\n" + BODY,
    "interim answers": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    + OK
    + b"Content-Length: 10\r\n\r\n"
    + BODY,
    "until the end of the connection": OK + b"\r\n" + BODY,
    "of HTTP/1.0": b"HTTP/1.0 200 OK\r\n\r\n" + BODY,
    "chunks": OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\n012\r\n7\r\n3456789\r\n0\r\n\r\n",
    "chunks with extensions": OK
    + b'Transfer-Encoding: Chunked\r\n\r\nA;name="v;1"\r\n'
    + BODY
    + b"\r\n0;x\r\n\r\n",
    "chunks with trailers": OK
    + b"Transfer-Encoding: chunked\r\n\r\na\r\n"
    + BODY
    + b"\r\n0\r\nSum: 1\r\nX: y\r\n\r\n",
    "a size with zeros before it": OK
    + b"Transfer-Encoding: chunked\r\n\r\n00a\r\n"
    + BODY
    + b"\r\n000\r\n\r\n",
    "chunks and a length": OK
    + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\na\r\n"
    + BODY
    + b"\r\n0\r\n\r\n",
}
REFUSED = {
    "two lengths": OK + b"Content-Length: 10\r\nContent-Length: 3\r\n\r\n" + BODY,
    "two lengths in a line": OK + b"Content-Length: 10, 3\r\n\r\n" + BODY,
    "a length with a sign": OK + b"Content-Length: +10\r\n\r\n" + BODY,
    "a negative length": OK + b"Content-Length: -1\r\n\r\n" + BODY,
    "a length with an underscore": OK + b"Content-Length: 1_0\r\n\r\n" + BODY,
    "a length of another script": OK + "Content-Length: ¹0\r\n\r\n".encode("latin-1") + BODY,
    "a length in hex": OK + b"Content-Length: 0xa\r\n\r\n" + BODY,
    "a length without end": OK + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n" + BODY,
    "no length": OK + b"Content-Length:\r\n\r\n" + BODY,
    "a space before the colon": OK + b"Content-Length : 10\r\n\r\n" + BODY,
    "a coding before chunks": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\na\r\n" + BODY + b"\r\n0\r\n\r\n",
    "another coding": OK + b"Transfer-Encoding: identity\r\n\r\n" + BODY,
    "nearly chunked": OK + b"Transfer-Encoding: xchunked\r\n\r\na\r\n" + BODY + b"\r\n0\r\n\r\n",
    "two codings": OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: gzip\r\n\r\n0\r\n\r\n",
    "a chunk longer than it says": OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk size with a prefix": OK + b"Transfer-Encoding: chunked\r\n\r\n0xa\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk size with a sign": OK + b"Transfer-Encoding: chunked\r\n\r\n+a\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk without a size": OK + b"Transfer-Encoding: chunked\r\n\r\n;x\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunks without an end": OK + b"Transfer-Encoding: chunked\r\n\r\na\r\n" + BODY + b"\r\n",
    "trailers without end": OK
    + b"Transfer-Encoding: chunked\r\n\r\na\r\n"
    + BODY
    + b"\r\n0\r\n"
    + b"X: aaaaaaaa\r\n" * 3000,
    "less than its length": OK + b"Content-Length: 11\r\n\r\n" + BODY,
    "a header without a colon": OK + b"Content-Length\r\n\r\n" + BODY,
    "a header without a name": OK + b": 10\r\n\r\n" + BODY,
    "a bare line feed": OK + b"X: a\nContent-Length: 3\r\nContent-Length: 10\r\n\r\n" + BODY,
    "a bare carriage return": OK + b"X: a\rY: b\r\nContent-Length: 10\r\n\r\n" + BODY,
    "a zero byte": OK + b"X: a\0\r\nContent-Length: 10\r\n\r\n" + BODY,
    "a status of two digits": b"HTTP/1.1 20 OK\r\nContent-Length: 10\r\n\r\n" + BODY,
    "a status after two spaces": b"HTTP/1.1  200 OK\r\nContent-Length: 10\r\n\r\n" + BODY,
    "a status of four digits": b"HTTP/1.1 2000 OK\r\nContent-Length: 10\r\n\r\n" + BODY,
    "another protocol": b"HTTP/2 200 OK\r\nContent-Length: 10\r\n\r\n" + BODY,
    "another version": b"HTTP/1.9 200 OK\r\nContent-Length: 10\r\n\r\n" + BODY,
    "no status": b"ICY 200 OK\r\nContent-Length: 10\r\n\r\n" + BODY,
    "interim answers without end": b"HTTP/1.1 100 Continue\r\n\r\n" * 100,
    "a head without end": OK + b"X: " + b"a" * 40_000,
    "nothing": b"",
    "half a head": OK + b"Content-Le",
}


WAYS = ("plain", "TLS in C", "TLS in Python")


@pytest.fixture(scope="module")
def contexts(authority: tuple[Path, Path]) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    trusted, chain = authority
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(chain, chain.with_suffix(".key"))
    return ssl.create_default_context(cafile=trusted), server


def heard(
    answer: bytes,
    cuts: tuple[int, ...] = (),
    *,
    way: str = "plain",
    contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,
) -> bytes:
    """The body of an answer that comes in these pieces, after which the server closes."""
    ours, theirs = socket.socketpair()
    edges = [0, *sorted({min(cut, len(answer)) for cut in cuts}), len(answer)]

    def speak() -> None:
        with theirs, suppress(OSError):
            secured = contexts[1].wrap_socket(theirs, server_side=True) if contexts else theirs
            with secured:
                for start, stop in itertools.pairwise(edges):
                    secured.sendall(answer[start:stop])

    speaker = threading.Thread(target=speak)
    speaker.start()
    plug = contexts[0].wrap_socket(ours, server_hostname="localhost") if contexts else ours
    handle = tls_handle(plug) if way == "TLS in C" else 0
    assert bool(handle) == (way == "TLS in C")
    connection = Connection(plug, host="server", waits_for_all=way != "TLS in Python", handle=handle)
    try:
        connection.answer()
        return read_all(connection.read_into)
    finally:
        connection.close()
        speaker.join()


def read_all(read_into: Callable[[memoryview], int]) -> bytes:
    body, view = bytearray(), memoryview(bytearray(7))
    while count := read_into(view):
        body += view[:count]
        assert len(body) < 1 << 20
    return bytes(body)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", UNDERSTOOD)
def test_what_the_standard_allows_is_understood(kind: str, way: str, contexts: Any) -> None:
    assert heard(UNDERSTOOD[kind], way=way, contexts=contexts if way != "plain" else None) == BODY


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_could_be_read_in_two_ways_is_refused(kind: str, way: str, contexts: Any) -> None:
    with pytest.raises(NetworkError, match="server"):
        heard(REFUSED[kind], way=way, contexts=contexts if way != "plain" else None)


@given(st.sampled_from(sorted(UNDERSTOOD)), st.lists(st.integers(1, 200), max_size=12))
def test_how_an_answer_is_cut_into_packets_does_not_matter(kind: str, cuts: list[int]) -> None:
    assert heard(UNDERSTOOD[kind], tuple(cuts)) == BODY


@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_answer_is_read_or_refused_and_nothing_else_happens(seed: int) -> None:
    luck = random.Random(seed)
    for answer in UNDERSTOOD.values():
        for _ in range(12):
            damaged = bytearray(answer)
            for _ in range(luck.randint(1, 4)):
                at = luck.randrange(len(damaged))
                damaged[at : at + luck.randint(0, 3)] = luck.choice(
                    [b"", b"\r\n", b" ", b":", b"\0", b"0", b"9", b"f", bytes([luck.randrange(256)])]
                )
            with suppress(NetworkError):
                assert len(heard(bytes(damaged))) <= len(damaged)


def ask(client: Client, url: str) -> bytes:
    exchange = Exchange(client, Address(url=url))
    try:
        exchange.answer()
        return read_all(exchange.read_into)
    finally:
        exchange.close()


SMUGGLED = OK + b"Content-Length: 4\r\n\r\nEVIL"


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(OK + b"Content-Length: 10\r\n\r\n" + BODY + SMUGGLED, id="behind a length"),
        pytest.param(UNDERSTOOD["chunks"] + SMUGGLED, id="behind the last chunk"),
        pytest.param(UNDERSTOOD["chunks and a length"] + SMUGGLED, id="where length and chunks differ"),
        pytest.param(
            b"HTTP/1.1 204 No Content\r\nContent-Length: 10\r\n\r\n" + SMUGGLED, id="where no body is"
        ),
        pytest.param(b"HTTP/1.1 304 Not Modified\r\n\r\n" + SMUGGLED, id="where nothing changed"),
    ],
)
@pytest.mark.parametrize("way", ["plain", "TLS", "proxy"])
def test_what_nobody_asked_for_is_never_the_next_answer(
    first: bytes, way: str, authority: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(path: str, times: int) -> tuple[bytes, bool]:
        return (first if path.endswith("/first") else OK + b"Content-Length: 4\r\n\r\ngood"), False

    if way == "TLS":
        monkeypatch.setenv("SSL_CERT_FILE", str(authority[0]))
        monkeypatch.setattr(Server, "chain", authority[1])
    with answering(answer) as server, Client() as client:
        base = server.url
        if way == "proxy":  # which is asked for whole addresses
            monkeypatch.setenv("http_proxy", server.url)
            base = "http://store.invalid"
        ask(client, f"{base}/first")
        assert ask(client, f"{base}/second") == b"good"


def test_a_connection_is_used_again_after_every_way_a_body_can_end() -> None:
    kinds = ("a length", "chunks", "chunks with trailers", "interim answers", "a folded length")

    def answer(path: str, times: int) -> tuple[bytes, bool]:
        return UNDERSTOOD[kinds[int(path[1:])]], False

    with answering(answer) as server, Client() as client:
        connections = set()
        for number in range(len(kinds)):
            assert ask(client, f"{server.url}/{number}") == BODY
            (idle,) = next(iter(client._idle.values()))
            connections.add(id(idle))
        assert len(connections) == 1


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "ftp://host/x", "http://a b/", "http://user:pw@host/"],
)
def test_a_redirect_that_leads_to_no_web_server_is_refused(location: str) -> None:
    with pytest.raises(StorageError, match="does not follow"):
        Address(url="http://here/x").moved(location)


def test_a_redirect_from_a_secured_host_to_one_that_is_not_is_refused() -> None:
    with pytest.raises(StorageError, match="does not follow"):
        Address(url="https://here/x").moved("http://here/x")
    assert Address(url="http://here/x").moved("https://there/y").url == "https://there/y"


def test_a_redirect_within_a_site_keeps_what_must_be_said() -> None:
    key = (("Authorization", "Bearer x"),)
    assert Address(url="http://[::1]:80/a/b", headers=key).moved("../c").headers == key
    assert Address(url="http://here/a", headers=key).moved("http://there/a").headers == ()


def test_a_secured_connection_that_was_closed_is_not_read_in_c(
    authority: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it would read from is freed."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority[0]))
    monkeypatch.setattr(Server, "chain", authority[1])
    long = OK + b"Content-Length: 500000\r\n\r\n" + b"x" * 500_000
    with answering(lambda path, times: (long, False)) as server, Client() as client:
        exchange = Exchange(client, Address(url=f"{server.url}/x"))
        exchange.answer()
        exchange._connection.close()
        with pytest.raises(NetworkError):
            read_all(exchange.read_into)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_who_is_woken_seldom_does_not_wait_for_what_never_comes(
    scheme: str, authority: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is left behind the last slice, the server says nothing more and keeps the connection."""
    trusted, chain = authority
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    monkeypatch.setattr(Server, "chain", chain if scheme == "https" else None)
    mib, record = 1 << 20, 16 << 10
    behind = [
        0,
        1,
        256 * 1024,
        512 * 1024 - record,
        *(512 * 1024 + more for more in (-1, 0, 1, record, 70_000)),
    ]
    body = random.Random(0).randbytes(3 * mib)

    def answer(path: str, count: int) -> tuple[bytes, bool]:
        size = int(path[1:])
        return OK + f"Content-Length: {size}\r\n\r\n".encode() + body[:size], False

    with answering(answer) as server, Client(timeout_s=20.0) as client:
        began = time.monotonic()
        for size in (2 * mib + rest for rest in behind):
            with closing(Exchange(client, Address(url=f"{server.url}/{size}"))) as exchange:
                exchange.answer()
                view, found = memoryview(bytearray(mib)), bytearray()
                while count := exchange.read_into(view):
                    found += view[:count]
                assert found == body[:size]
        assert time.monotonic() - began < 15
