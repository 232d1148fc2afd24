"""JSON field extraction: the text of a block of JSON lines, in C where it was built, else with orjson.

Parsing with a Python object per line took as long as half the tokenising (measured: 600 MB/s a core
beside a tokenizer at 150 to 200); the C twin needs a tenth of that. Both leave out what they cannot
take, and give the same texts for the rest.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.errors import require
from stoker.native import native
from stoker.prepare.sources.documents import Texts

Extracted = tuple[Texts, npt.NDArray[np.int64], list[int]]


def extract(block: memoryview, field: str) -> Extracted:
    """(texts, where in the block each one's line starts, starts of the lines left out)."""
    return (extract_native if native("prepare.sources._jsonl") else extract_python)(block, field)


def extract_native(block: memoryview, field: str) -> Extracted:
    module = native("prepare.sources._jsonl")
    lines = module.lines(block)
    text = np.empty(len(block), np.uint8)
    ends, places, odd = np.zeros(lines + 1, np.int64), np.empty(lines, np.int64), np.empty(lines, np.int64)
    documents, odd_lines = module.extract(block, field.encode(), text, ends[1:], places, odd)
    return Texts(text, ends[: documents + 1]), places[:documents], odd[:odd_lines].tolist()


def extract_python(block: memoryview, field: str) -> Extracted:
    texts: list[str] = []
    places: list[int] = []
    odd: list[int] = []
    at, loads = 0, require("orjson", extra="tokens").loads
    for line in bytes(block).split(b"\n"):
        if line.strip(b" \t\r"):
            try:
                texts.append(_text(loads(line), field))
                places.append(at)
            except (ValueError, LookupError, TypeError):
                odd.append(at)
        at += len(line) + 1
    return Texts.of(texts), np.array(places, np.int64), odd


def line_starts(block: memoryview) -> list[int]:
    """Where each line that is not blank begins."""
    starts, at = [], 0
    for line in bytes(block).split(b"\n"):
        if line.strip(b" \t\r"):
            starts.append(at)
        at += len(line) + 1
    return starts


def parse(data: bytes) -> Any:
    """What JSON says, and what Python's and JavaScript's writers make of a number that is none: NaN beside
    the text takes nothing from it."""
    try:
        return require("orjson", extra="tokens").loads(data)
    except ValueError:
        if b"NaN" not in data and b"Infinity" not in data:
            raise
    try:
        return json.loads(data.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _text(record: Any, field: str) -> str:
    text = record[field]
    if not isinstance(text, str):
        raise TypeError
    text.encode()  # Python's parser lets half a surrogate pair pass, which no tokenizer can take
    return text
