"""Byte sizes and counts: as people write them (parsed) and say them (formatted)."""

from __future__ import annotations

import math
import re

from stoker.errors import UsageError

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*(?:([KMGTP])(i?))?B?$", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """512MiB, 1.5GB, 67108864."""
    match = _SIZE.match(str(text).strip())
    if not match or math.isinf(float(match[1])):
        raise UsageError(f"{text!r} is not a size", hint="write 512MiB, 2GB or a number of bytes")
    units = _BINARY if match[3] else _DECIMAL
    return math.ceil(float(match[1]) * units[(match[2] or "").upper()])


def say_size(count: float) -> str:
    """1.5 GB."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" or value >= 99.95 else f"{value:.1f} {units[0]}"


def say_binary(count: float) -> str:
    """140 GiB: memory, limits and manifests are written in binary units."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(count) >= 1024**power:
            return f"{three_digits(count / 1024**power)} {unit}"
    return f"{count:.0f} B"


def three_digits(value: float) -> str:
    """Three figures that mean something, never an exponent."""
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    text = f"{round(value, digits):,.{max(0, digits)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def counted(number: float, thing: str) -> str:
    """1 source, 1,200 sources, 1.5 cores, 2 processes."""
    shown = f"{number:,}" if isinstance(number, int) else f"{number:,g}"
    return f"{shown} {thing if number == 1 else plural(thing)}"


def plural(thing: str) -> str:
    return f"{thing}es" if thing.endswith(("s", "ch", "x")) else f"{thing}s"
