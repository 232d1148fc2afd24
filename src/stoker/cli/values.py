"""Option values with units."""

from __future__ import annotations

import re

import click

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?$", re.IGNORECASE)


def size(text: str) -> int:
    """Bytes as people write them: 512MiB, 1.5GB, 67108864."""
    match = _SIZE.match(text.strip())
    if not match:
        raise click.BadParameter(f"{text!r} is not a size; write 512MiB, 2GB or a number of bytes")
    units = _BINARY if match[3] else _DECIMAL
    return int(float(match[1]) * units[(match[2] or "").upper()])
