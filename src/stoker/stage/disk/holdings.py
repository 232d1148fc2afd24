"""Cache listing: what lies in a cache folder, for people to look at."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stoker.errors import UsageError
from stoker.stage.cache import TTL_S, default_folder
from stoker.stage.disk.grounds import Grounds
from stoker.stage.disk.room import Room
from stoker.stage.disk.shelf import Shelf


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldFolder:
    """One folder of the cache: a dataset, a model, or files of one place."""

    path: Path
    files: int
    bytes: int
    used_at: float
    holders: tuple[str, ...]

    def as_plain(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}


def held_folders(folder: Path | None) -> list[HeldFolder]:
    """Everything whole in a cache, the longest unused last."""
    root = (folder or default_folder()).absolute()
    if not (root / ".stoker").is_dir():
        raise UsageError(f"{root} is no cache folder", hint="give the one that was staged to: --cache DIR")
    shelf = Shelf(Grounds.seen(root))
    holders = {held.key: held.holders for held in Room(shelf, budget_bytes=0, ttl_s=TTL_S).holdings()}
    found: dict[str, HeldFolder] = {}
    for record in shelf.records():
        unit, before = record.unit, found.get(record.unit.folder)
        found[unit.folder] = HeldFolder(
            path=root / unit.folder,
            files=len(unit.files) + (before.files if before else 0),
            bytes=unit.bytes + (before.bytes if before else 0),
            used_at=max(record.used_at, before.used_at if before else 0.0),
            holders=tuple(sorted({*holders.get(unit.key, ()), *(before.holders if before else ())})),
        )
    return sorted(found.values(), key=lambda held: -held.used_at)
