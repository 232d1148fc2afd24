"""Quality scores: a fastText classifier from a file, or a callable on batches of texts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stoker.errors import BadInputError, UnreadableError, UsageError, require
from stoker.prepare.curate.batch import Batch, Outcome
from stoker.prepare.curate.users import load_function


@dataclass(frozen=True, kw_only=True)
class Classify:
    """Documents that score under `threshold` go. `model` is a fastText file, whose probability of `label` is
    the score; `function` is MODULE:FUNCTION, from a list of texts to as many numbers."""

    threshold: float
    model: str = ""
    label: str = ""
    function: str = ""
    name: str = "classify"

    def __post_init__(self) -> None:
        if bool(self.model) == bool(self.function) or bool(self.model) != bool(self.label):
            raise UsageError(
                "a classifier is a fastText model with a label, or a function",
                hint="give model: FILE and label: NAME, or function: MODULE:FUNCTION",
            )
        if self.model and not Path(self.model).is_file():
            raise UnreadableError(f"there is no fastText model at {self.model}", hint="check the path")
        if self.model:
            require("fasttext", extra="curate")

    def run(self, batch: Batch) -> Outcome:
        scores = self._scores(batch.texts.strings)
        buckets = Counter(f"score_{min(9, max(0, int(score * 10))) / 10:.1f}" for score in scores)
        return Outcome(
            reasons=["low_score" if score < self.threshold else "" for score in scores], found=buckets
        )

    def _scores(self, texts: Sequence[str]) -> list[float]:
        if self.function:
            return self._given(texts)
        return [self._probability(" ".join(text.split())) for text in texts]

    def _given(self, texts: Sequence[str]) -> list[float]:
        """The user's scores. One that is no number would keep its document, whatever the threshold."""
        try:
            scores = [float(score) for score in self._function(list(texts))]
            fault = "" if all(map(math.isfinite, scores)) else "gave a score that is no number"
        except (Exception, SystemExit) as error:  # whatever the user's code raises
            scores, fault = [], f"failed: {type(error).__name__}: {error}"
        if not fault and len(scores) != len(texts):
            fault = f"gave {len(scores)} scores for {len(texts)} texts"
        if fault:
            raise BadInputError(
                f"the classifier {self.function} {fault}", hint="return one number for each text"
            )
        return scores

    def _probability(self, line: str) -> float:
        labels, scores = self._model.predict(line, -1)
        wanted = self.label if self.label.startswith("__label__") else f"__label__{self.label}"
        return next(
            (float(score) for label, score in zip(labels, scores, strict=True) if label == wanted), 0.0
        )

    @cached_property
    def _model(self) -> Any:
        return require("fasttext", extra="curate").load_model(self.model)

    @cached_property
    def _function(self) -> Any:
        return load_function(self.function)
