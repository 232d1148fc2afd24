"""A batch of documents on its way through the steps, and what a step makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from stoker.prepare.sources.documents import BadRecord, Texts


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Documents: texts, locations, and the language of each once a step has told it."""

    texts: Texts
    places: npt.NDArray[np.int64]
    languages: Sequence[str] = ()

    def take(self, rows: npt.NDArray[np.intp]) -> Batch:
        languages = [self.languages[row] for row in rows.tolist()] if self.languages else ()
        return Batch(texts=self.texts.take(rows), places=self.places[rows], languages=languages)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a step says of a batch: for each document why it goes ("" if it stays), and, where the step
    changes texts or tells languages, those of all documents; what it found is counted by kind. A document
    that the step could not judge has an entry in `bad`."""

    reasons: Sequence[str]
    texts: Texts | None = None
    languages: Sequence[str] = ()
    found: Counter[str] = field(default_factory=Counter)
    bad: dict[int, BadRecord] = field(default_factory=dict)


class Step(Protocol):
    """Pure: the same batch gives the same outcome, in any process. Called from one thread."""

    @property
    def name(self) -> str: ...
    def run(self, batch: Batch) -> Outcome: ...


def edited(
    batch: Batch, edit: Callable[[str], tuple[str, str]], found: Counter[str] | None = None
) -> Outcome:
    """The outcome of a function from a text to (the text to keep instead, why it goes). What has nothing left
    goes: it would be a lone end-of-document token."""
    pairs = [edit(text) for text in batch.texts.strings]
    emptied = [bool(old) and not new for (new, _), old in zip(pairs, batch.texts.strings, strict=True)]
    changed = any(new is not old for (new, _), old in zip(pairs, batch.texts.strings, strict=True))
    return Outcome(
        reasons=[
            reason or ("empty" if gone else "") for (_, reason), gone in zip(pairs, emptied, strict=True)
        ],
        texts=Texts.of([text for text, _ in pairs]) if changed else None,
        found=found or Counter(),
    )
