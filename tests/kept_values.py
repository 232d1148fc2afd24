"""Values that are kept in a file beside the tests of a room: what pure code said of drawn inputs.

A room's script (`kept_verdicts.py`, `kept_plans.py`, ...) says which values, and writes them anew when it is
run. That is done after a rule, a sum or a text was changed on purpose; the difference of the files is then
what to look at.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """A record as JSON has it: NaN and infinity as words, floats to ten digits."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value) if one.compare}
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (list, tuple, range)):
        return [plain(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(plain(one) for one in value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.10g}") if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def alike(one: Any, other: Any) -> bool:
    """Equal, numbers but for what another processor rounds."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
    return bool(one == other)


def keep(path: Path, rows: dict[str, Any]) -> None:
    """One line a row, so that a difference is read line by line."""
    path.parent.mkdir(exist_ok=True)
    lines = [
        f"{json.dumps(name)}: {json.dumps(plain(row), ensure_ascii=False)}" for name, row in rows.items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def kept(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found
