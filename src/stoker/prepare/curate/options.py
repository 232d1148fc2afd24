"""Options of steps: what a recipe may give for each, by the annotation of its field."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from stoker.errors import UsageError


def _is_number(value: Any) -> bool:
    """`false` turns a rule off, as 0 does."""
    return isinstance(value, (int, float)) and value is not True and math.isfinite(value)


# YAML says no where Norwegian was meant, and a lone string would be a list of its letters.
_FITS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("a whole number", lambda value: isinstance(value, int) and _is_number(value)),
    "float": ("a number", _is_number),
    "str": ("a text", lambda value: isinstance(value, str)),
    "tuple[str, ...]": (
        'a list of texts, as ["en", "no"]',
        lambda value: isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value),
    ),
}


def kinds_of(step: type) -> dict[str, str]:
    return {one.name: str(one.type) for one in fields(step)}


def check_options(step: str, options: Mapping[str, Any], kinds: Mapping[str, str]) -> None:
    """Refuse a value that its option cannot be; names that the step does not know are its own matter."""
    for name, value in options.items():
        wanted, fits = _FITS.get(kinds.get(name, ""), ("", lambda _: True))
        if not fits(value):
            raise UsageError(f"step {step}: {name} is {value!r}", hint=f"write {wanted}")
