"""Columnar sources: Parquet, Arrow IPC, Hugging Face datasets saved to disk or on the hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stoker.errors import BadInputError, StokerError, require
from stoker.prepare.sources.documents import BLOCK_BYTES, BadRecord, Documents, Piece, Reading, Source
from stoker.storage import named_errors, open_store, split_url

_ROWS = 1024  # per block, fewer where rows are long


def read_table(source: Source, piece: Piece, reading: Reading) -> Iterator[Documents]:
    """The text column of row groups or record batches `piece.start` to `piece.stop`. What is damaged in one
    of them loses nothing of the others."""
    try:
        with opened(source.url, source.kind) as table:
            for group in _groups(table, source.kind, piece, reading.field):
                yield from _readable(source, reading, group, damage())
    except KeyError as error:
        raise _no_column(source, reading, error) from error
    except damage() as error:
        raise_unreadable(source.url, error)
        bad = BadRecord(where=source.url, reason="truncated", detail=f"the file is damaged: {error}")
        yield Documents(bad=[bad])


def damage() -> tuple[type[Exception], ...]:
    """What Arrow raises where a file is damaged; `raise_unreadable` tells the disk's errors from these."""
    arrow = require("pyarrow", extra="arrow")
    return (arrow.ArrowInvalid, arrow.ArrowNotImplementedError, OSError)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """Rows that are stored together: where they start, how many there are (0: nobody knows), and what reads
    them again from the first in blocks of so many."""

    start: int
    rows: int
    block: int
    read: Callable[[int], Iterator[Any]]


def _readable(
    source: Source, reading: Reading, group: _Group, kinds: tuple[type[Exception], ...]
) -> Iterator[Documents]:
    """The rows of a group up to what is damaged in it; the rest is counted."""
    done, error = 0, None
    # Arrow gives a block or nothing: of the one that holds the damage, the rows before it come one by one.
    for block in dict.fromkeys((group.block, 1) if group.rows else (group.block,)):
        passed = 0
        try:
            for column in group.read(block):
                fresh = column.slice(max(0, done - passed))
                passed += len(column)
                if len(fresh):
                    yield _documents(source, reading, fresh, group.start + passed - len(fresh))
                    done = passed
            return
        except kinds as found:
            raise_unreadable(source.url, found)
            error = found
    bad = BadRecord(
        where=f"{source.url} row {group.start + done:,}",
        reason="truncated",
        detail=f"the file is damaged: {error}",
        documents=max(1, group.rows - done),
    )
    yield Documents(bad=[bad])


def units(url: str, kind: str) -> int:
    """Row groups or record batches of a file; a damaged one counts as one and fails when it is read."""
    arrow = require("pyarrow", extra="arrow")
    try:
        with opened(url, kind) as table:
            if kind == "parquet":
                return max(1, int(table.num_row_groups))
            return max(1, int(getattr(table, "num_record_batches", 1)))
    except (arrow.ArrowInvalid, OSError) as error:
        raise_unreadable(url, error)
        return 1


def raise_unreadable(url: str, error: Exception) -> None:
    """Arrow calls damage an OSError too, but has no number for it: what has one is the disk's or network's,
    and no record to skip."""
    if isinstance(error, OSError) and error.errno:
        with named_errors("read", url):
            raise error


@contextmanager
def opened(url: str, kind: str) -> Iterator[Any]:
    """The table in a file. Arrow does not close a file that it was given."""
    folder, name = split_url(url)
    with open_store(folder).open(name) as file:
        if kind == "parquet":
            # Without these a whole row group, which may be a gigabyte, is held in memory.
            yield require("pyarrow.parquet", extra="arrow").ParquetFile(
                file, pre_buffer=False, buffer_size=BLOCK_BYTES, page_checksum_verification=True
            )
            return
        ipc = require("pyarrow.ipc", extra="arrow")
        magic = file.read(6)
        file.seek(0)
        yield ipc.open_file(file) if magic == b"ARROW1" else ipc.open_stream(file)


