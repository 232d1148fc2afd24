"""The course of a job: what a saved position keeps beside the position, so that any step can be computed.

How its samples were cut into lanes, how far each dataset of a blend had come when its weights were last
changed, what is left out since when, and with how many ranks it took its steps.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from stoker.errors import UsageError
from stoker.load.options import LoaderOptions
from stoker.load.ordering.cut import Cut
from stoker.load.ordering.dealing import Dealing, Stage
from stoker.load.ordering.plan import Cursor
from stoker.load.ordering.rounds import Share
from stoker.load.ordering.schedule import Mixture, Schedule
from stoker.load.ordering.without import LeftOut, Names


@dataclass(frozen=True, kw_only=True, slots=True)
class Leg:
    """From a step on, at a cursor, the job ran with so many ranks and so many rows on each."""

    step: int
    cursor: Cursor
    ranks: int
    batch: int
    tail: Literal["drop", "pad"]

    def share(self, rank: int) -> Share:
        return Share(rank=rank, world=self.ranks, batch=self.batch)

    def as_state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            **asdict(self.cursor),
            "ranks": self.ranks,
            "batch": self.batch,
            "tail": self.tail,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """What came before a position; empty for a job that begins."""

    cut: Cut | None = None
    dealing: Dealing | None = None
    left_out: tuple[LeftOut, ...] = ()
    legs: tuple[Leg, ...] = ()
    step: int = 0

    def mixed(self, position: int) -> tuple[int, ...]:
        """Samples of each dataset of a blend before a position of the whole job."""
        blended = self.dealing and self.dealing.datasets > 1
        return self.dealing.counts(position) if self.dealing and blended else ()

    def without(self, samples: Names, since: Cursor) -> Past:
        """Leaving these out from here on, beside those that are left out already."""
        new = samples.difference(*(some.samples for some in self.left_out))
        more = (LeftOut(since=since, samples=frozenset(new)),) if new else ()
        return replace(self, left_out=(*self.left_out, *more))

    def with_leg(self, cursor: Cursor, options: LoaderOptions) -> Past:
        """Going on from here, with the ranks and rows of these options."""
        ranks, batch, tail = options.place.size, options.batch_size, options.tail
        last = self.legs[-1] if self.legs else None
        if last and (last.ranks, last.batch, last.tail) == (ranks, batch, tail):
            return self
        leg = Leg(step=self.step, cursor=cursor, ranks=ranks, batch=batch, tail=tail)
        return replace(self, legs=(*(one for one in self.legs if one.step < self.step), leg))


def dealing_of(past: Past, options: LoaderOptions, *, position: int) -> Dealing:
    """How the datasets of a blend come: as before, or from this position of the whole job on by the mixture
    that is asked for now."""
    mixture = mixture_of(options)
    before = past.dealing
    if before and before.stages[-1].schedule.mixture == mixture:
        return before
    schedule = _schedule(mixture, options)
    if before is None:
        return Dealing(stages=(Stage(begin=0, counts=(0,) * mixture.datasets, schedule=schedule),))
    if past.left_out:
        raise UsageError(
            "the weights of a blend cannot change while documents are left out: others have taken their "
            "places in an epoch that would now be another",
            hint="go on with the weights as they were; new weights and a first skip= may come at one resume",
        )
    stage = Stage(begin=position, counts=before.counts(position), schedule=schedule)
    kept = tuple(one for one in before.stages if one.begin < position)
    return Dealing(stages=(*kept, stage), known=before.known)


def mixture_of(options: LoaderOptions) -> Mixture:
    """The weights of a blend as a mixture."""
    given, datasets = options.weights, len(options.sources)
    if isinstance(given, Mixture):
        if given.datasets != datasets:
            raise UsageError(
                f"a mixture of {given.datasets} datasets and {datasets} datasets do not make a blend",
                hint="give one weight per dataset at each point",
            )
        return given
    try:
        weights = tuple(map(float, given)) or (1.0,) * datasets
    except (TypeError, ValueError):
        weights = ()
    if len(weights) != datasets or min(weights) <= 0:
        raise UsageError(
            f"{datasets} dataset{'s' * (datasets != 1)} and weights {given!r} do not make a blend",
            hint="give one positive weight per dataset; stoker.Mixture for weights that change",
        )
    return Mixture({0: weights})


def _schedule(mixture: Mixture, options: LoaderOptions) -> Schedule:
    if mixture.by == "steps":
        return Schedule(mixture=mixture, samples=options.place.size * options.batch_size)
    if mixture.by == "tokens":
        if options.packing != "concat" or not options.seq_len:
            raise UsageError(
                f"with packing={options.packing!r} and seq_len={options.seq_len} samples have no fixed "
                "number of tokens, so a mixture cannot be counted by them",
                hint="use by='samples' or by='steps'",
            )
        return Schedule(mixture=mixture, of=options.seq_len)
    return Schedule(mixture=mixture)
