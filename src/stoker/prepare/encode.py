"""Tokenisation of a split: read, curate, tokenise, check a sample against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from stoker.errors import BadInputError
from stoker.prepare.chats import encode_marked
from stoker.prepare.curate.corpus import Repeated
from stoker.prepare.curate.pipeline import Curator, count_drops
from stoker.prepare.curate.statistics import Statistics
from stoker.prepare.plan import Plan
from stoker.prepare.portions import times
from stoker.prepare.sources.documents import BLOCK_BYTES, Documents, Source, Texts, describe, locations
from stoker.prepare.sources.read import read_piece
from stoker.prepare.tokens import (
    Encoded,
    Engine,
    Ids,
    Offsets,
    Referee,
    Tokenizer,
    open_engine,
)

# Documents per check against the reference, which is 40 times slower: one in 8192 costs half a percent.
_CHECK_EVERY = 8192
_CHECK_CHARS = 1 << 16


class Encoder:
    """An engine, and the referee that checks a sample of its work. Costly to open; serves many splits."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer, repeated: Repeated | None = None) -> None:
        assert plan.tokenizer
        self._plan, self._tokenizer = plan, tokenizer
        self._curator = Curator(plan.curation, plan.sources, repeated)
        self._engine: Engine = open_engine(plan.tokenizer.engine, tokenizer)
        exact = plan.tokenizer.engine == tokenizer.reference
        self._referee = None if exact else Referee(tokenizer, plan.tokenizer.engine)
        self._until_check = _CHECK_EVERY // 8

    def blocks(self, split: int, statistics: Statistics) -> Iterator[Encoded]:
        """The documents of a split that stay, encoded, block by block; what goes is counted."""
        for documents in split_blocks(self._plan, split):
            _note_bad(self._plan, documents, statistics)
            kept = self._curator.keep(documents, statistics)
            _note_bad(self._plan, kept, statistics)
            statistics.documents_in += len(documents.texts)
            statistics.bytes_in += documents.texts.bytes
            kept = self._sampled(kept, statistics)
            if len(kept.texts):
                yield self._encode(kept)

    def _sampled(self, documents: Documents, statistics: Statistics) -> Documents:
        """Without what the weight of its source leaves out."""
        plan = self._plan
        if all(source.weight >= 1 for source in plan.sources):
            return documents
        often = times(documents.texts, documents.places, plan.sources, by_content=plan.dedup)
        gone = np.flatnonzero(often == 0)
        count_drops(statistics, plan.sources, ("sampling", "sampled_out"), documents, gone)
        return documents.take(np.flatnonzero(often))

    def _encode(self, documents: Documents) -> Encoded:
        if self._plan.masked:
            texts, ids, offsets = encode_marked(self._tokenizer, documents.texts)
            return Encoded(texts=texts, locations=documents.places, ids=ids, offsets=offsets)
        ids, offsets = self._engine.encode(documents.texts)
        self._until_check -= len(documents.texts)
        if self._referee and self._until_check < 0:
            self._until_check = _CHECK_EVERY
            _check_one(self._referee, documents, ids, offsets, self._plan.sources)
        return Encoded(texts=documents.texts, locations=documents.places, ids=ids, offsets=offsets)


def _check_one(
    referee: Referee, documents: Documents, ids: Ids, offsets: Offsets, sources: tuple[Source, ...]
) -> None:
    number = len(documents.texts) // 2
    text = documents.texts.text(number)
    if len(text) <= _CHECK_CHARS:
        mine = ids[offsets[number] : offsets[number + 1]]
        where = describe(int(documents.places[number]), sources)
        referee.check(Texts.of([text]), mine, np.array([0, len(mine)]), [where])


def split_blocks(plan: Plan, split: int) -> Iterator[Documents]:
    """The documents of a split in blocks worth encoding, their places made locations."""
    parts: list[Documents] = []
    for piece in plan.splits[split]:
        for part in read_piece(plan.sources[piece.source], piece, plan.reading):
            parts.append(replace(part, places=locations(piece.source, part.places)))
            if sum(part.texts.bytes for part in parts) >= BLOCK_BYTES // 4:
                yield Documents.join(parts)
                parts = []
    if parts:
        yield Documents.join(parts)


def _note_bad(plan: Plan, documents: Documents, statistics: Statistics) -> None:
    for record in documents.bad:
        sentence = f"{record.where}: {record.reason}: {record.detail}"
        if plan.on_error == "stop":
            raise BadInputError(sentence, hint=_HINTS.get(record.reason, _MEND))
        statistics.note_bad(record.reason, sentence, documents=record.documents)


_MEND = "mend the data, or leave such records out (and counted) with --on-error skip"
_HINTS = {
    "missing_field": f"name the field that holds the text with --field; else {_MEND}",
    "not_text": f"name the field that holds the text with --field; else {_MEND}",
    "too_long": f"raise the limit with --max-document-size; else {_MEND}",
}
