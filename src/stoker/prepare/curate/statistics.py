"""What curation counted: documents in, out and dropped, by step, reason and source; and examples."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_EXAMPLES = 20  # of what could not be read
_DROPPED_EXAMPLES = 3  # per step and reason

# (step, reason, source): the name that a source was given by
Path = tuple[str, str, str]


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
    # the funnel: documents that a step dropped, and that it changed, for a reason, of a source
    funnel: Counter[Path] = field(default_factory=Counter)
    changed: Counter[Path] = field(default_factory=Counter)
    # what a step found beside documents: private data by kind, lines, languages, contaminated sets
    found: Counter[tuple[str, str]] = field(default_factory=Counter)
    # (which sum, source): documents_in, bytes_in, documents_out, bytes_out, tokens_out
    sources: Counter[tuple[str, str]] = field(default_factory=Counter)
    # of media: what samples hold ("formats", "classes", "longest_side"), and what was "changed" about images
    media: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)  # the steps as documents passed them

    def drop(self, reason: str, text_bytes: int, documents: int = 1) -> None:
        self.dropped[reason] += documents
        self.dropped_bytes[reason] += text_bytes

    def drop_example(self, step: str, reason: str, *, where: str, text: str) -> None:
        kept = self.examples.setdefault(f"{step}: {reason}", [])
        if len(kept) < _DROPPED_EXAMPLES:
            kept.append({"where": where, "text": text})

    def wants_example(self, step: str, reason: str) -> bool:
        return len(self.examples.get(f"{step}: {reason}", ())) < _DROPPED_EXAMPLES

    def add(self, other: Statistics) -> None:
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _COUNTERS:
            getattr(self, name).update(getattr(other, name))
        self.bad_examples = (self.bad_examples + other.bad_examples)[:_EXAMPLES]
        self.order = list(dict.fromkeys([*self.order, *other.order]))
        for reason, some in other.examples.items():
            self.examples[reason] = (self.examples.get(reason, []) + some)[:_DROPPED_EXAMPLES]

    def note_bad(self, reason: str, example: str, documents: int = 1) -> None:
        self.bad[reason] += documents
        if len(self.bad_examples) < _EXAMPLES:
            self.bad_examples.append(example)

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for markers and statistics.json."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        return {
            name: _nested(value) if isinstance(value, Counter) else value for name, value in plain.items()
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Statistics:
        counters = {name: Counter(_flat(plain.get(name, {}))) for name in _COUNTERS}
        counters["lengths"] = Counter({int(power): count for power, count in counters["lengths"].items()})
        return cls(**{**plain, **counters})


_SUMS = ("documents_in", "bytes_in", "documents_out", "bytes_out", "tokens_out")
_COUNTERS = ("dropped", "dropped_bytes", "bad", "lengths", "funnel", "changed", "found", "sources", "media")


def _nested(counter: Counter[Any]) -> dict[str, Any]:
    """{(a, b): n} as {a: {b: n}}, sorted: JSON has no tuples for keys."""
    plain: dict[str, Any] = {}
    for key, count in sorted(counter.items()):
        *path, last = key if isinstance(key, tuple) else (str(key),)
        inner = plain
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = count
    return plain


def _flat(plain: dict[str, Any], path: tuple[str, ...] = ()) -> dict[Any, int]:
    flat: dict[Any, int] = {}
    for key, value in plain.items():
        if isinstance(value, dict):
            flat.update(_flat(value, (*path, key)))
        else:
            flat[(*path, key) if path else key] = value
    return flat
