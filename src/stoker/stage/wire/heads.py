"""HTTP/1.1 message syntax (RFC 9112): the head of an answer and where its body ends, read strictly. Pure.

Whoever is lenient where a cache or proxy on the way is strict sees other messages than that one does, and
takes one answer's bytes for another's (response smuggling). So what the grammar does not allow is refused,
and a connection whose answer can be read in two ways is not used again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_STATUS = re.compile(r"HTTP/1\.([01]) ([1-9]\d\d)(?: .*)?", re.ASCII).fullmatch
_FIELD = re.compile(r"([!#$%&'*+.^_`|~\w-]+):(.*)", re.ASCII).fullmatch
_BARE = re.compile(r"\r(?!\n)|(?<!\r)\n|\0").search
_FOLD = re.compile(r"\r\n[ \t]+")
_DECIMAL = re.compile(r"\d{1,18}", re.ASCII).fullmatch
_HEX = re.compile(r"[0-9a-fA-F]{1,15}").fullmatch
_ENDLESS = 1 << 62


class BadHead(ValueError):
    """What came is no answer as HTTP/1.1 has it; says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of a response; header names in lower case."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    is_1_0: bool = False


def read_head(text: str) -> Answer:
    """A head without its empty line. Fields that say where the body ends must agree with themselves."""
    if _BARE(text):
        raise BadHead("a line that ends in half a line break")
    first, *lines = _FOLD.sub(" ", text).split("\r\n")
    status = _STATUS(first)
    if not status:
        raise BadHead(f"{first[:40]!r} where HTTP/1.1 has a status")
    headers: dict[str, str] = {}
    for line in lines:
        found = _FIELD(line)
        if not found:
            raise BadHead(f"{line[:40]!r} where HTTP/1.1 has a header")
        name, value = found[1].lower(), found[2].strip(" \t")
        if headers.get(name, value) != value and name in ("content-length", "transfer-encoding"):
            raise BadHead(f"{name} twice, as {headers[name]!r} and {value!r}")
        headers[name] = value
    return Answer(int(status[2]), headers, is_1_0=status[1] == "0")


def chunk_bytes(line: bytes) -> int:
    """The size of a chunk, from the line before it."""
    text = line.partition(b";")[0].strip(b" \t").decode("latin-1")
    if not _HEX(text):
        raise BadHead(f"{text[:20]!r} where HTTP/1.1 has the size of a chunk")
    return int(text, 16)


@dataclass(slots=True)
class Body:
    """How far a body goes: so many bytes, until its last chunk, or until the connection ends."""

    left: int = 0
    chunked: bool = False
    keep: bool = False  # the connection may be used again afterwards
    at_first_chunk: bool = True

    @classmethod
    def of(cls, answer: Answer) -> Body:
        length, coding = answer.headers.get("content-length"), answer.headers.get("transfer-encoding")
        if answer.status in (204, 304):
            return cls(keep=_is_kept(answer))
        if coding is not None:
            if coding.lower() != "chunked":
                raise BadHead(f"a body in the coding {coding[:40]!r}, which nobody asked for")
            return cls(chunked=True, keep=_is_kept(answer) and length is None and not answer.is_1_0)
        if length is None:
            return cls(left=_ENDLESS)
        if not _DECIMAL(length):
            raise BadHead(f"{length[:20]!r} where HTTP/1.1 has the length of a body")
        return cls(left=int(length), keep=_is_kept(answer))

    @property
    def until_close(self) -> bool:
        return self.left == _ENDLESS

    @property
    def is_over(self) -> bool:
        return not self.left and not self.chunked


def _is_kept(answer: Answer) -> bool:
    said = [word.strip().lower() for word in answer.headers.get("connection", "").split(",")]
    return "close" not in said and ("keep-alive" in said or not answer.is_1_0)
