"""Keep rules: which checkpoints stay beside the newest ones. Pure but for the list of pins.

The best by a metric, one in every hour, and those that somebody has pinned. Retention never deletes what
these rules spare.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stoker.checkpoint.saved.layout import NO_RECORD, Manifest
from stoker.checkpoint.saved.reader import Checkpoint, Folder
from stoker.checkpoint.saved.tiers import LocalFolder, RemoteFolder, read_file
from stoker.errors import BadCheckpointError, StokerError
from stoker.storage import Store, new_file

PINS = ".pins.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepRules:
    """What stays: the `best` k by their metric, and one in every so many seconds; and whatever is pinned."""

    best: int = 0
    best_is: Literal["min", "max"] = "min"
    every_s: float = 0.0


ONLY_PINS = KeepRules()


def spared(listed: Sequence[Manifest], rules: KeepRules, *, pins: Iterable[str] = ()) -> dict[str, str]:
    """Which of these checkpoints stay, whatever their age, and why."""
    by_age = sorted(listed, key=lambda one: (one.saved_at, one.name))
    found = {one.name: f"one in every {rules.every_s:.0f} s" for one in _spread(by_age, rules.every_s)}
    found |= {one.name: f"metric {one.marks.metric:g}" for one in _best(by_age, rules)}
    found |= {one.name: f"pinned as {one.marks.pin}" for one in listed if one.marks.pin}
    pinned = set(pins)
    return found | {one.name: "pinned" for one in listed if one.name in pinned and not one.marks.pin}


def _best(by_age: Sequence[Manifest], rules: KeepRules) -> list[Manifest]:
    """Of equal ones the newer."""
    sign = 1 if rules.best_is == "min" else -1
    known = [
        (sign * one.marks.metric, -at, one)
        for at, one in enumerate(by_age)
        if one.marks.metric is not None and math.isfinite(one.marks.metric)
    ]
    return [one for _, _, one in sorted(known, key=lambda row: row[:2])[: rules.best]]


def _spread(by_age: Sequence[Manifest], every_s: float) -> list[Manifest]:
    """The oldest, the first that is so many seconds younger, and so on: the same again when those between
    them are gone."""
    found: list[Manifest] = []
    for one in by_age if every_s > 0 else ():
        if not found or one.saved_at >= found[-1].saved_at + every_s:
            found.append(one)
    return found


# --- of a tier ----------------------------------------------------------------------------------------


def spared_here(root: Path, names: Iterable[str], rules: KeepRules) -> dict[str, str]:
    """Which of these stay in a folder."""
    return _spared(names, rules, read_pins(root), lambda name: LocalFolder(root / name))


def spared_there(store: Store, names: Iterable[str], rules: KeepRules, *, root: Path) -> dict[str, str]:
    """Which of these stay in a remote tier; pins are kept in the run folder."""
    return _spared(names, rules, read_pins(root), lambda name: RemoteFolder(store, name))


def _spared(
    names: Iterable[str], rules: KeepRules, pins: set[str], folder: Callable[[str], Folder]
) -> dict[str, str]:
    listed, unread = [], {}
    for name in names:
        try:
            listed.append(Checkpoint(folder(name)).manifest)
        except StokerError as error:  # it may be the best of all
            unread[name] = f"it cannot be read: {error.message}"
    return unread | spared(listed, rules, pins=pins)


def read_pins(root: Path) -> set[str]:
    """The checkpoints of a folder that somebody has pinned."""
    try:
        return set(json.loads(read_file(root / PINS)))
    except FileNotFoundError:
        return set()
    except (OSError, *NO_RECORD) as error:  # nothing may go before it is known what is pinned
        raise BadCheckpointError(
            f"{root / PINS} cannot be read: {error}", hint="pin again what is to stay, and delete it"
        ) from error


def write_pins(root: Path, names: Iterable[str]) -> None:
    with new_file(root / PINS) as file:
        file.write(json.dumps(sorted(names)).encode())
