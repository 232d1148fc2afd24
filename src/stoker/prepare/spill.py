"""Sorted runs (external sort): pass one's documents collected, ordered and written to a spill file.

    NAME.eE.tokens   token ids of the documents, back to back, each with its end-of-document token
    NAME.eE.text     their texts, where the output format wants them
    NAME.eE.docs     one DOCUMENT row each
    NAME.bands       MinHash bands, band by band within a run, where near duplicates are looked for
    NAME.shingles    the n-grams that prove or refute a near duplicate, and in NAME.counts how many each has

A spill is scratch: not synced, since a marker whose files are lost or short does not count.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from stoker.manifest import FileRecord
from stoker.prepare.curate.words import folded_hashes
from stoker.prepare.leftovers import hold, owner
from stoker.prepare.neardup import Sketch, sketches
from stoker.prepare.shuffle import (
    DOCUMENT,
    Gathered,
    Table,
    content_keys,
    duplicates,
    location_keys,
    slices,
    sorted_by_key,
)
from stoker.prepare.sources.documents import Texts, sources_of
from stoker.prepare.tokens import Encoded
from stoker.storage import named_errors

# Tokens and text held before a run is written. Larger runs mean fewer, longer reads in pass two.
RUN_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Ordering:
    """How documents get their keys."""

    shuffle: bool
    dedup: bool
    seed: int
    epochs: int
    fold: bool = False  # copies are told by their folded words
    again: int = 0  # which time more the documents are taken: each has an order of its own

    def ordered(self, table: Table, epoch: int) -> Table:
        """A copy of the table in this epoch's order, with its keys."""
        if not self.shuffle:
            copy: Table = table.copy()
            return copy
        make = content_keys if self.dedup else location_keys
        table["key"] = make(table, seed=self.seed + (self.again << 40), epoch=epoch)
        ordered: Table = table[sorted_by_key(table)]
        return ordered


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """Tokens put before and after every document."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return len(self.before) + len(self.after)

    def joined(self, documents: list[memoryview], dtype: np.dtype[Any]) -> bytes:
        """The documents back to back, each between its marks: one join for all of them."""
        before, after = (np.array(tokens, dtype).tobytes() for tokens in (self.before, self.after))
        return b"".join((before, (after + before).join(documents), after))


def encoded_group(block: Encoded, dtype: np.dtype[Any], marks: Marks, *, keep_texts: bool) -> Gathered:
    """A block as a shard takes it, for when no document has to move."""
    table = np.zeros(len(block.texts), DOCUMENT)
    item, lengths = dtype.itemsize, np.diff(block.offsets)
    views = slices(block.ids.astype(dtype).data.cast("B"), block.offsets[:-1] * item, lengths * item)
    table["tokens"] = lengths + marks.count
    table["start"] = (np.cumsum(table["tokens"], dtype=np.int64) - table["tokens"]) * item
    table["text_start"], table["text_bytes"] = block.texts.offsets[:-1], block.texts.sizes
    table["location"] = block.locations
    tokens = memoryview(marks.joined(views, dtype))
    texts = block.texts.data.data if keep_texts else memoryview(b"")
    return Gathered(table=table, tokens=tokens, texts=texts)


@dataclass(kw_only=True, slots=True)
class _Pending:
    """Documents waiting for their run."""

    tables: list[Table] = field(default_factory=list)
    tokens: list[npt.NDArray[Any]] = field(default_factory=list)
    texts: list[memoryview] = field(default_factory=list)
    words: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    token_count: int = 0
    text_bytes: int = 0


class SpillWriter:
    """Collects encoded documents and writes them as runs; `finish` puts the files in place."""

    def __init__(
        self,
        path: Path,
        *,
        ordering: Ordering,
        dtype: np.dtype[Any],
        marks: Marks,
        keep_texts: bool = False,
        sketch: Sketch | None = None,
        run_bytes: int = RUN_BYTES,
    ) -> None:
        self._path, self._ordering, self._dtype = path, ordering, dtype
        self._marks = marks
        self._keep_texts, self._sketch, self._run_bytes = keep_texts, sketch, run_bytes
        self._pending = _Pending()
        self._files: dict[str, ScratchFile] = {}
        self._written = {suffix: [0] * ordering.epochs for suffix in ("tokens", "text")}
        self.runs: list[dict[str, int]] = []
        self.copies = self.copied_bytes = 0
        self.copied_of: Counter[int] = Counter()  # by source
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, block: Encoded) -> None:
        """Take one block of encoded documents."""
        pending, texts = self._pending, block.texts
        table = np.zeros(len(texts), DOCUMENT)
        table["location"] = block.locations
        table["text_bytes"] = texts.sizes
        table["start"] = block.offsets[:-1] + pending.token_count
        table["tokens"] = np.diff(block.offsets)
        words = _words_of(texts) if self._sketch or self._ordering.fold else []
        if self._sketch:
            pending.words += words
        if self._ordering.dedup:
            contents: Sequence[Any] = words if self._ordering.fold else texts.views()  # buffers
            digests = np.frombuffer(b"".join(map(xxhash.xxh3_128_digest, contents)), ">u8").reshape(-1, 2)
            table["high"], table["low"] = digests[:, 0], digests[:, 1]
        pending.tables.append(table)
        pending.tokens.append(block.ids.astype(self._dtype))
        pending.token_count += len(block.ids)
        if self._keep_texts:
            pending.texts += texts.views()
            pending.text_bytes += texts.bytes
        if pending.token_count * self._dtype.itemsize + pending.text_bytes >= self._run_bytes:
            self._write_run()

    def finish(self) -> list[FileRecord]:
        """Write the last run and give the files their names."""
        if self._pending.tables:
            self._write_run()
        return [file.finish() for file in self._files.values()]

    def __enter__(self) -> SpillWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def _write_run(self) -> None:
        pending, self._pending = self._pending, _Pending()
        table = np.concatenate(pending.tables)
        table["text_start"] = np.arange(len(table))  # whose text is whose, until the texts have a place
        tokens = np.concatenate(pending.tokens)
        kept = self._without_copies(table)
        for epoch in range(self._ordering.epochs):
            rows = self._write_epoch(epoch, kept, tokens.data.cast("B"), pending.texts)
            if self._sketch and epoch == 0:
                self._write_sketches(pending.words, rows, self._sketch)
        self.runs.append(
            {
                "documents": len(kept),
                "tokens": int(kept["tokens"].sum(dtype=np.int64)) + self._marks.count * len(kept),
                "text_bytes": int(kept["text_bytes"].sum(dtype=np.int64)),
            }
        )

    def _write_sketches(
        self, documents: list[npt.NDArray[np.uint64]], rows: npt.NDArray[np.int64], sketch: Sketch
    ) -> None:
        words, table = np.concatenate(documents), np.zeros(len(documents), DOCUMENT)
        table["tokens"] = [len(document) for document in documents]
        table["start"] = np.cumsum(table["tokens"], dtype=np.int64) - table["tokens"]
        found = sketches(words, table, sketch)
        sets = found.sets()
        self._file("bands").write(found.bands[:, rows].tobytes())
        self._file("shingles").write(b"".join([sets[row].data for row in rows.tolist()]))
        self._file("counts").write(found.counts[rows].tobytes())

    def _without_copies(self, table: Table) -> Table:
        """The first of each content. Copies share a key, so all that are spilled meet in one cell of pass
        two, which must fit memory: a page that a crawl holds a million times comes once a run."""
        if not (self._ordering.shuffle and self._ordering.dedup):
            return table
        order = sorted_by_key(table)  # keys are not set yet: by content, then by location
        repeated = duplicates(table[order])
        gone = table[order[repeated]]
        self.copies += len(gone)
        self.copied_bytes += int(gone["text_bytes"].sum(dtype=np.int64))
        self.copied_of.update(sources_of(gone["location"].astype(np.int64)).tolist())
        kept: Table = table[np.sort(order[~repeated])]
        return kept

    def _write_epoch(
        self, epoch: int, table: Table, tokens: memoryview, texts: list[memoryview]
    ) -> npt.NDArray[np.int64]:
        """Write the documents in this epoch's order; returns that order, as rows of the table."""
        ordered = self._ordering.ordered(table, epoch)
        rows: npt.NDArray[np.int64] = ordered["text_start"].copy()
        item = self._dtype.itemsize
        views = slices(tokens, ordered["start"] * item, ordered["tokens"].astype(np.int64) * item)
        ordered["tokens"] += self._marks.count
        self._place(ordered, "start", "tokens", self._written["tokens"], epoch)
        self._file(f"e{epoch}.tokens").write(self._marks.joined(views, self._dtype))
        if self._keep_texts:
            self._file(f"e{epoch}.text").write(b"".join([texts[row] for row in rows.tolist()]))
            self._place(ordered, "text_start", "text_bytes", self._written["text"], epoch)
        self._file(f"e{epoch}.docs").write(ordered.tobytes())
        return rows

    def _place(self, table: Table, start: str, size: str, written: list[int], epoch: int) -> None:
        ends = np.cumsum(table[size], dtype=np.int64)
        table[start] = written[epoch] + ends - table[size]
        written[epoch] += int(ends[-1])

    def _file(self, suffix: str) -> ScratchFile:
        if suffix not in self._files:
            self._files[suffix] = ScratchFile(self._path.with_name(f"{self._path.name}.{suffix}"))
        return self._files[suffix]


def _words_of(texts: Texts) -> list[npt.NDArray[np.uint64]]:
    """The folded words of each text, hashed; a text without words is one of its own."""
    words = [folded_hashes(text) for text in texts.strings]
    return [
        hashes if len(hashes) else np.array([xxhash.xxh3_64_intdigest(text.encode())], np.uint64)
        for hashes, text in zip(words, texts.strings, strict=True)
    ]


class ScratchFile:
    """A file under a temporary name until it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{owner()}{secrets.token_hex(6)}.tmp")
        with named_errors("write", path):
            self._file: BinaryIO = self._temporary.open("xb", buffering=0)
        hold(self._file)
        self._hash, self._bytes = xxhash.xxh3_64(), 0

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        with named_errors("write", self._path):
            while view:
                view = view[self._file.write(view) :]
        self._hash.update(data)
        self._bytes += len(data)

    def finish(self) -> FileRecord:
        self._file.close()
        os.rename(self._temporary, self._path)
        name = f"{self._path.parent.name}/{self._path.name}"
        return FileRecord(name=name, bytes=self._bytes, xxh3=self._hash.hexdigest())

    def close(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)
