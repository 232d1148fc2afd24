"""C extensions, optional: where no compiler was at hand, their twins in Python do the same more slowly."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any


@cache
def native(name: str) -> Any:  # C modules have no types
    """The module of this name, or None where it was not built."""
    try:
        return import_module(f"stoker.{name}")
    except ImportError:
        return None