def _groups(table: Any, kind: str, piece: Piece, field: str) -> Iterator[_Group]:
    """The row groups or record batches of a piece."""
    if kind == "parquet":
        yield from _row_groups(table, piece, field)
    elif hasattr(table, "num_record_batches"):
        yield from _record_batches(table, piece, field)
    else:
        yield from _streamed(table, field)


def _row_groups(table: Any, piece: Piece, field: str) -> Iterator[_Group]:
    if field not in table.schema_arrow.names:
        raise KeyError(field)
    row = sum(table.metadata.row_group(number).num_rows for number in range(piece.start))
    for number in range(piece.start, min(piece.stop, table.num_row_groups)):
        group = table.metadata.row_group(number)

        def read(rows: int, number: int = number) -> Iterator[Any]:
            batches = table.iter_batches(batch_size=rows, row_groups=[number], columns=[field])
            return (batch.column(0) for batch in batches)

        block = rows_per_block(group.total_byte_size, group.num_rows)
        yield _Group(start=row, rows=group.num_rows, block=block, read=read)
        row += group.num_rows


def _record_batches(table: Any, piece: Piece, field: str) -> Iterator[_Group]:
    """Where a damaged batch hides how many rows it had, those after it are numbered from where it began."""
    if field not in table.schema.names:
        raise KeyError(field)
    row = 0
    for number in range(min(piece.stop, table.num_record_batches)):
        batch = _batch_or_error(table, number)
        rows = 0 if isinstance(batch, Exception) else int(batch.num_rows)
        if number >= piece.start:
            yield _Group(start=row, rows=rows, block=_ROWS, read=partial(_cut_or_raise, batch, field))
        row += rows


def _batch_or_error(table: Any, number: int) -> Any:
    try:
        return table.get_batch(number)
    except (ValueError, NotImplementedError, OSError) as error:  # Arrow's errors are kinds of these
        return error


def _cut_or_raise(batch: Any, field: str, rows: int) -> Iterator[Any]:
    if isinstance(batch, Exception):
        raise batch
    return _cut_column(batch, field, rows)


def _streamed(table: Any, field: str) -> Iterator[_Group]:
    """A stream is read once, and what is damaged in it ends it."""
    if field not in table.schema.names:
        raise KeyError(field)

    def read(rows: int, batches: Iterator[Any] = iter(table)) -> Iterator[Any]:  # noqa: B008
        return (column for batch in batches for column in _cut_column(batch, field, rows))

    yield _Group(start=0, rows=0, block=_ROWS, read=read)


def _cut_column(batch: Any, field: str, most: int) -> Iterator[Any]:
    """The text column of a batch, in blocks worth a round."""
    column = batch.column(batch.schema.names.index(field))
    rows = min(most, rows_per_block(column.nbytes, len(column)))
    return (column.slice(start, rows) for start in range(0, len(column), rows))


