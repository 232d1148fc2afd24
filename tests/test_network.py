"""One policy for certificates and proxies."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from stoker.errors import UsageError
from stoker.network import Authorities, Proxies, authorities
from stoker.storage import open_store

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("SSL_CERT_FILE", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "SSL_CERT_DIR", "http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize("name", NAMES)
def test_the_bundle_that_people_set_is_used(name: str, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----")
    assert authorities({name: f"{tmp_path}/ca.pem"}) == Authorities(file=f"{tmp_path}/ca.pem")


@pytest.mark.parametrize("name", ["SSL_CERT_DIR", *NAMES[1:]])
def test_a_folder_of_authorities_is_used(name: str, tmp_path: Path) -> None:
    assert authorities({name: str(tmp_path)}) == Authorities(folder=str(tmp_path))


def test_what_openssl_knows_comes_before_what_other_tools_do(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----")
    environ = {
        "AWS_CA_BUNDLE": "/nowhere",
        "SSL_CERT_FILE": f"{tmp_path}/ca.pem",
        "SSL_CERT_DIR": str(tmp_path),
    }
    assert authorities(environ) == Authorities(file=f"{tmp_path}/ca.pem", folder=str(tmp_path))


@pytest.mark.parametrize("name", ["SSL_CERT_DIR", *NAMES])
def test_a_bundle_that_is_not_there_is_said(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"{name}=.*gone is not a"):
        authorities({name: str(tmp_path / "gone")})
    assert authorities({}) == Authorities()


@pytest.mark.parametrize("proxy", ["https://proxy:3128", "socks5://proxy:1080", "socks5h://user:pw@proxy"])
@pytest.mark.parametrize("url", ["https://host/x", "s3://bucket"])
def test_a_proxy_that_is_not_spoken_here_is_refused(
    proxy: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", proxy)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://store.example")
    with pytest.raises(UsageError, match="not spoken here") as caught:
        Proxies().of(urlsplit(url)) if url.startswith("https") else open_store(url)
    assert "pw" not in str(caught.value)


def test_a_server_that_is_excepted_needs_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "socks5://proxy:1080")
    monkeypatch.setenv("no_proxy", "host,127.0.0.1")
    assert Proxies().of(urlsplit("https://host:8443/x")) == ""


def test_a_proxy_without_a_scheme_is_plain_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "proxy:3128")
    assert Proxies().of(urlsplit("https://host/x")) == "http://proxy:3128"
