"""Tables as media sources: rows of Parquet, Arrow and Hugging Face datasets with bytes of media in them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from stoker.errors import BadInputError, require
from stoker.prepare.media.sources.kinds import CAPTION_NAMES, MAGIC_BYTES, kind_of, sniffed, suffix_of
from stoker.prepare.media.sources.samples import Content, Read, Sample
from stoker.prepare.sources import tables
from stoker.prepare.sources.documents import BadRecord, Piece, Source

_LABELS = ("label", "labels", "cls", "class", "class_id", "target")
_MEDIA_NAMES = ("image", "images", "img", "photo", "picture", "audio", "video")
_PEEKED_ROWS = 16
_MOST_NAME = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """What a table's columns are: bytes of media, the class, the caption; all others become JSON."""

    media: tuple[str, ...]
    label: str = ""
    caption: str = ""
    rest: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


def columns_of(schema: Any) -> Columns:
    """The columns of an Arrow schema."""
    arrow = require("pyarrow", extra="arrow")
    kinds = {name: schema.field(name).type for name in schema.names}
    media = [name for name, kind in kinds.items() if _is_media(arrow, kind)]
    whole = (name for name in _LABELS if name in kinds and arrow.types.is_integer(kinds[name]))
    texts = (name for name in CAPTION_NAMES if name in kinds and _is_text(arrow, kinds[name]))
    label, caption = next(whole, ""), next(texts, "")
    rest = [name for name in schema.names if name not in (*media, label, caption)]
    classes = _class_names(schema, label)
    return Columns(media=tuple(media), label=label, caption=caption, rest=tuple(rest), classes=classes)


def schema_of(source: Source) -> Any:
    """The schema of a table, or None where it cannot be read."""
    if source.kind in ("saved", "hub"):
        return tables.open_dataset(source).features.arrow_schema
    with suppress(Exception), tables.opened(source.url, source.kind) as table:
        return table.schema_arrow if source.kind == "parquet" else table.schema
    return None


def holds_media(source: Source) -> bool:
    """Whether a table holds media. A column of bytes alone says little: texts have hashes beside them."""
    schema = schema_of(source)
    columns = columns_of(schema).media if schema is not None else ()
    if any(_says_media(schema.field(name)) for name in columns):
        return True
    values = _first_values(source, columns) if columns else {}
    return any(_are_known(held) for held in values.values())


def is_bytes_at_all(source: Source) -> bool:
    """Whether a table has a column of bytes that could be media."""
    schema = schema_of(source)
    return schema is not None and bool(columns_of(schema).media)


def _says_media(field: Any) -> bool:
    """A struct of bytes and path is how `datasets` keeps media; or the column's name says it."""
    plain = field.name.lower()
    return "struct" in str(field.type) or plain in _MEDIA_NAMES or bool(kind_of(plain))


def _first_values(source: Source, columns: Sequence[str]) -> dict[str, list[Any]]:
    with suppress(Exception):  # a damaged table is the map task's to report
        if source.kind in ("saved", "hub"):
            table = tables.open_dataset(source).with_format("arrow")[:_PEEKED_ROWS]
            return {name: table.column(name).to_pylist() for name in columns}
        with tables.opened(source.url, source.kind) as table:
            if source.kind == "parquet":
                batch = next(table.iter_batches(batch_size=_PEEKED_ROWS, columns=list(columns)))
            else:
                first = table.get_batch(0) if hasattr(table, "num_record_batches") else next(iter(table))
                batch = first.slice(0, _PEEKED_ROWS)
            return {name: batch.column(batch.schema.names.index(name)).to_pylist() for name in columns}
    return {}


def _are_known(values: Sequence[Any]) -> bool:
    """Whether most of these bytes begin as media do: some hashes begin so by chance."""
    flat = [one for value in values for one in (value if isinstance(value, list) else [value]) if one]
    return sum(bool(sniffed(one[:MAGIC_BYTES])) for one in flat) * 2 > len(flat)


