"""Requirements: what a job needs of a node, in one table that plan fills, doctor judges and deploy renders.

Without a plan they come from a loader's settings; what nobody said keeps usual values.
"""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from stoker.errors import UnreadableError
from stoker.formats.small_json import read_json

# In /dev/shm: ranks of a node talk through it, and eight workers with two batches of 64 MiB fill it.
SHM_A_GPU = 1 << 30
_MOST = 1 << 62


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What one node must have. None: not known, so usual values hold."""

    shm_bytes: int | None = None
    memory_bytes: int | None = None  # of the whole pod or node, /dev/shm in it
    cpu_cores: int | None = None
    threads: int | None = None  # of all loaders of the node
    memlock_bytes: int | None = None  # 0: a job of one node, which registers no memory with an adapter
    cache_bytes: int | None = None
    inodes: int | None = None  # files that staging makes in the cache
    open_files: int | None = None
    read_bytes_s: int | None = None
    gpus: int | None = None
    stripes: int | None = None  # storage targets a file should lie on

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"{one.name} must be a whole number, not {value!r}")
            if value is not None and not 0 <= value < _MOST:
                raise ValueError(f"{one.name} must be a number that is not negative and below 2^62")

    def as_plain(self) -> dict[str, int]:
        """What is known, for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def read_need(path: Path) -> Need:
    """The `needs` of `stoker plan --json`, a file of such numbers, or a loader's settings
    (workers, prefetch, batch_bytes, ranks)."""
    try:
        return need_of(read_json(path))
    except OSError as error:
        raise UnreadableError(
            f"{path} cannot be read: {error.strerror}", hint="write one with `stoker plan --json`"
        ) from error
    except (ValueError, TypeError, OverflowError) as error:
        raise UnreadableError(
            f"{path} is no need: {error}", hint='write {"needs": {"shm_bytes": 17179869184}}'
        ) from error


def need_of(plain: Any) -> Need:  # whatever JSON holds
    """The need that a plan, a plain list of needs or a loader's settings describes."""
    if not isinstance(plain, dict):
        raise ValueError("it is not a table of names and numbers")
    needs = plain.get("needs", plain)
    if not isinstance(needs, dict):
        raise ValueError("its needs are not a table of names and numbers")
    if "workers" in needs:
        return _of_loader(needs)
    names = [one.name for one in fields(Need)]
    found = {name: needs[name] for name in names if name in needs}
    if not found:
        raise ValueError(f"it has none of {', '.join(names)}")
    _refuse_misspelt(set(needs) - set(names), names)
    return Need(**{name: _whole(value) for name, value in found.items()})


def _refuse_misspelt(others: set[str], names: list[str]) -> None:
    """A later release may write more; a name like one of ours is a need that would be overlooked."""
    for other in sorted(others):
        if near := difflib.get_close_matches(other, names, n=1, cutoff=0.75):
            raise ValueError(f"{other} is not known, {near[0]} is")


def _of_loader(settings: dict[str, Any]) -> Need:
    """Worker processes hold `prefetch` batches each in /dev/shm, and the one being made."""
    usual = {"workers": 0, "ranks": 1, "prefetch": 2, "batch_bytes": 0}
    _refuse_misspelt(set(settings) - set(usual), list(usual))
    given = {name: _count(name, settings.get(name, value)) for name, value in usual.items()}
    batches = given["workers"] * (given["prefetch"] + 1) * given["ranks"]
    return Need(
        shm_bytes=batches * given["batch_bytes"] or None,
        cpu_cores=(given["workers"] + 1) * given["ranks"],
    )


def _count(name: str, value: Any) -> int:
    whole = _whole(value)
    if isinstance(whole, bool) or not isinstance(whole, int) or whole < 0:
        raise ValueError(f"{name} must be a whole number that is not negative, not {value!r}")
    return whole


def _whole(value: Any) -> Any:
    """3.0 is 3: JSON writers differ."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
