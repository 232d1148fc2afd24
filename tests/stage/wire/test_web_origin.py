"""Web servers as they are: what they answer when something is wrong, and what must not come of it."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest
import raw_server
from raw_server import answering, plain

import stoker
from stoker.errors import BadManifestError, DeniedError, StorageError, UsageError
from stoker.stage.origins import origin
from stoker.stage.origins.origin import RemoteFile, resolve
from stoker.stage.wire.client import Client, Exchange
from stoker.stage.wire.http import Address, Connection, NetworkError
from stoker.stage.wire.wire import SLICE_BYTES, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BUSY = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n"
ABSENT = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


@pytest.fixture(autouse=True)
def _in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "backoff_s", lambda tries, luck: 0.0)


@pytest.fixture
def client() -> Iterator[Client]:
    with Client() as client:
        yield client


def test_a_redirect_that_leads_nowhere_gives_its_connection_back_once(client: Client) -> None:
    moved = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    with answering(lambda path, times: (moved, False)) as server:
        asked, nowhere = Address(url=f"{server.url}/x"), Address(url="http://127.0.0.1:1/")
        exchange = Exchange(client, asked)
        with pytest.raises(NetworkError, match="cannot connect"):
            exchange.answer()
        exchange.close()
        exchange.close()
        assert client.idle(client.endpoint(nowhere)) is None, "it leads to another server"
        connection = client.idle(client.endpoint(asked))
        assert connection is not None
        assert client.idle(client.endpoint(asked)) is None, "two would ask through one"
        connection.close()


def test_a_server_that_is_too_busy_for_a_manifest_is_asked_again() -> None:
    def answer(path: str, times: int) -> tuple[bytes, bool]:
        if path == "/corpus/manifest.json":
            return (BUSY if times == 1 else plain(b"{torn"), False)
        return plain(b"<html>Index of /corpus</html>"), False

    with answering(answer) as server, pytest.raises(BadManifestError):
        resolve(f"{server.url}/corpus")


def test_a_server_that_stays_too_busy_for_a_manifest_is_named() -> None:
    def answer(path: str, times: int) -> tuple[bytes, bool]:
        return (BUSY if path.endswith("manifest.json") else plain(b"Index of /corpus")), False

    with answering(answer) as server, pytest.raises(StorageError, match="answers 503"):
        resolve(f"{server.url}/corpus")


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    ],
)
def test_an_answer_that_is_not_http_is_asked_for_again(head: bytes) -> None:
    def answer(path: str, times: int) -> tuple[bytes, bool]:
        if path == "/file":
            return plain(b"x"), False
        return (head, True) if times == 1 else (ABSENT, False)

    with answering(answer) as server:
        assert resolve(f"{server.url}/file").files[0].bytes == 1


def test_a_file_of_a_bucket_that_may_not_be_listed_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    denied = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"
    facts = 'ETag: "1"\r\nLast-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n'

    def answer(path: str, times: int) -> tuple[bytes, bool]:
        is_there = path == "/bucket/data/file.bin"
        return (plain(b"12345", more=facts).removesuffix(b"12345") if is_there else denied), False

    with answering(answer) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
            monkeypatch.setenv(name, "x")
        (file,) = resolve("s3://bucket/data/file.bin").files
        assert (file.name, file.bytes) == ("file.bin", 5)
        with pytest.raises(DeniedError, match="s3://bucket/data"):
            resolve("s3://bucket/data")


def test_a_server_that_answers_any_address_with_the_file_is_not_read_to_its_end() -> None:
    """Scripts that serve downloads leave it open what follows their name: the file would fill the memory."""
    endless = b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n" + bytes(100_000)
    with answering(lambda path, times: (endless, False)) as server:
        assert resolve(f"{server.url}/file").files[0].bytes == 999_999_999_999


@pytest.mark.parametrize("length", ["Content-Length: 999999999999", "Connection: close"])
def test_a_manifest_without_end_is_refused(length: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "MOST_MANIFEST_BYTES", 200_000)
    endless = f"HTTP/1.1 200 OK\r\n{length}\r\n\r\n{{".encode() + b" " * 300_000
    with (
        answering(lambda path, times: (endless, False)) as server,
        pytest.raises(StorageError, match=r"manifest.json is larger than 200,000 bytes"),
    ):
        resolve(f"{server.url}/corpus")


def test_a_proxy_that_gives_less_than_was_asked_for_is_asked_for_the_rest() -> None:
    data, got = os.urandom(3 * SLICE_BYTES + 7), {}

    def answer(path: str, times: int) -> tuple[bytes, bool]:
        start = (times - 1) * SLICE_BYTES
        piece = data[start : start + SLICE_BYTES]
        head = (
            f"HTTP/1.1 206 Partial Content\r\nContent-Length: {len(piece)}\r\nContent-Range: bytes {start}-/"
        )
        return f"{head}{len(data)}\r\n\r\n".encode() + piece, False

    class Sink:
        def write(self, offset: int, view: memoryview) -> None:
            got[offset] = bytes(view)

    with answering(answer) as server, Wire(connections=1) as wire:
        file = RemoteFile(name="x", url=f"{server.url}/x", bytes=len(data), digest="xxh3:0")
        wire.fetch(file, missing=[(0, len(data))], sink=Sink())
    assert b"".join(got[offset] for offset in sorted(got)) == data


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:99999/x",
        "http://127.0.0.1:port/x",
        "https://[::1/x",
        "http:///x",
        "https://a b/x",
        "http://host\r\nEvil: 1/x",
        "http://host:0/x",
    ],
)
def test_what_is_no_web_address_is_told(url: str) -> None:
    with pytest.raises(UsageError, match="is no web address"):
        resolve(url)


def test_a_host_of_another_script_is_named_as_the_standard_has_it() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = Connection(ours, host="x", waits_for_all=True)
        said = connection.request(Address(url="http://例え.テスト:81/ü"), "").decode("ascii")
    assert "GET /%C3%BC HTTP/1.1\r\nHost: xn--r8jz45g.xn--zckzah:81\r\n" in said


def test_a_server_with_an_ipv6_address_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(raw_server, "ADDRESS", "::1")
    asked: list[str] = []

    def answer(path: str, times: int) -> tuple[bytes, bool]:
        asked.append(path)
        return (plain(b"six") if path == "/x" else b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"), False

    with answering(answer) as server:
        assert server.url.startswith("http://[::1]:")
        assert stoker.fetch(f"{server.url}/x", cache=tmp_path / "c").read_bytes() == b"six"