def read_rows(source: Source, piece: Piece) -> Iterator[Read]:
    """The rows of row groups, record batches or rows `piece.start` to `piece.stop`."""
    if source.kind in ("saved", "hub"):
        dataset = tables.open_dataset(source)
        columns = columns_of(dataset.features.arrow_schema)
        yield from _rows(source, columns, _dataset_groups(dataset.with_format("arrow"), piece))
        return
    try:
        with tables.opened(source.url, source.kind) as table:
            schema = table.schema_arrow if source.kind == "parquet" else table.schema
            columns = columns_of(schema)
            if not columns.media:
                raise BadInputError(
                    f"{source.url} has no column of media bytes", hint="give it to a command of its own"
                )
            yield from _rows(source, columns, _groups(table, source.kind, piece))
    except tables.damage() as error:
        tables.raise_unreadable(source.url, error)
        yield BadRecord(where=source.url, reason="truncated", detail=f"the file is damaged: {error}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """Rows that are stored together: the first, how many (0: nobody knows), and what reads them."""

    start: int
    rows: int
    read: Callable[[], Iterator[Any]]


def _rows(source: Source, columns: Columns, groups: Iterator[_Group]) -> Iterator[Read]:
    for group in groups:
        row = group.start
        try:
            for batch in group.read():
                for one in batch.to_pylist():
                    yield _row(source, columns, row, one)
                    row += 1
        except _damage() as error:
            tables.raise_unreadable(source.url, error)
            yield BadRecord(
                where=f"{source.url} row {row:,}",
                reason="truncated",
                detail=f"the file is damaged: {error}",
                documents=max(1, group.start + group.rows - row),
            )


def _damage() -> tuple[type[Exception], ...]:
    return (*tables.damage(), UnicodeDecodeError)


def _groups(table: Any, kind: str, piece: Piece) -> Iterator[_Group]:
    if kind == "parquet":
        yield from _row_groups(table, piece)
    elif hasattr(table, "num_record_batches"):
        row = 0
        for number in range(min(piece.stop, table.num_record_batches)):
            rows, read = _record_batch(table, number)
            if number >= piece.start:
                yield _Group(start=row, rows=rows, read=read)
            row += rows
    else:
        yield _Group(start=0, rows=0, read=lambda: (one for batch in table for one in _cut(batch)))


def _row_groups(table: Any, piece: Piece) -> Iterator[_Group]:
    row = sum(table.metadata.row_group(number).num_rows for number in range(piece.start))
    for number in range(piece.start, min(piece.stop, table.num_row_groups)):
        group = table.metadata.row_group(number)
        block = tables.rows_per_block(group.total_byte_size, group.num_rows)
        yield _Group(
            start=row,
            rows=group.num_rows,
            read=partial(table.iter_batches, batch_size=block, row_groups=[number]),
        )
        row += group.num_rows


def _record_batch(table: Any, number: int) -> tuple[int, Callable[[], Iterator[Any]]]:
    try:
        batch = table.get_batch(number)
    except (ValueError, NotImplementedError, OSError) as error:  # Arrow's errors are kinds of these
        return 0, partial(_raise, error)
    return int(batch.num_rows), partial(_cut, batch)


def _raise(error: Exception) -> Iterator[Any]:
    raise error


def _cut(batch: Any) -> Iterator[Any]:
    rows = tables.rows_per_block(batch.nbytes, batch.num_rows)
    return (batch.slice(start, rows) for start in range(0, batch.num_rows, rows))


def _dataset_groups(dataset: Any, piece: Piece) -> Iterator[_Group]:
    size = dataset.data.nbytes * (piece.stop - piece.start) // max(1, len(dataset.data))
    step = tables.rows_per_block(size, piece.stop - piece.start)
    for start in range(piece.start, min(piece.stop, len(dataset)), step):
        stop = min(start + step, piece.stop)
        yield _Group(start=start, rows=stop - start, read=lambda a=start, b=stop: iter([dataset[a:b]]))  # type: ignore[misc]


def _row(source: Source, columns: Columns, row: int, values: dict[str, Any]) -> Read:
    where = f"{source.url} row {row:,}"
    members: list[tuple[str, Content]] = []
    for name in columns.media:
        held = values[name] if isinstance(values[name], list) else [values[name]]
        for place, value in enumerate(held):
            path = value.get("path") or "" if isinstance(value, dict) else ""
            data = value.get("bytes") if isinstance(value, dict) else value
            if data is None and path:
                detail = f"{name} names {path!r} and holds no bytes"
                return BadRecord(where=where, reason="no_bytes", detail=detail)
            if data is not None:
                front = _front(name, columns) + (f"_{place}" if held is values[name] else "")
                members.append((_member_name(front, sniffed(data[:MAGIC_BYTES]), path), data))
    if not members:
        return BadRecord(where=where, reason="no_bytes", detail=f"{', '.join(columns.media)}: nothing in it")
    label = values.get(columns.label) if columns.label else None
    if label is not None and label >= 0:  # -1 is how Hugging Face writes: none
        members.append(("cls", str(label).encode()))
    if columns.caption and values[columns.caption] is not None:
        members.append(("txt", values[columns.caption].encode()))
    if columns.rest:
        try:
            members.append(("json", _json({name: values[name] for name in columns.rest})))
        except TypeError as error:
            return BadRecord(where=where, reason="not_json", detail=str(error))
    return Sample(place=row, where=where, members=members, label=-1 if label is None else label)


def _json(values: dict[str, Any]) -> bytes:
    return json.dumps(_finite(values), default=_in_words, ensure_ascii=False).encode()


def _finite(value: Any) -> Any:
    """JSON has no NaN: null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list) else value


