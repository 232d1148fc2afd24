"""HTTP status handling: what an answer means for a download: go on, wait, sign again, or give up. Pure."""

from __future__ import annotations

import re

from stoker.errors import ChangedError, DeniedError, StorageError
from stoker.stage.wire.heads import Answer

_BUSY = frozenset((408, 425, 429, 500, 502, 503, 504, 509))
_RETRY_AFTER_MOST_S = 60.0
_PACKED = (".gz", ".tgz", ".svgz", ".zst", ".br", ".bz2", ".xz", ".z")
_STALE_SIGNATURE = ("ExpiredToken", "Request has expired", "RequestTimeTooSkewed", "AuthenticationFailed")


class Busy(Exception):
    """The server asks for patience."""

    def __init__(self, message: str, *, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


def pin_line(version: str) -> str:
    """The header line that makes a server refuse when the file is no longer this version."""
    if version.startswith('"'):
        return f"If-Match: {version}\r\n"
    if is_date(version):
        return f"If-Unmodified-Since: {version}\r\n"
    return ""  # a weak ETag never matches, a hub's hash and an mtime mean nothing to a web server


def is_etag(version: str) -> bool:
    return version.startswith(('"', 'W/"'))


def is_date(version: str) -> bool:
    """Whether it is a time of change, as HTTP has it."""
    return version.endswith(" GMT")


def says_version(answer: Answer, version: str) -> bool:
    """Whether an answer names its version in the way this one is named, so that they can be compared."""
    if is_etag(version):
        return is_etag(answer.headers.get("etag", "").strip())
    return is_date(version) and "last-modified" in answer.headers


def range_line(start: int, stop: int) -> str:
    return f"Range: bytes={start}-{stop - 1}\r\n"


def version_of(answer: Answer) -> str:
    """What changes when the content does, as the server names it; nothing where it names nothing that
    would: a file that changed within this second may do so again and keep its time (RFC 9110, 8.8.2.2)."""
    if etag := answer.headers.get("etag", "").strip():
        return etag
    since = answer.headers.get("last-modified", "")
    return since if _seconds_between(since, answer.headers.get("date", "")) >= 1 else ""


def _seconds_between(first: str, second: str) -> float:
    from email.utils import parsedate_to_datetime  # 20 ms, and nearly every store has ETags

    try:
        return (parsedate_to_datetime(second) - parsedate_to_datetime(first)).total_seconds()
    except (TypeError, ValueError):  # no dates, or not to be compared
        return 0.0


def total_bytes(answer: Answer) -> int | None:
    """The size of the whole file, where the answer says it."""
    text = answer.headers.get("content-range", "").rpartition("/")[2]
    if answer.status == 200:  # with chunks a length, if there is one, is not the body's
        text = "" if "transfer-encoding" in answer.headers else answer.headers.get("content-length", "")
    return int(text) if text.isdigit() else None


def check_facts(answer: Answer, *, url: str, bytes: int, version: str, start: int) -> None:
    """Raise ChangedError if a 200 or 206 is about another version of the file than the one asked for."""
    size, now = total_bytes(answer), version_of(answer)
    if size is not None and size != bytes:
        raise changed(url, f"it has {size:,} bytes now and had {bytes:,}")
    if is_etag(version) and is_etag(now) and now != version:
        raise changed(url, f"its ETag is {now} now and was {version}")
    since = answer.headers.get("last-modified", "")
    if is_date(version) and since and since != version:
        raise changed(url, f"it was last modified {since} and had been {version}")
    if answer.status != 206:
        return
    said = answer.headers.get("content-range", "")
    found = re.match(r"bytes (\d+)-", said)
    if not found or int(found[1]) != start:
        raise StorageError(
            f"{url}: asked for byte {start:,} the server answered with {said or 'it does not say which'}",
            hint="a cache or proxy between here and the server is broken: go around it",
        )


def check_encoding(answer: Answer, *, url: str) -> None:
    """Refuse what a web server has packed although nobody wanted it packed: its bytes are not the file's. An
    archive that it only calls so (Apache and .gz) is meant as it comes."""
    coding = answer.headers.get("content-encoding", "").lower()
    path = url.partition("?")[0].partition("#")[0].lower()
    if coding not in ("", "identity") and not path.endswith(_PACKED):
        raise StorageError(
            f"{url} comes as {coding[:40]}, though it was asked for as it is: that is not the file",
            hint="have the server send it without Content-Encoding, or name a file that is packed itself",
        )


def refuse(answer: Answer, said: str, *, url: str) -> None:
    """Raise what a status other than 200 and 206 means; `said` is the beginning of its body."""
    status, reason = answer.status, f"{answer.status} {_code(said)}".strip()
    if status in (200, 206):
        return
    if status in _BUSY or "SlowDown" in said:
        raise Busy(f"the server answers {reason}", after_s=_retry_after(answer))
    if status in (412, 416):
        raise changed(url, f"the server answers {reason}")
    if status in (404, 410):
        raise StorageError(f"{url} does not exist ({reason})", hint="check the name")
    if status in (401, 403) or any(sign in said for sign in _STALE_SIGNATURE):
        raise DeniedError(f"cannot read {url}: {reason}", hint=_denied_hint(url))
    raise StorageError(f"cannot read {url}: the server answers {reason}", hint="check the URL")


def is_busy(answer: Answer) -> bool:
    """Whether the answer says nothing of the file: another may come if it is asked for again."""
    return answer.status in _BUSY


def changed(url: str, how: str) -> ChangedError:
    return ChangedError(
        f"{url} changed while it was read: {how}",
        hint="run the same command again to get the new version; what belonged to the old one is not used",
    )


def _denied_hint(url: str) -> str:
    if url.startswith("hf://"):
        return "set HF_TOKEN, and accept the repository's terms on its page if it is gated"
    if url.startswith("http"):
        return "the link may have run out: get a new one"
    return (
        "check the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, or your store's) and their rights"
    )


def _retry_after(answer: Answer) -> float:
    said = answer.headers.get("retry-after", "0")
    try:
        after_s = float(said)
    except ValueError:  # a date, by the server's own clock
        after_s = _seconds_between(answer.headers.get("date", ""), said)
    return min(_RETRY_AFTER_MOST_S, max(0.0, after_s)) if after_s == after_s else 0.0


def _code(said: str) -> str:
    """`SlowDown` of an S3 error, or the first words of a page that is short."""
    found = re.search(r"<Code>(\w+)</Code>", said)
    return found[1] if found else ""
