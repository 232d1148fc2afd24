"""Pass one's output: documents collected, ordered and written as runs of a spill file.

    NAME.eE.tokens   token ids of the documents, back to back, each with its end-of-document token
    NAME.eE.text     their texts, where the output format wants them
    NAME.eE.docs     one DOCUMENT row each
    NAME.bands       MinHash bands, band by band within a run, where near duplicates are looked for

A spill is scratch: not synced, since a marker whose files are lost or short does not count.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from stoker.manifest import FileRecord
from stoker.prepare.neardup import Sketch, bands
from stoker.prepare.shuffle import DOCUMENT, Table, content_keys, location_keys, slices, sorted_by_key
from stoker.prepare.tokens import Ids, Offsets

# Tokens and text held before a run is written. Larger runs mean fewer, longer reads in pass two.
RUN_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Ordering:
    """How documents get their keys."""

    shuffle: bool
    dedup: bool
    seed: int
    epochs: int

    def ordered(self, table: Table, epoch: int) -> Table:
        """A copy of the table in this epoch's order, with its keys."""
        if not self.shuffle:
            return table.copy()
        make = content_keys if self.dedup else location_keys
        table["key"] = make(table, seed=self.seed, epoch=epoch)
        ordered: Table = table[sorted_by_key(table)]
        return ordered


@dataclass(kw_only=True, slots=True)
class _Pending:
    """Documents waiting for their run."""

    tables: list[Table] = field(default_factory=list)
    tokens: list[npt.NDArray[Any]] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
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
        before: Sequence[int] = (),
        after: Sequence[int] = (),
        keep_texts: bool = False,
        sketch: Sketch | None = None,
    ) -> None:
        self._path, self._ordering, self._dtype = path, ordering, dtype
        self._before = np.array(before, dtype).tobytes()
        self._after = np.array(after, dtype).tobytes()
        self._extra = len(before) + len(after)
        self._keep_texts, self._sketch = keep_texts, sketch
        self._pending = _Pending()
        self._files: dict[str, _ScratchFile] = {}
        self._written = {suffix: [0] * ordering.epochs for suffix in ("tokens", "text")}
        self.runs: list[dict[str, int]] = []
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(
        self, locations: Sequence[int], texts: Sequence[bytes], ids: Ids, offsets: Offsets
    ) -> None:
        """Take one block of encoded documents."""
        pending = self._pending
        table = np.zeros(len(texts), DOCUMENT)
        table["location"] = locations
        table["text_bytes"] = [len(text) for text in texts]
        table["start"] = offsets[:-1] + pending.token_count
        table["tokens"] = np.diff(offsets)
        if self._ordering.dedup:
            digests = np.frombuffer(b"".join(map(xxhash.xxh3_128_digest, texts)), ">u8").reshape(-1, 2)
            table["high"], table["low"] = digests[:, 0], digests[:, 1]
        pending.tables.append(table)
        pending.tokens.append(ids.astype(self._dtype))
        pending.token_count += len(ids)
        if self._keep_texts:
            pending.texts += texts
            pending.text_bytes += int(table["text_bytes"].sum(dtype=np.int64))
        if pending.token_count * self._dtype.itemsize + pending.text_bytes >= RUN_BYTES:
            self._write_run()

    def finish(self) -> list[FileRecord]:
        """Write the last run and give the files their names."""
        if self._pending.tables or not self.runs:
            self._write_run()
        return [file.finish() for file in self._files.values()]

    def __enter__(self) -> SpillWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()

    def _write_run(self) -> None:
        pending, self._pending = self._pending, _Pending()
        table = np.concatenate(pending.tables) if pending.tables else np.zeros(0, DOCUMENT)
        table["text_start"] = np.arange(len(table))  # whose text is whose, until the texts have a place
        tokens = np.concatenate(pending.tokens) if pending.tokens else np.zeros(0, self._dtype)
        for epoch in range(self._ordering.epochs):
            rows = self._write_epoch(epoch, table, tokens.data.cast("B"), pending.texts)
            if self._sketch and epoch == 0:
                self._file("bands").write(bands(tokens, table, self._sketch)[:, rows].tobytes())
        self.runs.append(
            {
                "documents": len(table),
                "tokens": len(tokens) + self._extra * len(table),
                "text_bytes": int(table["text_bytes"].sum(dtype=np.int64)),
            }
        )

    def _write_epoch(
        self, epoch: int, table: Table, tokens: memoryview, texts: list[bytes]
    ) -> npt.NDArray[np.int64]:
        """Write the documents in this epoch's order; returns that order, as rows of the table."""
        ordered = self._ordering.ordered(table, epoch)
        rows: npt.NDArray[np.int64] = ordered["text_start"].copy()
        item = self._dtype.itemsize
        views = slices(tokens, ordered["start"] * item, ordered["tokens"].astype(np.int64) * item)
        ordered["tokens"] += self._extra
        self._place(ordered, "start", "tokens", self._written["tokens"], epoch)
        self._file(f"e{epoch}.tokens").write(self._joined(views))
        if self._keep_texts:
            self._file(f"e{epoch}.text").write(b"".join([texts[row] for row in rows.tolist()]))
            self._place(ordered, "text_start", "text_bytes", self._written["text"], epoch)
        self._file(f"e{epoch}.docs").write(ordered.tobytes())
        return rows

    def _joined(self, views: list[memoryview]) -> bytes:
        """Every document between its first and last tokens; one join does it for the whole run."""
        if not views:
            return b""
        return b"".join((self._before, (self._after + self._before).join(views), self._after))

    def _place(self, table: Table, start: str, size: str, written: list[int], epoch: int) -> None:
        ends = np.cumsum(table[size], dtype=np.int64)
        table[start] = written[epoch] + ends - table[size]
        written[epoch] += int(ends[-1]) if len(ends) else 0

    def _file(self, suffix: str) -> _ScratchFile:
        if suffix not in self._files:
            self._files[suffix] = _ScratchFile(self._path.with_name(f"{self._path.name}.{suffix}"))
        return self._files[suffix]


class _ScratchFile:
    """A file under a temporary name until it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
        self._file: BinaryIO = self._temporary.open("xb", buffering=0)
        self._hash, self._bytes = xxhash.xxh3_64(), 0

    def write(self, data: bytes) -> None:
        view = memoryview(data)
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
