"""Trials of a machine, one after another: folders that were named, memory, cards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stoker.doctor.trying.cards import try_cards
from stoker.doctor.trying.folder import try_folder
from stoker.doctor.trying.locking import try_locking
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import Snapshot
from stoker.machine.trials import Trials


def tried(snapshot: Snapshot) -> Snapshot:
    """The machine with what was tried on it. Nothing is written to a folder that the user did not name."""
    named = [place for place in snapshot.places if place.given and place.answers is not False]
    count = 0 if isinstance(snapshot.gpus, Unknown) else len(snapshot.gpus)
    return replace(
        snapshot,
        trials=Trials(
            folders=tuple(try_folder(place.role, Path(place.path)) for place in named),
            lock=try_locking(),
            ranks=try_cards(count),
        ),
    )
