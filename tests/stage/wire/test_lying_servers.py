"""Servers that lie, or say nothing: one version or none, what was named or an error, no endless wait."""

from __future__ import annotations

import gzip
import re
import socket
import ssl
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from raw_server import answering, plain

import stoker
from stoker.errors import ChangedError, StorageError
from stoker.stage.origins.origin import RemoteFile, resolve
from stoker.stage.wire import client, dial, flight
from stoker.stage.wire.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SIZE = 9 << 20  # comes by ranges
OLD, NEW = b"o" * SIZE, b"n" * SIZE
GONE = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


@dataclass
class Site:
    """One file on a server that knows no ETags and heeds no conditions."""

    data: bytes = OLD
    changed_at: float | None = field(default_factory=lambda: time.time() - 3600)  # None: it does not say
    has_ranges: bool = True
    asked: int = 0
    while_sending: Callable[[Site, int], None] = lambda site, sent: None  # called with bytes sent in all
    sent: int = 0
    url: str = ""


@contextmanager
def serving(site: Site) -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path != "/file":
                self.send_error(404)
                return
            site.asked += 1
            wanted = (
                re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if site.has_ranges else None
            )
            start, stop = (int(wanted[1]), min(int(wanted[2]) + 1, SIZE)) if wanted else (0, len(site.data))
            self.send_response_only(206 if wanted else 200)
            self.send_header("Date", formatdate(usegmt=True))
            self.send_header("Content-Length", str(stop - start))
            if wanted:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(site.data)}")
            if site.changed_at is not None:
                self.send_header("Last-Modified", formatdate(site.changed_at, usegmt=True))
            self.end_headers()
            for at in range(start, stop, 1 << 20):  # the file is read as it is sent, as by sendfile
                piece = site.data[at : min(stop, at + (1 << 20))]
                self.wfile.write(piece)
                site.sent += len(piece)
                site.while_sending(site, site.sent)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # a client that goes is no news
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_port}/file"
    try:
        yield site
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def replace_after(count: int, *, tells: bool = True) -> Callable[[Site, int], None]:
    def replace(site: Site, sent: int) -> None:
        if site.data is OLD and sent >= count:
            site.data = NEW
            if tells and site.changed_at is not None:
                site.changed_at = time.time()

    return replace


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_file_that_is_replaced_on_its_way_is_noticed_by_its_time(has_ranges: bool, tmp_path: Path) -> None:
    with (
        serving(Site(while_sending=replace_after(3 << 20), has_ranges=has_ranges)) as site,
        pytest.raises(ChangedError, match="changed while it was read"),
    ):
        stoker.fetch(site.url, cache=tmp_path / "c")
    assert not list((tmp_path / "c").rglob("file"))


def test_without_any_version_a_file_is_taken_from_one_answer(tmp_path: Path) -> None:
    with serving(Site(changed_at=None)) as site:
        path = stoker.fetch(site.url, cache=tmp_path / "c")
        assert path.read_bytes() == OLD
        assert site.asked == 3, "its first bytes, all of it, and whether it still is that large"


def test_without_any_version_what_an_earlier_answer_brought_is_not_mixed_in(tmp_path: Path) -> None:
    def cut(site: Site, sent: int) -> None:
        if site.data is OLD and sent >= 5 << 20:
            site.data = NEW
            raise ConnectionResetError

    with serving(Site(changed_at=None, while_sending=cut)) as site:
        assert stoker.fetch(site.url, cache=tmp_path / "c").read_bytes() == NEW


def test_a_time_of_this_second_is_no_version(tmp_path: Path) -> None:
    with serving(Site(changed_at=time.time() + 2)) as site:
        assert resolve(site.url).files[0].version == ""


def test_a_server_that_stops_saying_its_version_is_not_believed(tmp_path: Path) -> None:
    def forget(site: Site, sent: int) -> None:
        if sent >= 2 << 20:
            site.data, site.changed_at = NEW, None

    with serving(Site(while_sending=forget)) as site, pytest.raises(ChangedError):
        stoker.fetch(site.url, cache=tmp_path / "c")


