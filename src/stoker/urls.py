"""Where things are: URLs and plain paths taken apart and put together, and what a store says of a file.

Both kinds of stores speak of these, so that `storage` can open either.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from stoker.errors import UsageError

_IN_NO_HOST = re.compile(r"[\s\\<>\"^`{|}\x00-\x1f\x7f]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A file or object: its path in the store, its size, and what changes when its content does."""

    path: str
    bytes: int
    version: str = ""


def url_scheme(url: str) -> str:
    """`s3` of `s3://bucket/key`; empty for a plain path."""
    head, separator, _ = url.partition("://")
    return head.lower() if separator else ""


def local_path(url: str | Path) -> Path:
    """The path behind a plain path, in which `~` is the home folder, or a `file://` URL."""
    text = str(url)
    if url_scheme(text) == "file":
        return Path(unquote(urlsplit(text).path))
    return Path.home() / text[2:] if text == "~" or text.startswith("~/") else Path(text)


def check_web(url: str) -> None:
    """Refuse what is no web address, before anybody takes it apart and stumbles."""
    try:
        parts = urlsplit(url)
        is_one = bool(parts.hostname) and parts.port != 0 and not _IN_NO_HOST.search(parts.netloc)
    except ValueError:  # a port that is no number, or too large; half an IPv6 address
        is_one = False
    if not is_one:
        raise UsageError(
            f"{url!r} is no web address", hint="write https://HOST[:PORT]/PATH, an IPv6 HOST in []"
        )


def absolute(url: str | Path) -> str | Path:
    """The same place, also after the process has changed its folder."""
    return local_path(url).absolute() if is_local(url) else url


def is_local(url: str | Path) -> bool:
    return url_scheme(str(url)) in ("", "file")


def split_url(url: str) -> tuple[str, str]:
    """The folder and the name: `s3://bucket/a/b.jsonl` → (`s3://bucket/a`, `b.jsonl`)."""
    folder, separator, name = url.rstrip("/").rpartition("/")
    if not separator:
        return ".", name
    return folder or "/", name


def join_url(base: str | Path, path: str) -> str:
    return f"{str(base).rstrip('/')}/{path}" if path else str(base)
