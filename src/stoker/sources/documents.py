"""The words of this package: a source, a piece of it, and the documents read from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# A block is what one round of parse, filter, hash and encode works on: large enough to pay for the
# round, small enough to stay in cache and far from the memory limit.
BLOCK_BYTES = 2 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One file, object or table. Its `units` are what it can be cut between: bytes of a plain text
    file, row groups of a Parquet file, rows of a table; 1 if it must be read in one go."""

    url: str
    kind: str
    bytes: int
    units: int
    version: str = ""
    compression: str = ""
    part: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Units `start` to `stop` of the source with this number."""

    source: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How to read: which field holds the text, whether a line is a document, what is too long."""

    field: str = "text"
    lines: bool = False
    max_document_bytes: int = 32 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRecord:
    """Something that is not a document: where it is, and a word and a sentence on why."""

    where: str
    reason: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """A block of documents: their texts and, for each, its place in the source (a byte offset or a
    row number: what orders documents of one source)."""

    texts: list[str] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    bad: list[BadRecord] = field(default_factory=list)


# A location is a place among all sources as one number: sixteen million sources, a terabyte each.
_PLACE_BITS = 40
MOST_SOURCES, MOST_BYTES = 1 << 24, 1 << _PLACE_BITS


def locations(source: int, places: list[int]) -> list[int]:
    """The locations of places of one source; they sort as the sources and then the places do."""
    base = source << _PLACE_BITS
    return [base + place for place in places]


def describe(location: int, sources: Sequence[Source]) -> str:
    """A location in words."""
    return f"{sources[location >> _PLACE_BITS].url} at {location & (MOST_BYTES - 1):,}"