def _in_words(value: Any) -> str:
    """Dates and decimals; bytes in nested columns are no text of any kind."""
    if isinstance(value, bytes):
        raise TypeError(f"bytes inside a column ({len(value):,}) have no place in JSON")
    return str(value)


def _front(column: str, columns: Columns) -> str:
    """What tells members of several columns of media apart: `mask` of `mask.png`."""
    if len(columns.media) == 1:
        return ""
    plain = "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in column)
    return f"{plain[:_MOST_NAME]}{columns.media.index(column) if plain != column else ''}"


def _member_name(front: str, found: str, path: str) -> str:
    """`jpg`, `mask.png`, `1.jpg` of a list; `bin` for bytes that nobody knows."""
    named = suffix_of(path)
    suffix = found or (named if kind_of(named) else "") or "bin"
    return f"{front.lstrip('_')}.{suffix}" if front else suffix


def _is_media(arrow: Any, kind: Any) -> bool:
    if arrow.types.is_list(kind) or arrow.types.is_large_list(kind):
        kind = kind.value_type
    if arrow.types.is_struct(kind):
        names = [kind.field(number).name for number in range(kind.num_fields)]
        return "bytes" in names and _is_bytes(arrow, kind.field(names.index("bytes")).type)
    return _is_bytes(arrow, kind)


def _is_bytes(arrow: Any, kind: Any) -> bool:
    return bool(arrow.types.is_binary(kind) or arrow.types.is_large_binary(kind))


def _is_text(arrow: Any, kind: Any) -> bool:
    return bool(arrow.types.is_string(kind) or arrow.types.is_large_string(kind))


def _class_names(schema: Any, label: str) -> tuple[str, ...]:
    """The names of classes, which `datasets` keeps in a schema's metadata."""
    with suppress(ValueError, LookupError, TypeError, AttributeError):
        raw = json.loads((schema.metadata or {})[b"huggingface"])
        names = raw["info"]["features"][label]["names"]
        return tuple(str(name) for name in names)
    return ()
