"""Run folder writer: names, metas, sample rows, events. Standard library only; each file one writer."""

from __future__ import annotations

import json
import os
import re
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.formats.small_json import parse_json
from stoker.processes import boot
from stoker.redact import redact_text

PRIVATE = 0o600  # a run knows commands, paths and what went wrong: nobody else's business
VERSION = 1  # of a run folder, in its meta files
_NAN = float("nan")


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """This machine's clock: which boot, and what to add to its monotonic time for the time of day."""

    boot: str
    offset_s: float

    @classmethod
    def here(cls) -> Clock:
        return cls(boot=boot() or node_name(), offset_s=time.time() - time.monotonic())

    def as_dict(self) -> dict[str, Any]:
        return {"boot": self.boot, "offset_s": self.offset_s}


def node_name() -> str:
    """The host's name, safe in a file name."""
    return re.sub(r"[^A-Za-z0-9.]", "_", os.uname().nodename) or "node"


def process_key(node: str, pid: int) -> str:
    return f"{node}-{pid}"


def write_meta(path: Path, facts: Mapping[str, Any]) -> None:
    """Whole or not at all; not synced: a run folder outlives processes, not power cuts."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE)
    with open(handle, "wb") as file:
        file.write(_json(facts))
    os.replace(temporary, path)


def _json(facts: Mapping[str, Any]) -> bytes:
    """Words of a command that are no UTF-8 have a question mark for each byte that is not."""
    return json.dumps(facts, default=_plain, ensure_ascii=False).encode("utf-8", "replace")


def _plain(value: Any) -> Any:
    """What a program calls a number, numpy's say, as one; anything else by its text."""
    for kind in (int, float):
        with suppress(Exception):
            if kind(value) == value:
                return kind(value)
    return repr(value)


def _redacted(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Words of facts without secrets, also in lists of them."""
    found: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, str):
            found[name] = redact_text(value)
        elif isinstance(value, list):
            found[name] = [redact_text(one) if isinstance(one, str) else one for one in value]
        else:
            found[name] = value
    return found


def read_meta(path: Path) -> dict[str, Any]:
    """The facts of a meta file; none of one that is not there or torn."""
    try:
        facts = parse_json(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


class Events:
    """Appends events, one JSON object a line; the file is made with the first one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def say(self, what: str, text: str, **facts: Any) -> None:
        event = {"t": time.monotonic(), "what": what, "text": redact_text(text), "facts": _redacted(facts)}
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, PRIVATE)
        try:
            os.write(handle, _json(event) + b"\n")
        finally:
            os.close(handle)


class Rows:
    """Samples of one thing: a line of JSON that names the columns, then rows of a double and floats.

    A column not seen before begins another part: `host-a.rows`, `host-a.1.rows`, … So does another writer of
    the same thing, and a row that a full disk has cut short: what follows it would be read askew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: tuple[str, ...] = ()
        self._row = struct.Struct("<d")
        self._handle = -1
        self._part = 0

    def add(self, t: float, readings: Mapping[str, float]) -> None:
        if self._handle < 0 or not all(name in self._columns for name in readings):
            self._begin(tuple(dict.fromkeys((*self._columns, *readings))))
        values = [readings.get(name, _NAN) for name in self._columns]
        if os.write(self._handle, self._row.pack(t, *values)) < self._row.size:
            self.close()

    def close(self) -> None:
        """Safe twice."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def _begin(self, columns: tuple[str, ...]) -> None:
        self.close()
        self._handle = self._open_next()
        os.write(self._handle, json.dumps({"columns": columns}).encode() + b"\n")
        self._columns, self._row = columns, struct.Struct(f"<d{len(columns)}f")

    def _open_next(self) -> int:
        while True:
            path = self._path if not self._part else self._path.with_suffix(f".{self._part}.rows")
            self._part += 1
            try:
                return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, PRIVATE)
            except FileExistsError:
                continue
