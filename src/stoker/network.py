"""Certificates and proxies: one policy for every scheme, from the environment, which is read here alone.

The wire speaks TLS through Python's OpenSSL, obstore through rustls: both are told the same authorities. A
bundle is named by SSL_CERT_FILE, or by what people set for other tools: AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE,
CURL_CA_BUNDLE. Proxies are those of HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY, if they are spoken to in
plain HTTP, as nearly all are; another kind is refused rather than spoken to in the wrong language.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import SplitResult

from stoker.errors import UsageError

_BUNDLES = ("SSL_CERT_FILE", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


def certificates(environ: Mapping[str, str] = os.environ) -> str:
    """The file with the authorities to trust; empty for the system's."""
    for name in _BUNDLES:
        if path := environ.get(name, ""):
            if not os.path.isfile(path):
                raise UsageError(f"{name}={path} is not a file", hint="name a file of certificates (PEM)")
            return path
    return ""


def share_certificates() -> None:
    """Tell them to obstore, which knows one of the names, and no other way to be told."""
    if bundle := certificates():
        os.environ.setdefault("SSL_CERT_FILE", bundle)


class Proxies:
    """The proxies of the environment, read once."""

    def __init__(self) -> None:
        self._proxies: dict[str, str] = {}
        if {name.lower() for name in os.environ} & {"http_proxy", "https_proxy", "all_proxy"}:
            from urllib.request import getproxies  # 20 ms, and most machines have no proxy

            self._proxies = getproxies()

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
