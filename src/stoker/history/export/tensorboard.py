"""TensorBoard event files, written by hand: the format is a record of length, CRC-32C and a small protobuf.

One folder for each case and machine, which TensorBoard calls a run; a scalar for each figure, its step being
the number of the run in its series, its wall time when it was measured.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from stoker.history.figures import Entry
from stoker.history.series import all_series
from stoker.storage import new_file


def write_tensorboard(entries: Sequence[Entry], folder: Path) -> list[Path]:
    """Event files in folders; those of an earlier export are replaced, so that no point is there twice."""
    rows: dict[str, list[tuple[float, int, str, float]]] = {}
    for series in all_series(entries):
        run = _safe(f"{series.title} {series.machine}")
        for step, (entry, figure) in enumerate(zip(series.entries, series.points, strict=True)):
            rows.setdefault(run, []).append((entry.at, step, series.name, figure.value))
    written = []
    for run, points in sorted(rows.items()):
        path = folder / run / "events.out.tfevents.0000000000.stoker"
        with new_file(path) as file:
            file.write(_record(_version(min(points)[0])))
            for at, step, name, value in sorted(points):
                file.write(_record(_event(at, step, name, value)))
        written.append(path)
    return written


def _safe(name: str) -> str:
    return re.sub(r"[^\w.\-]+", "_", name)[:120].strip("._") or "run"


# --- protobuf: tag and value after tag and value --------------------------------------------------


def _version(at: float) -> bytes:
    return _double(1, at) + _bytes(3, b"brain.Event:2")


def _event(at: float, step: int, name: str, value: float) -> bytes:
    summary = _bytes(1, _bytes(1, name.encode()) + _float(2, value))
    return _double(1, at) + _varint(2 << 3) + _varint(step) + _bytes(5, summary)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    try:
        return _varint(field << 3 | 5) + struct.pack("<f", value)
    except OverflowError:
        return _varint(field << 3 | 5) + struct.pack("<f", float("inf") if value > 0 else float("-inf"))


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


# --- records --------------------------------------------------------------------------------------


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _masked(data: bytes) -> bytes:
    crc = _crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _table() -> Iterator[int]:
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        yield value


_TABLE = tuple(_table())
