"""JSON that somebody hands in: read to a bound, and nested no deeper than a parser can follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MOST = 16 << 20  # plans and recorded machines are kilobytes; a device or somebody's dataset has no end


def read_json(path: Path) -> Any:
    """What a small file holds; ValueError where it is long, deep or no JSON."""
    with path.open("rb") as file:
        text = file.read(_MOST + 1)
    if len(text) > _MOST:
        raise ValueError(f"it is longer than {_MOST >> 20} MiB")
    return parse_json(text)


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """json.loads, to which brackets without end are an error of their own kind."""
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
