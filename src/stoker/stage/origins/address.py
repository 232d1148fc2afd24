"""Presigned URLs: from the URL that names a file to an address that plain HTTP can read.

Object stores (s3, gs, az) are read through signed URLs, so that one transport serves every origin, while
credentials and their renewal stay with obstore. Where a store cannot sign (an identity of Google's or
Azure's that may not) the address stays as it is, and the wire reads ranges through obstore itself.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence

from stoker.errors import StorageError
from stoker.stage.origins.hub import hub_address
from stoker.stage.wire.http import Address
from stoker.storage import ObjectStore, is_local, url_scheme

SIGNED_S = 3600.0


class AddressBook:
    """Addresses of files, by their URLs. Keeps the stores that sign them open. Any thread may use it."""

    def __init__(self) -> None:
        self._stores: dict[str, ObjectStore] = {}
        self._lock = threading.Lock()

    def look_up(self, urls: Sequence[str]) -> dict[str, Address]:
        """The address of each URL, new: a signature made now lasts an hour."""
        found: dict[str, Address] = {}
        by_root: dict[str, list[str]] = defaultdict(list)
        for url in urls:
            scheme = url_scheme(url)
            if scheme == "hf":
                found[url] = hub_address(url)
            elif scheme in ("http", "https") or is_local(url):
                found[url] = Address.of(url)
            else:
                by_root[_root(url)].append(url)
        for root, below in by_root.items():
            found.update(self._signed(root, below))
        return found

    def store(self, url: str) -> tuple[ObjectStore, str]:
        """The store that holds an object, and the object's path in it."""
        root = _root(url)
        with self._lock:
            if root not in self._stores:
                self._stores[root] = ObjectStore(root)
            return self._stores[root], url[len(root) + 1 :]

    def _signed(self, root: str, urls: list[str]) -> dict[str, Address]:
        store, _ = self.store(urls[0])
        try:
            signed: tuple[str, ...] = store.sign([url[len(root) + 1 :] for url in urls], expires_s=SIGNED_S)
        except StorageError:
            return {url: Address(url=url) for url in urls}
        return {url: Address(url=where) for url, where in zip(urls, signed, strict=True)}


def _root(url: str) -> str:
    """`s3://bucket` of `s3://bucket/a/b`. The key is not parsed as a URL: it may hold ? and #."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"
