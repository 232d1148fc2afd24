"""Histories made up for tests: entries of a figure over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from stoker.history.figures import Entry, Figure, Origin
from stoker.history.record import entry_id

NOISE = 0.02


def entries(
    values: Iterable[float],
    *,
    title: str = "train.py",
    name: str = "steps/s",
    unit: str = "steps/s",
    better: str = "higher",
    machine: str = "1 × NVIDIA H200, 16 cores",
    commits: Sequence[str] = (),
    at: float = 1_790_000_000.0,
) -> list[Entry]:
    """A night apart each."""
    return [
        Entry(
            id=entry_id(title, name, machine, number),
            kind="watch",
            title=title,
            at=at + 86400.0 * number,
            told=at + 86400.0 * number,
            origin=Origin(machine=machine, commit=commits[number] if commits else f"{number:040x}"),
            figures=(Figure(name=name, value=float(value), unit=unit, better=better),),
            run=f"/runs/{number}",
        )
        for number, value in enumerate(values)
    ]


def quiet(count: int, seed: int = 0) -> np.ndarray:
    return 100 * (1 + NOISE * np.random.default_rng(seed).standard_normal(count))


def slowed(count: int, last: int, seed: int = 0, by: float = 0.05) -> np.ndarray:
    """The last runs are slower by so much."""
    values = quiet(count + last, seed)
    values[count:] *= 1 - by
    return values
