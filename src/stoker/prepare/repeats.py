"""Tasks of the pass before the first: which lines stand in more than one document of the corpus.

lines   hash the lines of a split, after the steps that come before this one
common  of a range of hashes, list those of several documents and where each stands first
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from stoker.prepare.copies import complete, read_list
from stoker.prepare.curate.corpus import CorpusLines
from stoker.prepare.curate.pipeline import Curator
from stoker.prepare.curate.statistics import Statistics
from stoker.prepare.encode import split_blocks
from stoker.prepare.job import Job
from stoker.prepare.shuffle import KEYS

Numbers = npt.NDArray[np.uint64]
_NOWHERE = np.uint64(KEYS - 1)


def lines(job: Job, number: int) -> None:
    plan, step = job.plan, _step(job)
    asks = plan.curation.steps[: plan.curation.lines_at]
    curator = Curator(replace(plan.curation, steps=asks), plan.sources)
    found: list[Numbers] = []
    for documents in split_blocks(plan, number):
        kept = curator.keep(documents, Statistics())
        for text, place in zip(kept.texts.strings, kept.places.tolist(), strict=True):
            hashes = np.unique(step.hashes(text))  # once a document
            found.append(np.stack([hashes, np.full(len(hashes), place, np.uint64)], axis=1))
    pairs = np.concatenate([np.zeros((0, 2), np.uint64), *found])
    complete(job, "lines", number, pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))])


def common(job: Job, number: int) -> None:
    low, high = (KEYS * (number + side) // job.plan.match_parts for side in (0, 1))
    found = []
    for split in range(job.plan.stages["lines"]):
        pairs = read_list(job.drops("lines", split)).reshape(-1, 2)
        start = np.searchsorted(pairs[:, 0], np.uint64(low))
        stop = np.searchsorted(pairs[:, 0], np.uint64(high - 1), "right")
        found.append(np.array(pairs[start:stop]))
    pairs = np.concatenate([np.zeros((0, 2), np.uint64), *found])
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    same = pairs[1:, 0] == pairs[:-1, 0]
    is_first = np.concatenate([[True], ~same])[: len(pairs)]
    is_repeated = np.concatenate([same, [False]])[: len(pairs)]
    complete(job, "common", number, pairs[is_first & is_repeated])


class RepeatedLines:
    """What the tasks above found, mapped."""

    def __init__(self, job: Job) -> None:
        parts = range(job.plan.stages["common"])
        self._lists = [read_list(job.drops("common", part)).reshape(-1, 2) for part in parts]

    def firsts(self, hashes: Numbers) -> Numbers:
        found = np.full(len(hashes), _NOWHERE, np.uint64)
        for pairs in self._lists:
            if len(pairs):
                at = np.minimum(np.searchsorted(pairs[:, 0], hashes), len(pairs) - 1)
                here = pairs[at, 0] == hashes
                found[here] = pairs[at[here], 1]
        return found


def _step(job: Job) -> CorpusLines:
    step = job.plan.curation.steps[job.plan.curation.lines_at].make()
    assert isinstance(step, CorpusLines)
    return step
