"""Data filtering: length and quality heuristics, a user's filter; and the count of all that goes.

Duplicates are found later, where documents meet (shuffle.py, neardup.py); their drops are counted in
the same statistics.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import xxhash

from stoker.errors import UsageError
from stoker.prepare.sources.documents import Documents

Verdict = bool | str
UserFilter = Callable[[str], Verdict]

# Thresholds of the Gopher rules (Rae et al. 2021, table A1), which others kept with little change.
_WORDS = (50, 100_000)
_WORD_LENGTH = (3.0, 10.0)
_SYMBOLS_PER_WORD = 0.1
_ALPHABETIC_SHARE = 0.8
_REPEATED_LINES = 0.3
_SYMBOL = re.compile(r"#|\.\.\.|…")


@dataclass(frozen=True, kw_only=True, slots=True)
class Curation:
    """What to drop before tokenising."""

    min_chars: int = 1
    max_chars: int = 0
    quality: bool = False
    filter: str = ""

    def __post_init__(self) -> None:
        if self.min_chars < 0 or self.max_chars < 0:
            raise UsageError("document lengths cannot be negative", hint="use --min-chars 1 or more")
        if self.max_chars and self.max_chars < self.min_chars:
            raise UsageError(
                f"--max-chars {self.max_chars} is under --min-chars {self.min_chars}: nothing would stay",
                hint="raise the one or lower the other",
            )


@dataclass(kw_only=True, slots=True)
class Statistics:
    """Documents and bytes in, out, and dropped by reason. Statistics of tasks add up."""

    documents_in: int = 0
    bytes_in: int = 0
    documents_out: int = 0
    bytes_out: int = 0
    tokens_out: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_bytes: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    bad_examples: list[str] = field(default_factory=list)
    # documents by length: key k counts those of 2^k to 2^(k+1) - 1 tokens
    lengths: Counter[int] = field(default_factory=Counter)

    def drop(self, reason: str, text_bytes: int, documents: int = 1) -> None:
        self.dropped[reason] += documents
        self.dropped_bytes[reason] += text_bytes

    def add(self, other: Statistics) -> None:
        for name in ("documents_in", "bytes_in", "documents_out", "bytes_out", "tokens_out"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("dropped", "dropped_bytes", "bad", "lengths"):
            getattr(self, name).update(getattr(other, name))
        self.bad_examples = (self.bad_examples + other.bad_examples)[:_EXAMPLES]

    def note_bad(self, reason: str, example: str) -> None:
        self.bad[reason] += 1
        if len(self.bad_examples) < _EXAMPLES:
            self.bad_examples.append(example)

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for markers and statistics.json."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        plain["lengths"] = {str(power): count for power, count in sorted(self.lengths.items())}
        return {k: dict(sorted(v.items())) if isinstance(v, Counter) else v for k, v in plain.items()}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Statistics:
        counters = {name: Counter(plain[name]) for name in ("dropped", "dropped_bytes", "bad")}
        lengths = Counter({int(power): count for power, count in plain["lengths"].items()})
        return cls(**{**plain, **counters, "lengths": lengths})


_EXAMPLES = 20


class Curator:
    """Applies a curation to blocks of documents."""

    def __init__(self, curation: Curation) -> None:
        self._curation = curation
        self._user = load_filter(curation.filter) if curation.filter else None
        self._only_empty_go = curation == Curation()  # the default, worth a look at whole blocks

    def keep(self, documents: Documents, statistics: Statistics) -> Documents:
        """The documents that stay; the rest is counted."""
        if self._only_empty_go and documents.texts.sizes.all():
            return documents
        texts, places = [], []
        for text, place in zip(documents.texts.strings, documents.places.tolist(), strict=True):
            verdict = self._judge(text)
            if isinstance(verdict, _Drop):
                statistics.drop(verdict.reason, len(text.encode()))
            else:
                texts.append(verdict)
                places.append(place)
        return Documents.of(texts, places)

    def _judge(self, text: str) -> str | _Drop:
        reason = _length_fault(text, self._curation) or (self._curation.quality and quality_fault(text))
        if reason:
            return _Drop(reason)
        if self._user is None:
            return text
        verdict = self._user(text)
        if isinstance(verdict, str):
            reason = _length_fault(verdict, self._curation)
            return _Drop(reason) if reason else verdict
        return text if verdict else _Drop("filter")


@dataclass(frozen=True, slots=True)
class _Drop:
    reason: str


def _length_fault(text: str, curation: Curation) -> str:
    if len(text) < curation.min_chars:
        return "too_short" if text else "empty"
    return "too_long" if curation.max_chars and len(text) > curation.max_chars else ""


def quality_fault(text: str) -> str:
    """The first quality rule a text breaks, or nothing."""
    words = text.split()
    if not _WORDS[0] <= len(words) <= _WORDS[1]:
        return "word_count"
    if not _WORD_LENGTH[0] <= sum(map(len, words)) / len(words) <= _WORD_LENGTH[1]:
        return "word_length"
    if len(_SYMBOL.findall(text)) / len(words) > _SYMBOLS_PER_WORD:
        return "symbols"
    if sum(any(map(str.isalpha, word)) for word in words) / len(words) < _ALPHABETIC_SHARE:
        return "not_alphabetic"
    lines = [line for line in text.split("\n") if line.strip()]
    if 1 - len(set(lines)) / len(lines) > _REPEATED_LINES:
        return "repeated_lines"
    return ""


def load_filter(name: str) -> UserFilter:
    """The function behind `module:function`. It takes a text and returns whether to keep it, or the
    text to keep instead (a scrubbed one, say)."""
    module, separator, function = name.partition(":")
    try:
        if not separator:
            raise ImportError("no colon in the name")
        loaded: UserFilter = getattr(import_module(module), function)
        if not callable(loaded):
            raise TypeError(f"{function} is no function")
    except Exception as error:  # whatever the user's module raises when it is imported
        raise UsageError(
            f"cannot load the filter {name!r}: {error}",
            hint="write it as module:function, and put the module's folder on PYTHONPATH",
        ) from error
    return loaded


def filter_digest(name: str) -> str:
    """A hash of the filter's module, so that a plan knows when the filter changed."""
    function = load_filter(name)
    try:
        source = inspect.getsource(inspect.getmodule(function) or function)
    except (OSError, TypeError):  # a built-in or a native function has no source to read
        source = repr(name)
    return xxhash.xxh3_128_hexdigest(source.encode())