# --- what was named ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    [
        b"<!DOCTYPE html><html><body>Please log in</body></html>",
        b"\n  <!-- moved --> <HTML><head><title>Index of /corpus</title>",
        b'<?xml version="1.0"?>\n<html xmlns="http://www.w3.org/1999/xhtml">',
    ],
)
@pytest.mark.parametrize("name", ["corpus", "shard-00001.bin", "corpus/manifest.json"])
def test_a_page_in_the_place_of_a_dataset_is_refused(page: bytes, name: str, tmp_path: Path) -> None:
    with (
        answering(lambda path, times: (plain(page), False)) as server,
        pytest.raises(StorageError, match="is a web page"),
    ):
        stoker.fetch(f"{server.url}/{name}", cache=tmp_path / "c")


def test_a_page_that_is_meant_comes(tmp_path: Path) -> None:
    page = b"<!doctype html><p>hello"
    with answering(lambda path, times: (plain(page) if path == "/a.html" else GONE, False)) as server:
        assert stoker.fetch(f"{server.url}/a.html", cache=tmp_path / "c").read_bytes() == page


@pytest.mark.parametrize("name", ["a.npy", "a.parquet", "a.jsonl.gz", "a.zst", "a.safetensors", "a.zip"])
def test_a_file_that_does_not_begin_as_its_name_says_is_refused(name: str, tmp_path: Path) -> None:
    data = b"not what you think it is"
    with (
        answering(lambda path, times: (plain(data) if path == f"/{name}" else GONE, False)) as server,
        pytest.raises(StorageError, match="does not begin as"),
    ):
        stoker.fetch(f"{server.url}/{name}", cache=tmp_path / "c")


@pytest.mark.parametrize("size", [200, SIZE], ids=["small", "large"])
def test_a_file_that_a_server_has_packed_unasked_is_refused(size: int, tmp_path: Path) -> None:
    packed = plain(b"p" * size, more='ETag: "1"\r\nContent-Encoding: gzip\r\n')
    with (
        answering(lambda path, times: (packed if path == "/a.bin" else GONE, False)) as server,
        pytest.raises(StorageError, match="comes as gzip"),
    ):
        stoker.fetch(f"{server.url}/a.bin", cache=tmp_path / "c")


def test_an_archive_that_a_server_only_calls_packed_comes_as_it_is(tmp_path: Path) -> None:
    data = gzip.compress(b"lines")
    packed = plain(data, more="Content-Encoding: x-gzip\r\n")
    with answering(lambda path, times: (packed if path == "/a.jsonl.gz" else GONE, False)) as server:
        assert stoker.fetch(f"{server.url}/a.jsonl.gz", cache=tmp_path / "c").read_bytes() == data


# --- slow and mute ----------------------------------------------------------------------------------


@contextmanager
def trickling(head: bytes, *, every_s: float, chain: Path | None = None) -> Iterator[str]:
    """Sends a head, then a byte now and then; with a chain of certificates over TLS."""
    stop = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(head)
            try:
                while not stop.wait(every_s):
                    self.wfile.write(b"x")
            except OSError:
                return

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None
    if chain:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(chain, chain.with_suffix(".key"))
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"{'https://localhost' if chain else 'http://127.0.0.1'}:{server.server_port}/file"
    finally:
        stop.set()
        server.shutdown()
        thread.join()
        server.server_close()


class Nowhere:
    def write(self, offset: int, data: memoryview) -> None: ...


def fetch(wire: Wire, file: RemoteFile) -> None:
    if file.bytes == SIZE:
        wire.fetch(file, missing=[(0, SIZE)], sink=Nowhere())
    else:
        wire.fetch_small([file], deliver=lambda landed: None)


