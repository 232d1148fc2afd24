"""Columnar text: a source, a piece of it, and the documents read from it, as one buffer and offsets."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

# A block is what one round of parse, filter, hash and encode works on: large enough to pay for the
# round's fixed costs (a millisecond in the tokenizer's array library alone), small beside the memory
# a worker may take.
BLOCK_BYTES = 4 << 20


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
    origin: str = ""  # the name it was given by: statistics are kept by these
    field: str = ""  # where it has others than the rest of the command asks for
    template: str = ""
    weight: float = 1.0  # how often its documents are taken
    max_tokens: int = 0  # of all sources of this origin; 0: any


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Units `start` to `stop` of the source with this number."""

    source: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """How messages become text: a chat template, the names that it may use (`bos_token`), and whether what
    the assistant says is marked for a loss mask."""

    template: str = ""
    special: tuple[tuple[str, str], ...] = ()
    mask: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How to read: which field holds the text, or which several a template joins, or which the messages of a
    chat; whether a line is a document, what is too long."""

    field: str = "text"
    template: str = ""
    chat: str = ""
    lines: bool = False
    max_document_bytes: int = 32 << 20
    conversation: Conversation = dataclasses.field(default_factory=Conversation)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Reading:
        talk = plain["conversation"]
        special = tuple((name, token) for name, token in talk["special"])
        return cls(**{**plain, "conversation": Conversation(**{**talk, "special": special})})


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRecord:
    """Something that is not a document: where it is, and a word and a sentence on why; damage may have
    taken more than one."""

    where: str
    reason: str
    detail: str
    documents: int = 1


class Texts:
    """Many texts as one UTF-8 buffer and the offsets between them, as Arrow and the tokenizers have
    them: text i is bytes offsets[i] to offsets[i + 1]. No Python object per text until one is asked for."""

    def __init__(self, data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> None:
        self.data = data
        self.offsets = offsets

    @classmethod
    def of(cls, texts: Iterable[str | bytes]) -> Texts:
        encoded = [text.encode() if isinstance(text, str) else text for text in texts]
        offsets = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(text) for text in encoded], out=offsets[1:])
        return cls(np.frombuffer(b"".join(encoded), np.uint8), offsets)

    @classmethod
    def join(cls, parts: Sequence[Texts]) -> Texts:
        """Several as one."""
        if len(parts) == 1:
            return parts[0]
        data = np.concatenate([part.data[part.offsets[0] : part.offsets[-1]] for part in parts])
        sizes = np.concatenate([part.sizes for part in parts])
        return cls(data, np.concatenate([[0], np.cumsum(sizes)]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def bytes(self) -> int:
        return int(self.offsets[-1] - self.offsets[0])

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)

    def views(self) -> list[memoryview]:
        """One view of each text's bytes."""
        buffer, bounds = self.data.data, self.offsets.tolist()
        return [buffer[start:stop] for start, stop in itertools.pairwise(bounds)]

    def text(self, number: int) -> str:
        return str(self.data[self.offsets[number] : self.offsets[number + 1]].data, "utf-8")

    def take(self, rows: npt.NDArray[np.intp]) -> Texts:
        """Those of these numbers, in this order."""
        views = self.views()
        sizes = self.sizes[rows]
        data = np.frombuffer(b"".join([views[row] for row in rows.tolist()]), np.uint8)
        return Texts(data, np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]))

    @cached_property
    def strings(self) -> list[str]:
        return [str(view, "utf-8") for view in self.views()]


_NO_PLACES = np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """A block of documents: their texts and, for each, its place in the source (a byte offset or a
    row number: what orders documents of one source); and what was no document."""

    texts: Texts = field(default_factory=lambda: Texts.of([]))
    places: npt.NDArray[np.int64] = field(default_factory=lambda: _NO_PLACES)
    bad: list[BadRecord] = field(default_factory=list)

    @classmethod
    def of(
        cls, texts: Sequence[str | bytes], places: Sequence[int], bad: Sequence[BadRecord] = ()
    ) -> Documents:
        return cls(texts=Texts.of(texts), places=np.array(places, np.int64), bad=list(bad))

    def take(self, rows: npt.NDArray[np.intp]) -> Documents:
        """Those of these numbers, in this order."""
        return Documents(texts=self.texts.take(rows), places=self.places[rows], bad=self.bad)

    @classmethod
    def join(cls, parts: Sequence[Documents]) -> Documents:
        return cls(
            texts=Texts.join([part.texts for part in parts]),
            places=np.concatenate([part.places for part in parts]),
            bad=[record for part in parts for record in part.bad],
        )


# A location is a place among all sources as one number: eight million sources, a terabyte each.
_PLACE_BITS = 40
MOST_SOURCES, MOST_BYTES = 1 << 23, 1 << _PLACE_BITS


def locations(source: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The locations of places of one source; they sort as the sources and then the places do."""
    return places + (source << _PLACE_BITS)


_Location = TypeVar("_Location", int, npt.NDArray[np.int64])


def sources_of(location: _Location) -> _Location:
    """The number of the source that a location, or each of an array, lies in."""
    return location >> _PLACE_BITS


def describe(location: int, sources: Sequence[Source]) -> str:
    """A location in words."""
    return f"{sources[location >> _PLACE_BITS].url} at {location & (MOST_BYTES - 1):,}"
