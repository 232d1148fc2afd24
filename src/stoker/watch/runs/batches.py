"""Batch-size fit: how much of a step is fixed, and how much grows with the batch (`--what-if batch`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from stoker.recording import Floats, Recording

SETTLE = 5  # steps at the start that still allocate, compile and fill queues
_MOSTLY, _HARDLY = 0.5, 0.2  # shares of fixed time from which on, and up to which, one answer is plain
_CROOKED = 0.05  # of a step: where three sizes lie further than this from a line, the line says little


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One batch size and what a step of it took."""

    batch: int
    step_s: float
    steps: int

    @property
    def samples_per_s(self) -> float:
        return self.batch / self.step_s

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "samples_per_s": self.samples_per_s}


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """step_s = fixed_s + per_sample_s × batch, as near as it comes to the sizes measured."""

    given: int  # the batch size on the command line
    sizes: tuple[Timed, ...]  # ascending
    fixed_s: float
    per_sample_s: float

    def step_s(self, batch: int) -> float:
        """What the line says of any size."""
        return self.fixed_s + self.per_sample_s * batch

    @property
    def fixed_share(self) -> float:
        """Of a step of the size given."""
        return self.fixed_s / self.step_s(self.given)

    @property
    def residual(self) -> float | None:
        """How far sizes lie from the line, in shares of a step; None of two, which always lie on one."""
        if len(self.sizes) < 3:
            return None
        off = [size.step_s / self.step_s(size.batch) - 1 for size in self.sizes]
        return float(np.sqrt(np.mean(np.square(off))))

    @property
    def doubling(self) -> float | None:
        """How many times as many samples a second twice the batch size gave, where both were measured."""
        rates = {size.batch: size.samples_per_s for size in self.sizes}
        if self.given not in rates or 2 * self.given not in rates:
            return None
        return rates[2 * self.given] / rates[self.given]

    @property
    def meaning(self) -> str:
        if self.residual is not None and self.residual > _CROOKED:
            return (
                "step times do not lie on a line: the machine was disturbed, or another size runs other code"
            )
        if self.fixed_share >= _MOSTLY:
            return "bound by communication or launches: larger batches help"
        if self.fixed_share <= _HARDLY:
            return "bound by compute or data, which grow with the batch: larger batches gain little"
        return "both count: larger batches help a little"

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "sizes": [size.as_dict() for size in self.sizes],
            "fixed_share": self.fixed_share,
            "proportional_share": 1 - self.fixed_share,
            "residual": self.residual,
            "doubling": self.doubling,
            "meaning": self.meaning,
        }


def timed(recording: Recording, *, batch: int) -> Timed | None:
    """The median step of the first rank, its first ones left out; None where that leaves none."""
    if not recording.ranks:
        return None
    steps = recording.ranks[0].steps
    lengths: Floats = steps.end - steps.start
    kept = lengths[max(1, min(SETTLE, len(lengths) // 2)) :]
    return Timed(batch=batch, step_s=float(np.median(kept)), steps=len(kept)) if len(kept) else None


def split(given: int, measured: Sequence[Timed]) -> Split | None:
    """Fit the line; None where fewer than two sizes were measured."""
    batches = sorted({one.batch for one in measured})
    if len(batches) < 2:
        return None
    sizes = tuple(_together([one for one in measured if one.batch == batch]) for batch in batches)
    fixed_s, per_sample_s = _line(
        np.array(batches, np.float64), np.array([size.step_s for size in sizes], np.float64)
    )
    return Split(given=given, sizes=sizes, fixed_s=fixed_s, per_sample_s=per_sample_s)


def _together(visits: Sequence[Timed]) -> Timed:
    """Each visit counts the same, however many steps it has: only so a steady drift cancels."""
    return Timed(
        batch=visits[0].batch,
        step_s=float(np.mean([one.step_s for one in visits])),
        steps=sum(one.steps for one in visits),
    )


def _line(batch: Floats, step_s: Floats) -> tuple[float, float]:
    """Least squares where neither part may be negative: no step is shorter for having more to do."""
    off = batch - batch.mean()
    slope = float(off @ step_s / (off @ off))
    fixed = float(step_s.mean() - slope * batch.mean())
    if slope < 0:
        return float(step_s.mean()), 0.0
    if fixed < 0:
        return 0.0, float(batch @ step_s / (batch @ batch))
    return fixed, slope
