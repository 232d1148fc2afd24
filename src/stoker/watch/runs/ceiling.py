"""Data-free ceiling: step time on real batches and on one served again, in turn (`--what-if data`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker.recording import Floats, RankRecord, Recording

_SETTLE = 2  # steps at the start of a window that still belong to the one before


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    """Mean step times of both kinds of window, and how much faster a perfect loader would make the loop."""

    real_step_s: float
    cached_step_s: float
    real_steps: int
    cached_steps: int

    @property
    def speedup(self) -> float:
        return max(1.0, self.real_step_s / self.cached_step_s)


def ceiling(recording: Recording) -> Ceiling | None:
    """None where no what-if was asked for, or it did not last for a window of each kind."""
    windows = recording.facts.get("what_if") or []
    if not recording.ranks or not windows:
        return None
    real: list[Floats] = []
    cached: list[Floats] = []
    ends = [*(window["at"] for window in windows[1:]), recording.wall_s]
    for window, end in zip(windows, ends, strict=True):
        settle = _SETTLE if window["cached"] else _SETTLE + _queued(recording.facts.get("loader") or {})
        times = _step_times(recording.ranks[0], window["at"], end)[settle:]
        (cached if window["cached"] else real).append(times)
    return _of(np.concatenate(real), np.concatenate(cached)) if real and cached else None


def _of(real: Floats, cached: Floats) -> Ceiling | None:
    if not len(real) or not len(cached):
        return None
    return Ceiling(
        real_step_s=float(real.mean()),
        cached_step_s=float(cached.mean()),
        real_steps=len(real),
        cached_steps=len(cached),
    )


def _queued(loader: dict[str, Any]) -> int:
    """Batches the workers made while cached ones were served: they come for nothing, and do not count."""
    return int(loader.get("num_workers") or 0) * int(loader.get("prefetch_factor") or 0)


def _step_times(rank: RankRecord, start: float, end: float) -> Floats:
    """Of steps wholly in the window; a save or an evaluation between two steps is no step's fault."""
    steps = rank.steps
    inside = (steps.start >= start) & (steps.end <= end)
    found: Floats = (steps.end - steps.start)[inside]
    return found[found <= 10 * np.median(found)] if len(found) else found
