"""Lines or paragraphs that several documents of the corpus have: the first keeps them, the others do not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from stoker.prepare.curate.batch import Batch, Outcome
from stoker.prepare.sources.documents import Texts

Hashes = npt.NDArray[np.uint64]


class Repeated(Protocol):
    """Answers for hashes of lines where each stands first; 2^64 - 1 for what stands in one document only."""

    def firsts(self, hashes: Hashes) -> Hashes: ...


@dataclass(frozen=True, kw_only=True)
class CorpusLines:
    """What a first pass over the corpus looks for: lines of some length, white space and case aside."""

    paragraphs: bool = False
    min_chars: int = 30
    name: str = "corpus_lines"

    def run(self, batch: Batch) -> Outcome:
        raise NotImplementedError("it takes what the first pass found")

    def hashes(self, text: str) -> Hashes:
        """Of the lines of a text that count."""
        return np.array([number for _, number in self._parts(text) if number], np.uint64)

    def without(self, text: str, place: int, repeated: Repeated) -> tuple[str, int]:
        """(the text without lines that stand in an earlier document, or twice in it; how many went)."""
        parts = list(self._parts(text))
        firsts = iter(
            repeated.firsts(np.array([number for _, number in parts if number], np.uint64)).tolist()
        )
        seen: set[int] = set()
        kept = []
        for part, number in parts:
            if number and (next(firsts) < place or number in seen):
                continue
            seen.add(number)
            kept.append(part)
        gone = len(parts) - len(kept)
        return ("".join(kept).rstrip("\n") if gone else text), gone

    def _parts(self, text: str) -> Iterator[tuple[str, int]]:
        """Each line with its line break, and its hash; 0 for a short one, which may repeat."""
        for part in re.findall(
            r".+?(?:\n{2,}|\Z)" if self.paragraphs else r"[^\n]*\n|[^\n]+\Z", text, re.DOTALL
        ):
            folded = " ".join(part.split()).lower()
            yield part, xxhash.xxh3_64_intdigest(folded.encode()) if len(folded) >= self.min_chars else 0


@dataclass(frozen=True, kw_only=True)
class BoundLines:
    """The step with what the first pass found."""

    lines: CorpusLines
    repeated: Repeated

    @property
    def name(self) -> str:
        return self.lines.name

    def run(self, batch: Batch) -> Outcome:
        pairs = [
            self.lines.without(text, place, self.repeated)
            for text, place in zip(batch.texts.strings, batch.places.tolist(), strict=True)
        ]
        gone = sum(count for _, count in pairs)
        return Outcome(
            reasons=["only_repeated_lines" if count and not text else "" for text, count in pairs],
            texts=Texts.of([text for text, _ in pairs]) if gone else None,
            found=Counter(lines=gone) if gone else Counter(),
        )
