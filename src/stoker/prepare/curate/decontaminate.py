"""Decontamination: documents that share an n-gram of words with an evaluation set go, and each set's hits are
counted."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from stoker.errors import UnreadableError, UsageError
from stoker.mixing import mixed
from stoker.prepare.curate.batch import Batch, Outcome
from stoker.prepare.curate.words import Hashes, folded_hashes


@dataclass(frozen=True, kw_only=True)
class Decontaminate:
    """`against` names evaluation sets: JSONL files, all of whose strings are taken, or text files, an
    example a line. An example shorter than `ngram` words counts as a whole."""

    against: tuple[str, ...]
    ngram: int = 13
    name: str = "decontaminate"

    def __post_init__(self) -> None:
        object.__setattr__(self, "against", tuple(self.against))
        if self.ngram < 3 or not self.against:
            raise UsageError(
                f"decontamination by {self.ngram}-grams against {len(self.against)} sets",
                hint="name evaluation files with against: [FILE, ...], and 8 to 13 words with ngram",
            )
        assert self._sets is not None  # a file that cannot be read is missed now, not after an hour

    @cached_property
    def _sets(self) -> dict[str, dict[int, Hashes]]:
        """Sorted hashes of each set's n-grams, by their length."""
        return {path: self._grams_of(path) for path in self.against}

    def _grams_of(self, path: str) -> dict[int, Hashes]:
        found: dict[int, list[Hashes]] = {}
        for example in _examples(path):
            hashes = folded_hashes(example)
            if len(hashes) >= _SHORTEST:
                size = min(self.ngram, len(hashes))
                found.setdefault(size, []).append(ngram_hashes(hashes, size))
        if not found:  # nothing would ever be found, and the report would say that all is clean
            raise UnreadableError(
                f"the evaluation set {path} has no example of {_SHORTEST} words or more",
                hint="is it the right file?",
            )
        return {size: np.unique(np.concatenate(some)) for size, some in found.items()}

    def run(self, batch: Batch) -> Outcome:
        found: Counter[str] = Counter()
        reasons = []
        for text in batch.texts.strings:
            hits = self._hits(folded_hashes(text))
            found.update(hits)
            reasons.append("contaminated" if hits else "")
        return Outcome(reasons=reasons, found=found)

    def _hits(self, hashes: Hashes) -> list[str]:
        return [
            path
            for path, sizes in self._sets.items()
            if any(np.isin(ngram_hashes(hashes, size), known).any() for size, known in sizes.items())
        ]


_SHORTEST = 5  # words: a shorter example is in every corpus by chance


def ngram_hashes(hashes: Hashes, size: int) -> Hashes:
    count = max(0, len(hashes) - size + 1)
    grams = np.zeros(count, np.uint64)
    for ahead in range(size):
        grams = mixed(grams ^ hashes[ahead : ahead + count])
    return grams


def _examples(path: str) -> list[str]:
    try:
        lines = Path(path).read_text("utf-8").splitlines()
        if Path(path).suffix.lower() in (".jsonl", ".ndjson"):
            return [text for line in lines if line.strip() for text in _strings(json.loads(line))]
    except (OSError, ValueError) as error:
        raise UnreadableError(
            f"cannot read the evaluation set {path}: {error}", hint="give a .jsonl or a text file"
        ) from error
    return [line for line in lines if line.strip()]


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for one in inner for text in _strings(one)]
