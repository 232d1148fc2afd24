"""Option values with units."""

from __future__ import annotations

import re
from typing import Any

import click

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?$", re.IGNORECASE)


class Size(click.ParamType):
    """Bytes as people write them: 512MiB, 1.5GB, 67108864."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.match(str(value).strip())
        if not match or (match[3] and not match[2]):
            self.fail(f"{value!r} is not a size; write 512MiB, 2GB or a number of bytes", param, ctx)
        units = _BINARY if match[3] else _UNITS
        return int(float(match[1]) * units[match[2].upper()])
