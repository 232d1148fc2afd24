"""Portions of a corpus: weights and caps of sources, and documents held out of it; all told by content.

What decides is a hash of a document, never its place or turn: the same documents are taken on any machine,
with any other sources beside them, and of another shuffle seed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from stoker.errors import UsageError
from stoker.mixing import mixed
from stoker.prepare.curate.words import folded_hashes
from stoker.prepare.shuffle import Table
from stoker.prepare.sources.documents import Source, Texts, sources_of

_HELD, _SAMPLED, _CAPPED = (np.uint64(word) for word in (0x5EED_0001, 0x5EED_0002, 0x5EED_0003))
_BUCKETS = 16  # bits: a cap is met to 1/65,536 of its source, or to a document
_MOST_WEIGHT = 16  # each full time is a spill file of its own
_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_TAKEN = ("loss_mask", "train")

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A source by its name, and how much of it is wanted: `weight` 0.3 is three documents of ten, 2.5 each
    one twice and every other once more; `max_tokens` is the most it gives, documents drawn at random."""

    path: str
    weight: float = 1.0
    max_tokens: int = 0
    field: str = ""
    template: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.weight <= _MOST_WEIGHT:
            raise UsageError(
                f"{self.path}: a weight of {self.weight:g} makes no sense",
                hint=f"use a number over 0, up to {_MOST_WEIGHT}; 1 takes each document once",
            )
        if self.max_tokens < 0:
            raise UsageError(f"{self.path}: a cap cannot be negative", hint="leave max-tokens out for none")


_KEYS = {"path": str, "weight": float, "max_tokens": float, "field": str, "template": str}


def parse_share(text: str) -> Share:
    """`path=web/,weight=0.5,max-tokens=1e9`."""
    given: dict[str, Any] = {}
    for part in re.split(r",(?=[a-z-]+=)", text):
        name, _, value = part.partition("=")
        given[name.replace("-", "_")] = value
    return share_of(given, where=text)


def share_of(given: Mapping[str, Any], *, where: str) -> Share:
    """A share from names and values, as a flag or a recipe gives them."""
    unknown = sorted(set(given) - set(_KEYS))
    if unknown or not given.get("path"):
        raise UsageError(
            f"{where}: " + (f"a source has no {unknown[0]!r}" if unknown else "a source has no path"),
            hint="write path=web/,weight=0.5,max-tokens=1e9 (and field=, template=)",
        )
    try:
        values = {name: _KEYS[name](value) for name, value in given.items()}
        return Share(**{**values, "max_tokens": int(values.get("max_tokens", 0))})
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(f"{where}: {error}", hint="weight and max-tokens are numbers") from error


def parse_holdout(text: str) -> tuple[tuple[str, float], ...]:
    """`validation=0.01,test=0.01` as names and shares."""
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, share = part.partition("=")
        try:
            found[name] = float(share)
        except ValueError:
            found[name] = -1.0
        if not _NAME.fullmatch(name) or name in _TAKEN or not 0 < found[name] < 1:
            raise UsageError(
                f"{part!r} is no part to hold out", hint="write --holdout validation=0.01,test=0.01, say"
            )
    if sum(found.values()) >= 1:
        raise UsageError(f"{text} holds everything out", hint="leave something to train on")
    return tuple(found.items())


def held_out(texts: Texts, holdout: Sequence[tuple[str, float]]) -> Integers:
    """For each text 0, or the number (from 1) of the part it is held out for. It is told by folded words:
    copies that differ in case, punctuation or white space fall to the same part."""
    lots = _lots(np.array([_folded(text) for text in texts.strings], np.uint64), _HELD)
    ends = np.cumsum([share for _, share in holdout])
    place = np.searchsorted(ends, lots, side="right")
    found: Integers = np.where(place < len(ends), place + 1, 0).astype(np.int64)
    return found


def _folded(text: str) -> int:
    words = folded_hashes(text)
    return xxhash.xxh3_64_intdigest(words.tobytes() if len(words) else text.encode())


def times(texts: Texts, places: Integers, sources: Sequence[Source], *, by_content: bool) -> Integers:
    """How often each document is taken, by the weight of its source. Where copies stay each has a lot."""
    weights = np.array([source.weight for source in sources])[sources_of(places)]
    if (weights == 1).all():
        return np.ones(len(texts), np.int64)
    lots = np.fromiter(map(xxhash.xxh3_64_intdigest, texts.views()), np.uint64, count=len(texts))
    drawn = _lots(lots if by_content else lots ^ mixed(places.astype(np.uint64)), _SAMPLED)
    whole = np.floor(weights)
    often: Integers = (whole + (drawn < weights - whole)).astype(np.int64)
    return often


def buckets(table: Table) -> Integers:
    """The lot of each document where a cap decides, as one of 65,536."""
    lots = mixed(table["low"] ^ mixed(np.where(table["low"] == 0, table["location"], 0)) ^ _CAPPED)
    found: Integers = (lots >> np.uint64(64 - _BUCKETS)).astype(np.int64)
    return found


def capped(sources: Sequence[Source]) -> dict[str, int]:
    """The caps by origin."""
    return {source.origin: source.max_tokens for source in sources if source.max_tokens}


class Tally:
    """Tokens of each capped origin by bucket."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._caps, self._sources = capped(sources), sources
        self._sums = {origin: np.zeros(1 << _BUCKETS, np.int64) for origin in self._caps}

    def add(self, table: Table) -> None:
        found, numbers = buckets(table), sources_of(table["location"].astype(np.int64))
        for origin, sums in self._sums.items():
            mine = np.isin(numbers, _of_origin(self._sources, origin))
            np.add.at(sums, found[mine], table["tokens"][mine])

    def limits(self) -> dict[str, int]:
        """The first bucket of each origin that is not taken any more."""
        return {
            origin: int(np.searchsorted(np.cumsum(sums), self._caps[origin], side="right"))
            for origin, sums in self._sums.items()
        }


def over_cap(table: Table, sources: Sequence[Source], limits: Mapping[str, int]) -> npt.NDArray[np.bool_]:
    """Which documents are beyond the cap of their source."""
    gone = np.zeros(len(table), np.bool_)
    if limits:
        found, numbers = buckets(table), sources_of(table["location"].astype(np.int64))
        for origin, limit in limits.items():
            gone |= np.isin(numbers, _of_origin(sources, origin)) & (found >= limit)
    return gone


def _of_origin(sources: Sequence[Source], origin: str) -> list[int]:
    return [number for number, source in enumerate(sources) if source.origin == origin]


def _lots(hashes: npt.NDArray[np.uint64], salt: np.uint64) -> npt.NDArray[np.float64]:
    drawn: npt.NDArray[np.float64] = (mixed(hashes ^ salt) >> np.uint64(11)).astype(np.float64) / 2.0**53
    return drawn
