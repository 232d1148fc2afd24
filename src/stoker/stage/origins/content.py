"""Content sniffing: whether a web server sends what the name says, or a page about it. Pure.

A login page, an error page and a list of a folder all come with status 200. Where no digest will tell, the
first bytes do: a page is refused, and so is a file whose name promises a format that begins otherwise.
"""

from __future__ import annotations

import re

from stoker.errors import StorageError

HEAD_BYTES = 512  # of a file: what is looked at

_PAGE = re.compile(
    rb"(\xef\xbb\xbf)?\s*(<!--.*?-->\s*|<\?xml[^>]*>\s*)*<(!doctype\s+html|html|head|body)\b", re.I | re.S
)
_PAGES = (".html", ".htm", ".xhtml", ".shtml", ".xml", ".svg", ".md")
_BEGINNINGS: dict[str, tuple[tuple[int, bytes], ...]] = {  # where, and what; one of them
    ".gz": ((0, b"\x1f\x8b"),),
    ".tgz": ((0, b"\x1f\x8b"),),
    ".zst": ((0, b"\x28\xb5\x2f\xfd"), (1, b"\x2a\x4d\x18")),  # a frame, or one that is skipped
    ".bz2": ((0, b"BZh"),),
    ".xz": ((0, b"\xfd7zXZ\0"),),
    ".zip": ((0, b"PK"),),
    ".npz": ((0, b"PK"),),
    ".npy": ((0, b"\x93NUMPY"),),
    ".parquet": ((0, b"PAR1"), (0, b"PARE")),
    ".safetensors": ((8, b"{"),),
}


def check_content(name: str, head: bytes, *, url: str) -> None:
    """Refuse what cannot be the file of this name, by its first bytes."""
    suffix = name[name.rfind(".") :].lower() if "." in name else ""
    if suffix not in _PAGES and _PAGE.match(head):
        raise StorageError(
            f"{url} is a web page, not a file: {_shown(head)}",
            hint="it may ask for a login, or list a folder: name a file, or a dataset by the folder of its "
            "manifest.json; a page itself is staged if its name ends in .html",
        )
    beginnings = _BEGINNINGS.get(suffix, ())
    if head and beginnings and not any(head[at : at + len(mark)] == mark for at, mark in beginnings):
        raise StorageError(
            f"{url} does not begin as a {suffix} file does: {_shown(head)}",
            hint="the server may send something else under this name: look at it in a browser",
        )


def _shown(head: bytes) -> str:
    return repr(head[:60].decode("utf-8", "replace"))