def rows_per_block(size: int, rows: int) -> int:
    return max(1, min(_ROWS, BLOCK_BYTES * rows // max(1, size)))


def _documents(source: Source, reading: Reading, column: Any, place: int) -> Documents:
    texts: list[str] = []
    places: list[int] = []
    bad: list[BadRecord] = []
    for row, value in enumerate(_python_values(column), start=place):
        if isinstance(value, str) and len(value) <= reading.max_document_bytes:
            texts.append(value)
            places.append(row)
        else:
            bad.append(_explain(source, reading, row, value))
    return Documents.of(texts, places, bad)


def _python_values(column: Any) -> list[Any]:
    """Strings, or what stands in a row instead of one. Arrow trusts its producer to write UTF-8."""
    try:
        values: list[Any] = column.to_pylist()
        return values
    except UnicodeDecodeError:
        return [_value(cell) for cell in column]


def _value(cell: Any) -> Any:
    try:
        return cell.as_py()
    except UnicodeDecodeError as error:
        return error


def _explain(source: Source, reading: Reading, row: int, value: Any) -> BadRecord:
    where = f"{source.url} row {row:,}"
    if isinstance(value, UnicodeDecodeError):
        return BadRecord(where=where, reason="invalid_utf8", detail=str(value))
    if isinstance(value, str):
        detail = f"{len(value):,} characters; the limit is {reading.max_document_bytes:,}"
        return BadRecord(where=where, reason="too_long", detail=detail)
    detail = f"{reading.field} is {type(value).__name__}, not a string"
    return BadRecord(where=where, reason="missing_field" if value is None else "not_text", detail=detail)


def _no_column(source: Source, reading: Reading, error: Exception) -> BadInputError:
    return BadInputError(
        f"{source.url} has no column {reading.field!r} ({error})",
        hint="name the column that holds the text with --field",
    )


def is_saved_dataset(path: Path) -> bool:
    """Whether `datasets` wrote this folder with save_to_disk."""
    return (path / "dataset_dict.json").exists() or (path / "dataset_info.json").exists()


def saved_sources(path: Path, split: str) -> list[Source]:
    """A dataset saved to disk; of a DatasetDict, the named split."""
    try:
        return [_saved_source(path, split)]
    except (OSError, StokerError):
        raise
    except Exception as error:  # Arrow's kinds, JSON's, and what `datasets` meets where there are no rows
        raise BadInputError(
            f"cannot load the dataset in {path}: {type(error).__name__}: {error}",
            hint="it is empty or damaged: save it again with save_to_disk()",
        ) from error


def _saved_source(path: Path, split: str) -> Source:
    if (path / "dataset_dict.json").exists():
        known = json.loads((path / "dataset_dict.json").read_text("utf-8"))["splits"]
        if split not in known:
            raise BadInputError(
                f"{path} has no split {split!r}", hint=f"choose one of {', '.join(known)} with --split"
            )
        path = path / split
    return _dataset_source(f"{path}", "saved", require("datasets", extra="hf").load_from_disk(str(path)))


def hub_sources(name: str, split: str) -> list[Source]:
    """`hf://owner/name` or `hf://owner/name:config`, through the Hugging Face cache."""
    return [_dataset_source(f"hf://{name}", "hub", _load_hub(name, split), part=split)]


def read_dataset(source: Source, piece: Piece, reading: Reading) -> Iterator[Documents]:
    """Rows `piece.start` to `piece.stop`, in the dataset's own order (its indices are honoured)."""
    dataset = open_dataset(source)
    if reading.field not in dataset.column_names:
        raise _no_column(source, reading, KeyError(reading.field))
    column = dataset.select_columns([reading.field]).with_format("arrow")
    arrow = require("pyarrow", extra="arrow")
    for start in range(piece.start, piece.stop, _ROWS):
        stop = min(start + _ROWS, piece.stop)
        read = partial(_dataset_rows, column, start, stop)
        group = _Group(start=start, rows=stop - start, block=_ROWS, read=read)
        yield from _readable(source, reading, group, (arrow.ArrowInvalid, OSError))


def open_dataset(source: Source) -> Any:
    """The dataset behind a saved or hub source."""
    if source.kind == "saved":
        return require("datasets", extra="hf").load_from_disk(source.url)
    return _load_hub(source.url.removeprefix("hf://"), source.part)


def _dataset_rows(dataset: Any, start: int, stop: int, rows: int) -> Iterator[Any]:
    return (dataset[at : min(at + rows, stop)].column(0) for at in range(start, stop, rows))


def _load_hub(name: str, split: str) -> Any:
    repository, _, config = name.partition(":")
    datasets = require("datasets", extra="hf")
    try:
        return datasets.load_dataset(repository, config or None, split=split)
    except Exception as error:  # `datasets` raises a dozen kinds for a name, split or network at fault
        raise BadInputError(
            f"cannot load hf://{name}, split {split!r}: {error}",
            hint="check the name and the split, log in with `hf auth login`, or fill the cache while online",
        ) from error


def _dataset_source(url: str, kind: str, dataset: Any, part: str = "") -> Source:
    return Source(
        url=url,
        kind=kind,
        bytes=int(dataset.data.nbytes),
        units=max(1, len(dataset)),
        version=str(dataset._fingerprint),
        part=part,
    )