@pytest.mark.parametrize("size", [1000, 200_000, SIZE], ids=["tiny", "small", "large"])
@pytest.mark.parametrize("is_mute", [True, False], ids=["mute", "trickling"])
def test_a_server_that_sends_next_to_nothing_is_told_of_and_given_up(size: int, is_mute: bool) -> None:
    head = b"" if is_mute else b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: %d\r\n\r\n' % size
    told: list[str] = []
    with (
        trickling(head, every_s=60 if is_mute else 0.02) as url,
        Wire(timeout_s=0.3, patience_s=0.6, tell=told.append) as wire,
        pytest.raises(StorageError, match="brought nothing for"),
    ):
        fetch(wire, RemoteFile(name="file", url=url, bytes=size, version='"1"'))
    assert told
    assert re.search("nothing for too long|bytes a second", told[0])


@pytest.mark.parametrize("size", [200_000, SIZE], ids=["small", "large"])
@pytest.mark.parametrize("is_mute", [True, False], ids=["mute", "trickling"])
@pytest.mark.parametrize("in_c", [True, False], ids=["C", "Python"])
def test_a_secured_server_that_sends_next_to_nothing_is_given_up_too(
    size: int,
    is_mute: bool,
    in_c: bool,
    authority: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority[0]))
    if not in_c:
        monkeypatch.setattr(flight, "can_lend_tls", lambda: False)
        for module in (client, dial):
            monkeypatch.setattr(module, "tls_handle", lambda plug: 0)
    head = b"" if is_mute else b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: %d\r\n\r\n' % size
    with (
        trickling(head, every_s=60 if is_mute else 0.02, chain=authority[1]) as url,
        Wire(timeout_s=0.3, patience_s=0.3) as wire,
        pytest.raises(StorageError, match="brought nothing for"),
    ):
        fetch(wire, RemoteFile(name="file", url=url, bytes=size, version='"1"'))


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_host_that_swallows_connections_is_told_of_and_given_up(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall that drops what it does not like: as a listener whose queue is full."""
    monkeypatch.setattr(dial, "CONNECT_TIMEOUT_S", 0.2)
    with socket.socket() as full, ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        file = RemoteFile(name="x", url=f"{scheme}://127.0.0.1:{full.getsockname()[1]}/x", bytes=SIZE)
        wire = stack.enter_context(Wire(timeout_s=0.3, patience_s=0.3))
        with pytest.raises(StorageError, match=r"brought nothing.*cannot connect to 127\.0\.0\.1"):
            fetch(wire, file)


def test_a_head_that_never_ends_is_given_up() -> None:
    with (
        trickling(b"HTTP/1.1 200 OK\r\nX-Long: ", every_s=0.02) as url,
        Wire(timeout_s=0.2, patience_s=0.2) as wire,
        pytest.raises(StorageError, match=r"byte by byte|nothing for too long"),
    ):
        wire.fetch(RemoteFile(name="f", url=url, bytes=SIZE), missing=[(0, SIZE)], sink=Nowhere())


# --- secrets ----------------------------------------------------------------------------------------


def test_no_secret_of_a_url_reaches_a_record_a_report_or_a_terminal(run_stoker: Any, tmp_path: Path) -> None:
    data = b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 5\r\n\r\nhello'
    gone = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
    with answering(lambda path, times: (data if path.startswith("/file") else gone, False)) as server:
        there = server.url.replace("http://", "http://alice:s3same@")
        good, bad = f"{there}/file?token=t0ken", f"{there}/gone?token=t0ken"
        ran = [
            run_stoker("stage", url, "--cache", tmp_path / "c", *more, env={"NO_PROXY": "127.0.0.1"})
            for url, more in (
                (good, []),
                (good, ["--json"]),
                (bad, []),
                (bad, ["--json"]),
                (f"{bad}&", ["--nope"]),
            )
        ]
    assert [one.rc for one in ran] == [0, 0, 1, 1, 2]
    said = "".join(one.stdout + one.stderr for one in ran)
    written = b"".join(path.read_bytes() for path in (tmp_path / "c").rglob("*") if path.is_file())
    assert "http://***@" in said
    for secret in ("s3same", "t0ken"):
        assert secret not in said
        assert secret.encode() not in written
        assert not [path for path in (tmp_path / "c").rglob("*") if secret in str(path)]
