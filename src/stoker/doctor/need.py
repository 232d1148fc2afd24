"""What a job needs of a machine, from a plan or from a loader's settings; without one, usual values hold."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from stoker.errors import BadInputError, StorageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What one node must have. None: not known, so usual values hold."""

    shm_bytes: int | None = None
    memory_bytes: int | None = None  # of the whole pod or node, /dev/shm in it
    cpu_cores: int | None = None
    memlock_bytes: int | None = None
    cache_bytes: int | None = None
    open_files: int | None = None
    read_bytes_s: int | None = None
    gpus: int | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ValueError(f"{one.name} must be a number that is not negative, not {value!r}")


def read_need(path: Path) -> Need:
    """The `needs` of `stoker plan --json`, a file of such numbers, or a loader's settings
    (workers, prefetch, batch_bytes, ranks)."""
    try:
        plain = json.loads(path.read_text("utf-8"))
        return need_of(plain)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read: {error.strerror}", hint="write one with `stoker plan --json`"
        ) from error
    except (ValueError, TypeError, OverflowError) as error:
        raise BadInputError(
            f"{path} is no need: {error}", hint='write {"needs": {"shm_bytes": 17179869184}}'
        ) from error


def need_of(plain: Any) -> Need:  # whatever JSON holds
    """The need that a plan, a plain list of needs or a loader's settings describes."""
    if not isinstance(plain, dict):
        raise ValueError("it is not a table of names and numbers")
    needs = plain.get("needs", plain)
    if "workers" in needs:
        return _of_loader(needs)
    names = [one.name for one in fields(Need)]
    found = {name: needs[name] for name in names if name in needs}
    if not found:
        raise ValueError(f"it has none of {', '.join(names)}")
    return Need(**{name: _whole(value) for name, value in found.items()})


def _of_loader(settings: dict[str, Any]) -> Need:
    """Worker processes hold `prefetch` batches each in /dev/shm, and the one being made."""
    workers, ranks = int(settings["workers"]), int(settings.get("ranks", 1))
    batches = workers * (int(settings.get("prefetch", 2)) + 1) * ranks
    return Need(
        shm_bytes=batches * int(settings.get("batch_bytes", 0)) or None,
        cpu_cores=(workers + 1) * ranks,
    )


def _whole(value: Any) -> Any:
    """3.0 is 3: JSON writers differ."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
