"""Certificates and proxies: one policy for every scheme, from the environment, which is read here alone.

The wire speaks TLS through Python's OpenSSL, obstore through rustls: both are told the same authorities and
the same proxy. Authorities are those of SSL_CERT_FILE and SSL_CERT_DIR, or else the first of what people set
for other tools: AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE, CURL_CA_BUNDLE, a file or a folder; or else the system's.
Proxies are those of HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY, if they are spoken to in plain HTTP, as
nearly all are; another kind is refused rather than spoken to in the wrong language.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import SplitResult

from stoker.errors import UsageError

if TYPE_CHECKING:
    import ssl

_BUNDLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


@dataclass(frozen=True, kw_only=True, slots=True)
class Authorities:
    """Whose certificates are believed: a file, a folder, or both; neither for the system's."""

    file: str = ""
    folder: str = ""


def authorities(environ: Mapping[str, str] = os.environ) -> Authorities:
    """Those that the environment names."""
    file, folder = environ.get("SSL_CERT_FILE", ""), environ.get("SSL_CERT_DIR", "")
    _check("SSL_CERT_FILE", file, _holds_certificates, "a file of certificates")
    for each in filter(None, folder.split(os.pathsep)):
        _check("SSL_CERT_DIR", each, os.path.isdir, "a folder")
    if file or folder:
        return Authorities(file=file, folder=folder)
    name = next((name for name in _BUNDLES if environ.get(name)), "")
    path = environ.get(name, "")
    _check(name, path, _holds_certificates, "a file of certificates, or a folder of them")
    return Authorities(folder=path) if os.path.isdir(path) else Authorities(file=path)


def _check(name: str, path: str, is_right: Callable[[str], bool], kind: str) -> None:
    if path and not is_right(path):
        raise UsageError(
            f"{name}={path} is not {kind}",
            hint="name a file in PEM, or a folder that `openssl rehash` was run on, and that you may read",
        )


def _holds_certificates(path: str) -> bool:
    """A folder is believed; a file is looked at, since rustls trusts nobody by an empty one without a
    word."""
    try:
        with open(path, "rb") as file:
            return b"-----BEGIN " in file.read()
    except IsADirectoryError:
        return True
    except OSError:
        return False


def tls_context() -> ssl.SSLContext:
    """How the wire speaks TLS."""
    import ssl  # 13 ms, and a store next door speaks plain http

    trusted = authorities()
    if not (trusted.file or trusted.folder):
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks names, and trusts nobody yet
    try:
        if trusted.file:
            context.load_verify_locations(cafile=trusted.file)
        for folder in filter(None, trusted.folder.split(os.pathsep)):
            context.load_verify_locations(capath=folder)
    except (ssl.SSLError, OSError) as error:
        raise UsageError(
            f"the certificates of {trusted.file or trusted.folder} cannot be read: {error}",
            hint="name a file of certificates (PEM)",
        ) from error
    return context


def share_authorities() -> None:
    """Tell them to obstore, which knows two of the names, and no other way to be told."""
    trusted = authorities()
    for name, path in (("SSL_CERT_FILE", trusted.file), ("SSL_CERT_DIR", trusted.folder)):
        if path:
            os.environ.setdefault(name, path)


class Proxies:
    """The proxies of the environment, read once."""

    def __init__(self) -> None:
        self._proxies: dict[str, str] = {}
        if {name.lower() for name in os.environ} & {"http_proxy", "https_proxy", "all_proxy"}:
            from urllib.request import getproxies  # 20 ms, and most machines have no proxy

            self._proxies = getproxies()

    def __bool__(self) -> bool:
        return bool(self._proxies)

    def of(self, url: SplitResult) -> str:
        """The proxy on the way to a server; empty for none."""
        if not self._proxies:
            return ""
        from urllib.request import proxy_bypass

        if proxy_bypass(url.netloc.rpartition("@")[2]):
            return ""
        proxy = self._proxies.get(url.scheme, self._proxies.get("all", ""))
        proxy = proxy if "://" in proxy or not proxy else f"http://{proxy}"
        if proxy and not proxy.lower().startswith("http://"):
            raise UsageError(
                f"the proxy {proxy} for {url.scheme}://{url.hostname} is of a kind that is not spoken here",
                hint="name one that speaks plain HTTP, as http://HOST:PORT (it passes TLS on), or except the "
                "server with NO_PROXY",
            )
        return proxy
