"""Mixture schedules: how much of each dataset of a blend is to have come by when. Pure.

A schedule has points: at this sample, these shares. Between two points shares stay as they are (`"step"`), or
go over from the one to the other (`"linear"`). Its integral is what counts of samples are held to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt

from stoker.errors import UsageError
from stoker.mixing import Integers
from stoker.options import check_choices

Floats = npt.NDArray[np.float64]

_NEVER = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Weights of a blend that change while it is drawn: `Mixture({0: [0.9, 0.1], 100_000: [0.5, 0.5]})`."""

    points: Annotated[
        Mapping[int, Sequence[float]], "from when on (or at when) which weights, one per dataset"
    ] = field(kw_only=False)
    by: Annotated[
        Literal["samples", "tokens", "steps"],
        "what points count, from the beginning of the job: samples of all ranks, their tokens, or batches "
        "(with as many ranks as when this mixture began)",
    ] = "samples"
    between: Annotated[
        Literal["linear", "step"], "weights go over to the next point's bit by bit, or at once when it comes"
    ] = "linear"

    def __post_init__(self) -> None:
        check_choices(self)
        points = _points(self.points)
        sizes = {len(weights) for weights in points.values()}
        if not points or len(sizes) > 1 or min(points) < 0 or not all(map(_can_be, points.values())):
            raise _refused(self.points)
        object.__setattr__(self, "points", points)

    @property
    def datasets(self) -> int:
        return len(next(iter(self.points.values())))

    def __hash__(self) -> int:
        return hash((tuple(self.points.items()), self.by, self.between))

    def as_state(self) -> dict[str, Any]:
        points = [[at, list(weights)] for at, weights in self.points.items()]
        return {"points": points, "by": self.by, "between": self.between}


def _points(given: Any) -> dict[int, tuple[float, ...]]:
    try:
        points = {at: tuple(map(float, weights)) for at, weights in sorted(dict(given).items())}
        if all(int(at) == at for at in points):
            return {int(at): weights for at, weights in points.items()}
    except (TypeError, ValueError) as error:
        raise _refused(given) from error
    raise _refused(given)


def _refused(points: object) -> UsageError:
    return UsageError(
        f"{points!r} are no points of a mixture",
        hint="give {0: [0.9, 0.1], 100_000: [0.5, 0.5]}: whole numbers from 0 on, as many weights at each "
        "point, none below 0, one above",
    )


def _can_be(weights: Sequence[float]) -> bool:
    return all(0 <= weight < math.inf for weight in weights) and sum(weights) > 0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A mixture counted in samples: `samples` for every `of` of what its points count."""

    mixture: Mixture
    samples: int = 1
    of: int = 1

    def integral(self, at: Any) -> Floats:
        """[dataset, position]: the samples of each dataset that belong before each of these ascending
        positions."""
        at = np.asarray(at, np.float64)
        begins, shares, slopes, before = self._pieces
        piece = np.maximum(np.searchsorted(begins, at[[0, -1]], side="right") - 1, 0)
        if piece[0] == piece[1] and at[0] <= at[-1]:  # most stretches lie between two points
            which: Any = slice(piece[0], piece[0] + 1)
        else:
            which = np.maximum(np.searchsorted(begins, at, side="right") - 1, 0)
        gone = at - begins[which]
        found: Floats = before[:, which] + (shares[:, which] + slopes[:, which] * gone / 2) * gone
        found[-1] = at - found[:-1].sum(axis=0)  # together they are all, to the last bit
        return found

    def due(self, wanted: Floats, *, after: int) -> Integers:
        """The first position from `after` on before which each dataset is to have come so often."""
        low, high = np.full(len(wanted), after), np.full(len(wanted), after + 1)
        which = np.arange(len(wanted))

        def reached(at: Integers) -> Any:
            order = np.argsort(at)
            return self.integral(at[order])[order, which][np.argsort(order)] >= wanted

        while not (done := reached(high)).all() and high.max() < _NEVER:
            low, high = np.where(done, low, high), np.where(done, high, after + (high - after) * 4)
        never = ~reached(high)
        while (high - low).max() > 1:
            middle = (low + high) // 2
            done = reached(middle)
            low, high = np.where(done, low, middle), np.where(done, middle, high)
        return np.where(never, _NEVER, np.where(reached(low), low, high))

    @cached_property
    def _pieces(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Where each piece begins, its first shares, how they change, and what belongs before it."""
        points = [(at * self.samples // self.of, weights) for at, weights in self.mixture.points.items()]
        begins = np.array([at for at, _ in points], np.float64)
        shares = np.array([np.array(weights) / sum(weights) for _, weights in points]).T
        lengths = np.maximum(np.diff(begins), 1)
        slopes = np.zeros_like(shares)
        if self.mixture.between == "linear":
            slopes[:, :-1] = np.diff(shares, axis=1) / lengths
        if begins[0] > 0:  # before the first point as at it
            begins, lengths = np.append(0.0, begins), np.append(begins[0], lengths)
            shares = np.concatenate([shares[:, :1], shares], axis=1)
            slopes = np.concatenate([np.zeros_like(shares[:, :1]), slopes], axis=1)
        grown = (shares[:, :-1] + slopes[:, :-1] * np.diff(begins) / 2) * np.diff(begins)
        before = np.concatenate([np.zeros_like(shares[:, :1]), np.cumsum(grown, axis=1)], axis=1)
        return begins, shares, slopes, before
