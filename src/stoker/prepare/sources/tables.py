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
from stoker.prepare.sources.records import NoText, Wanted, wanted
from stoker.storage import named_errors, open_store, split_url

_ROWS = 1024  # per block, fewer where rows are long
_NAMES_SHOWN = 20


def read_table(source: Source, piece: Piece, reading: Reading) -> Iterator[Documents]:
    """The text column of row groups or record batches `piece.start` to `piece.stop`. What is damaged in one
    of them loses nothing of the others."""
    try:
        with opened(source.url, source.kind) as table:
            for group in _groups(table, source.kind, piece, wanted(reading)):
                yield from _readable(source, reading, group, damage())
    except KeyError as error:
        raise _no_column(source, error) from error
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


def _groups(table: Any, kind: str, piece: Piece, text: Wanted) -> Iterator[_Group]:
    """The row groups or record batches of a piece."""
    if kind == "parquet":
        yield from _row_groups(table, piece, text)
    elif hasattr(table, "num_record_batches"):
        yield from _record_batches(table, piece, text)
    else:
        yield from _streamed(table, text)


def _row_groups(table: Any, piece: Piece, text: Wanted) -> Iterator[_Group]:
    columns = text.columns(table.schema_arrow.names)
    row = sum(table.metadata.row_group(number).num_rows for number in range(piece.start))
    for number in range(piece.start, min(piece.stop, table.num_row_groups)):
        group = table.metadata.row_group(number)

        def read(rows: int, number: int = number) -> Iterator[Any]:
            batches = table.iter_batches(batch_size=rows, row_groups=[number], columns=columns)
            return (_one_column(batch, text) for batch in batches)

        block = rows_per_block(group.total_byte_size, group.num_rows)
        yield _Group(start=row, rows=group.num_rows, block=block, read=read)
        row += group.num_rows


def _one_column(rows: Any, text: Wanted) -> Any:
    """The rows as one column: that of the text, or records of all that it is made of."""
    return rows.column(0) if text.plain else rows.to_struct_array()


def _record_batches(table: Any, piece: Piece, text: Wanted) -> Iterator[_Group]:
    """Where a damaged batch hides how many rows it had, those after it are numbered from where it began."""
    columns = text.columns(table.schema.names)
    row = 0
    for number in range(min(piece.stop, table.num_record_batches)):
        batch = _batch_or_error(table, number)
        rows = 0 if isinstance(batch, Exception) else int(batch.num_rows)
        if number >= piece.start:
            read = partial(_cut_or_raise, batch, columns, text)
            yield _Group(start=row, rows=rows, block=_ROWS, read=read)
        row += rows


def _batch_or_error(table: Any, number: int) -> Any:
    try:
        return table.get_batch(number)
    except (ValueError, NotImplementedError, OSError) as error:  # Arrow's errors are kinds of these
        return error


def _cut_or_raise(batch: Any, columns: list[str], text: Wanted, rows: int) -> Iterator[Any]:
    if isinstance(batch, Exception):
        raise batch
    return _cut_column(batch.select(columns), text, rows)


def _streamed(table: Any, text: Wanted) -> Iterator[_Group]:
    """A stream is read once, and what is damaged in it ends it."""
    columns = text.columns(table.schema.names)

    def read(rows: int, batches: Iterator[Any] = iter(table)) -> Iterator[Any]:  # noqa: B008
        return (column for batch in batches for column in _cut_column(batch.select(columns), text, rows))

    yield _Group(start=0, rows=0, block=_ROWS, read=read)


def _cut_column(batch: Any, text: Wanted, most: int) -> Iterator[Any]:
    """The text column of a batch, in blocks worth a round."""
    column = _one_column(batch, text)
    rows = min(most, rows_per_block(column.nbytes, len(column)))
    return (column.slice(start, rows) for start in range(0, len(column), rows))


def rows_per_block(size: int, rows: int) -> int:
    return max(1, min(_ROWS, BLOCK_BYTES * rows // max(1, size)))


def _documents(source: Source, reading: Reading, column: Any, place: int) -> Documents:
    texts: list[str] = []
    places: list[int] = []
    bad: list[BadRecord] = []
    text = wanted(reading)
    for row, value in enumerate(_python_values(column), start=place):
        if not text.plain or isinstance(value, bytes):  # a record, or a binary column
            value = _text_or_why(text, value)
        if isinstance(value, str) and len(value) <= reading.max_document_bytes:
            texts.append(value)
            places.append(row)
        else:
            bad.append(_explain(source, reading, row, value))
    return Documents.of(texts, places, bad)


def _text_or_why(text: Wanted, value: Any) -> Any:
    try:
        if isinstance(value, UnicodeDecodeError):
            return value
        return text.value(value) if text.plain else text.text(value)
    except NoText as error:
        return error


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
    if isinstance(value, NoText):
        return BadRecord(where=where, reason=value.reason, detail=value.detail)
    if isinstance(value, UnicodeDecodeError):
        return BadRecord(where=where, reason="invalid_utf8", detail=str(value))
    if isinstance(value, str):
        detail = f"{len(value):,} characters; the limit is {reading.max_document_bytes:,}"
        return BadRecord(where=where, reason="too_long", detail=detail)
    detail = f"{reading.field} is {type(value).__name__}, not a string"
    return BadRecord(where=where, reason="missing_field" if value is None else "not_text", detail=detail)


def _no_column(source: Source, error: KeyError) -> BadInputError:
    name, there = error.args
    some = ", ".join(there[:_NAMES_SHOWN]) + (", ..." if len(there) > _NAMES_SHOWN else "")
    return BadInputError(
        f"{source.url} has no column {name!r}; it has {some or 'none'}",
        hint="name the column that holds the text with --field, or several with --template",
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
    dataset, text = open_dataset(source), wanted(reading)
    try:
        columns = text.columns(dataset.column_names)
    except KeyError as error:
        raise _no_column(source, error) from error
    column = dataset.select_columns(columns).with_format("arrow")
    arrow = require("pyarrow", extra="arrow")
    for start in range(piece.start, piece.stop, _ROWS):
        stop = min(start + _ROWS, piece.stop)
        read = partial(_dataset_rows, column, text, start, stop)
        group = _Group(start=start, rows=stop - start, block=_ROWS, read=read)
        yield from _readable(source, reading, group, (arrow.ArrowInvalid, OSError))


def open_dataset(source: Source) -> Any:
    """The dataset behind a saved or hub source."""
    if source.kind == "saved":
        return require("datasets", extra="hf").load_from_disk(source.url)
    return _load_hub(source.url.removeprefix("hf://"), source.part)


def _dataset_rows(dataset: Any, text: Wanted, start: int, stop: int, rows: int) -> Iterator[Any]:
    return (_one_column(dataset[at : min(at + rows, stop)], text) for at in range(start, stop, rows))


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
