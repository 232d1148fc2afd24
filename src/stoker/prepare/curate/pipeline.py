"""Step runner: batches of documents through the steps, what each does counted by source, with examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from stoker.prepare.curate import private
from stoker.prepare.curate.batch import Batch, Outcome, Step
from stoker.prepare.curate.corpus import BoundLines, CorpusLines, Repeated
from stoker.prepare.curate.recipe import Curation
from stoker.prepare.curate.statistics import Statistics
from stoker.prepare.sources.documents import BadRecord, Documents, Source, describe, sources_of

_EXAMPLE_CHARS = 240
_SCRUBBED_CHARS = 8192  # looked at for it: half an address at the cut would not be told as one


class Curator:
    """Applies a curation to blocks of documents."""

    def __init__(
        self, curation: Curation, sources: Sequence[Source], repeated: Repeated | None = None
    ) -> None:
        self._steps: list[Step] = [
            BoundLines(lines=step, repeated=repeated) if isinstance(step, CorpusLines) and repeated else step
            for step in curation.make()
        ]
        self._sources = sources
        self._origins = [source.origin or source.url for source in sources]
        self._only_empty_go = curation == Curation()

    def keep(self, documents: Documents, statistics: Statistics) -> Documents:
        """The documents that stay, with what a step could not judge among the bad; the rest is counted."""
        self._count_sources(documents, statistics)
        if self._only_empty_go and documents.texts.sizes.all():
            return replace(documents, bad=[])
        batch = Batch(texts=documents.texts, places=documents.places)
        bad: list[BadRecord] = []
        for step in self._steps:
            if len(batch.texts):
                batch = self._pass(step, batch, statistics, bad)
        return Documents(texts=batch.texts, places=batch.places, bad=bad)

    def _count_sources(self, documents: Documents, statistics: Statistics) -> None:
        count_sources(
            statistics, self._origins, documents.places, documents_in=1, bytes_in=documents.texts.sizes
        )

    def _pass(self, step: Step, batch: Batch, statistics: Statistics, bad: list[BadRecord]) -> Batch:
        outcome = step.run(batch)
        for kind, count in outcome.found.items():
            statistics.found[step.name, kind] += count
        gone = [row for row, reason in enumerate(outcome.reasons) if reason]
        for row in gone:
            if row in outcome.bad:
                where = describe(int(batch.places[row]), self._sources)
                bad.append(replace(outcome.bad[row], where=where))
            else:
                self._count_drop(step, batch, row, outcome.reasons[row], statistics)
        if outcome.texts is not None:
            self._count_changes(step, batch, outcome, statistics)
        after = replace(
            batch, texts=outcome.texts or batch.texts, languages=outcome.languages or batch.languages
        )
        if not gone:
            return after
        return after.take(np.delete(np.arange(len(batch.texts)), gone))

    def _count_drop(self, step: Step, batch: Batch, row: int, reason: str, statistics: Statistics) -> None:
        place = int(batch.places[row])
        statistics.drop(reason, int(batch.texts.sizes[row]))
        statistics.funnel[step.name, reason, self._origin(place)] += 1
        if statistics.wants_example(step.name, reason):
            text, _ = private.scrubbed(batch.texts.text(row)[:_SCRUBBED_CHARS], private.KINDS)
            where = describe(place, self._sources)
            statistics.drop_example(step.name, reason, where=where, text=text[:_EXAMPLE_CHARS])

    def _count_changes(self, step: Step, batch: Batch, outcome: Outcome, statistics: Statistics) -> None:
        assert outcome.texts is not None
        before, after = batch.texts.views(), outcome.texts.views()
        for row, reason in enumerate(outcome.reasons):
            if not reason and before[row] != after[row]:
                statistics.changed[step.name, "changed", self._origin(int(batch.places[row]))] += 1

    def _origin(self, place: int) -> str:
        return self._origins[sources_of(place)]


def count_drops(
    statistics: Statistics,
    sources: Sequence[Source],
    why: tuple[str, str],
    documents: Documents,
    rows: npt.NDArray[np.intp],
) -> None:
    """Count documents that a step drops for a reason, by source."""
    if len(rows):
        step, reason = why
        statistics.drop(reason, int(documents.texts.sizes[rows].sum()), documents=len(rows))
        for number in sources_of(documents.places[rows]).tolist():
            statistics.funnel[step, reason, sources[number].origin or sources[number].url] += 1


def count_sources(
    statistics: Statistics, origins: Sequence[str], places: np.ndarray, **sums: np.ndarray | int
) -> None:
    """Add to the sums of each source, `documents_in` or `tokens_out` say, a number per document."""
    if not len(places):
        return
    numbers = sources_of(places.astype(np.int64))
    for name, values in sums.items():
        weights = np.broadcast_to(np.asarray(values, np.float64), numbers.shape)
        totals = np.bincount(numbers, weights)
        for number in np.flatnonzero(totals).tolist():
            statistics.sources[name, origins[number]] += int(totals[number])
