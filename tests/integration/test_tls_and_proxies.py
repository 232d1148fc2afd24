"""One policy for TLS and proxies: https:// and s3:// trust the same authorities and go the same way."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from faults import faulty
from s3_server import S3Server, serve

import stoker
from certificates import certificate
from stage.wire.raw_server import Server, answering, plain
from stoker.errors import StorageError, UsageError
from stoker.stage.origins.origin import resolve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DATA = os.urandom(3_000_000)
BUNDLES = ("SSL_CERT_FILE", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
FOLDERS = ("SSL_CERT_DIR", *BUNDLES[1:])
VARIABLES = (*BUNDLES, "SSL_CERT_DIR", "http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(scope="module")
def authority(require_binary: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("authority"), openssl=require_binary("openssl"))


@pytest.fixture(scope="module")
def secured(
    authority: tuple[Path, Path], require_binary: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[S3Server]:
    _, chain = authority
    programs = {"rclone": require_binary("rclone"), "nginx": require_binary("nginx")}
    keys = f"ssl_certificate {chain}; ssl_certificate_key {chain.with_suffix('.key')};"
    with serve(tmp_path_factory.mktemp("s3"), **programs, settings=keys, tls=True) as server:
        (server.root / "bucket" / "x").write_bytes(DATA)
        yield server


@pytest.fixture(autouse=True)
def _environ(secured: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        for spelled in (name, name.upper()):
            monkeypatch.setenv(spelled, "")  # noted, so that whatever the code sets is taken back
            monkeypatch.delenv(spelled)
    for name, value in secured.environ().items():
        if name != "NO_PROXY":
            monkeypatch.setenv(name, value)


@pytest.fixture(params=["https", "s3"])
def url(request: pytest.FixtureRequest, secured: S3Server) -> str:
    return "s3://bucket/x" if request.param == "s3" else f"{secured.endpoint}/bucket/x"


def fetched(url: str, tmp_path: Path) -> bytes:
    return stoker.fetch(url, cache=tmp_path / "cache").read_bytes()


@pytest.mark.parametrize("name", BUNDLES)
def test_an_authority_that_is_named_is_trusted_by_every_scheme(
    name: str, url: str, authority: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(name, str(authority[0]))
    assert fetched(url, tmp_path) == DATA


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_authorities_is_trusted_by_every_scheme(
    name: str,
    url: str,
    authority: tuple[Path, Path],
    require_binary: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "authorities"
    folder.mkdir()
    (folder / "a.pem").write_bytes(authority[0].read_bytes())
    subprocess.run([require_binary("openssl"), "rehash", str(folder)], check=True)
    monkeypatch.setenv(name, str(folder))
    assert fetched(url, tmp_path) == DATA


def test_a_server_that_nobody_vouches_for_is_refused_by_every_scheme(url: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"(?i)certificate|UnknownIssuer") as caught:
        fetched(url, tmp_path)
    assert "AWS_CA_BUNDLE" in caught.value.hint


def test_another_authority_replaces_the_systems_for_every_scheme(
    url: str, require_binary: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other, _ = certificate(tmp_path / "other", openssl=require_binary("openssl"))
    monkeypatch.setenv("AWS_CA_BUNDLE", str(other))
    with pytest.raises(StorageError):
        fetched(url, tmp_path)


def test_a_bundle_without_certificates_is_told_for_every_scheme(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "empty.pem").write_text("nothing here\n")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "empty.pem"))
    with pytest.raises(UsageError, match=r"empty\.pem is not a file of certificates"):
        fetched(url, tmp_path)


def test_a_name_that_the_certificate_lacks_is_refused(
    require_binary: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = {"name": "other.example", "other_names": "DNS:*.example"}
    trusted, chain = certificate(tmp_path / "tls", openssl=require_binary("openssl"), **names)
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    monkeypatch.setattr(Server, "chain", chain)
    with (
        answering(lambda path, times: (plain(b"x"), False)) as server,
        pytest.raises(StorageError, match=r"not trusted: Hostname mismatch"),
    ):
        resolve(f"{server.url}/x")


# --- proxies --------------------------------------------------------------------------------------


def test_every_scheme_goes_through_the_proxy_and_speaks_tls_to_the_server(
    url: str,
    secured: S3Server,
    authority: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority[0]))
    port = urlsplit(secured.endpoint).port
    with faulty(f"http://127.0.0.1:{port}", lambda number, head: None) as proxy:
        monkeypatch.setenv("https_proxy", f"http://user:secret@127.0.0.1:{proxy.port}")
        assert fetched(url, tmp_path) == DATA
    assert all(head.startswith(f"CONNECT localhost:{port} HTTP/1.1\r\n") for head in proxy.tunnels)
    assert len(proxy.tunnels) >= 2, "to look, and to fetch"
    assert all("basic dxnlcjpzzwnyzxq=" in head.lower() for head in proxy.tunnels)
    assert not proxy.requests, "nothing was said in clear"


@pytest.mark.parametrize("excepted", ["localhost", "*", "127.0.0.1,localhost", ".other.example,localhost"])
def test_no_proxy_holds_for_every_scheme(
    url: str, excepted: str, authority: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority[0]))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", excepted)
    assert fetched(url, tmp_path) == DATA


@pytest.mark.parametrize(
    "proxy", ["https://127.0.0.1:9", "socks5://127.0.0.1:9", "socks5h://me:pw@127.0.0.1:9"]
)
def test_a_proxy_of_another_kind_is_refused_by_every_scheme(
    url: str, proxy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("all_proxy", proxy)
    with pytest.raises(UsageError, match="not spoken here") as caught:
        fetched(url, tmp_path)
    assert "me:pw" not in str(caught.value)


def test_a_proxy_that_wants_a_password_says_so(
    secured: S3Server, authority: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority[0]))
    listener = socket.create_server(("127.0.0.1", 0))

    def refuse() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client:
                    client.recv(4096)
                    client.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")

    thread = threading.Thread(target=refuse)
    thread.start()
    try:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(StorageError, match=r"the proxy wants a name and a password") as caught:
            resolve(f"{secured.endpoint}/bucket/x")
        assert "NAME:PASSWORD" in caught.value.hint
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
