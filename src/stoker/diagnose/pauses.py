"""Stall detection: steps, or what follows the last, far longer than usual for no reason a span tells."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from stoker.diagnose.card import mean_of
from stoker.diagnose.timeline import Timeline, left_at
from stoker.recording import Event, Floats, RankRecord, Recording, Samples

# A step is a pause when it takes three usual ones (uneven lengths of text make twice the usual) and at least
# a fifth of a second more (below that a garbage collection does it).
LONG_STEPS = 3.0
LEAST_S = 0.2
# The card's utilisation is a mean over the last second or less: what is read just after a pause began still
# tells of the time before.
LAG_S = 0.5
# The first steps compile, allocate and tune: they are start-up, not pauses.
WARM_UP = 2
_SAVING = re.compile("save|saving|checkpoint|ckpt|dump|serial|write", re.IGNORECASE)  # in names of functions


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """One pause, and what the card and the disk did meanwhile. Unknown is NaN."""

    rank: int
    start: float
    end: float
    excess_s: float  # over a usual step
    step: int
    last: bool  # no step ended after it
    util: float
    sm: float
    power: float  # as a share of the limit
    written: float  # bytes, until a second after: kernels write late
    saving_s: float  # seconds of it that checkpoint spans explain
    stacked: bool  # the watcher caught the process standing
    saving: bool  # its stack was seen meanwhile, in code that saves

    @property
    def seconds(self) -> float:
        return self.end - self.start


def find_pauses(recording: Recording, rank: RankRecord, line: Timeline) -> tuple[Pause, ...]:
    """Every pause of one rank, in order."""
    steps = rank.steps
    if not len(steps.end):
        return ()
    # Time between two steps belongs to the later one.
    starts = np.concatenate([steps.start[:1], np.maximum(steps.end[:-1], 0.0)])
    own = _own(line, starts, steps.end)
    usual = float(np.median(own))
    long = (own >= LONG_STEPS * usual) & (own - usual >= LEAST_S) & (steps.number > WARM_UP)
    found = [
        _pause(
            recording,
            rank,
            line,
            (float(starts[i]), float(steps.end[i])),
            excess_s=float(own[i]) - usual,
            step=int(steps.number[i]),
        )
        for i in np.flatnonzero(long).tolist()
    ]
    return (*found, *_after_the_last(recording, rank, line, usual))


def is_regular(pauses: tuple[Pause, ...]) -> bool:
    """Whether pauses come every so many steps."""
    between = np.diff([pause.step for pause in pauses if not pause.last])
    return len(between) >= 2 and float(np.std(between)) <= 0.2 * float(np.mean(between))


def _own(line: Timeline, starts: Floats, ends: Floats) -> Floats:
    """What a step took besides waiting for batches, copies, other ranks and evaluation."""
    explained = sum(line.within(name, starts, ends) for name in ("data", "copy", "collective", "evaluation"))
    return np.maximum((ends - starts) - explained, 0.0)


def _after_the_last(
    recording: Recording, rank: RankRecord, line: Timeline, usual: float
) -> tuple[Pause, ...]:
    begin, end = float(rank.steps.end[-1]), left_at(rank, wall_s=recording.wall_s)
    explained = line.within("evaluation", np.array([begin]), np.array([end]))
    own = end - begin - float(explained[0])  # an endless wait for data or for a rank is a stop too
    if own < max(LONG_STEPS * usual, LEAST_S):
        return ()
    step = int(rank.steps.number[-1]) + 1
    return (_pause(recording, rank, line, (begin, end), excess_s=own, step=step, last=True),)


def _pause(
    recording: Recording, rank: RankRecord, line: Timeline, window: tuple[float, float], *, excess_s: float,
    step: int, last: bool = False,
) -> Pause:  # fmt: skip
    start, end = window
    quiet = (end - excess_s, end)  # its usual part comes first
    cards = [card for card in recording.gpus if rank.gpu in (None, card.index)] or list(recording.gpus)
    powers = [
        _inside(card.samples, "power_w", quiet) / card.power_limit_w for card in cards if card.power_limit_w
    ]
    return Pause(
        rank=rank.rank,
        start=start,
        end=end,
        excess_s=excess_s,
        step=step,
        last=last,
        util=mean_of([_inside(card.samples, "util", quiet) for card in cards]),
        sm=mean_of([_inside(card.samples, "sm_util", quiet) for card in cards]),
        power=mean_of(powers),
        written=sum(_written(host.samples, quiet) for host in recording.hosts)
        if recording.hosts
        else math.nan,
        saving_s=float(line.within("checkpoint", np.array([start]), np.array([end]))[0]),
        stacked=any(event.what == "hang" and start <= event.t <= end + 1 for event in rank.events),
        saving=any(_in_a_save(event) for event in rank.events if start <= event.t <= end),
    )


def _in_a_save(event: Event) -> bool:
    frames = event.facts.get("frames", ()) if event.what == "stack" else ()
    return any(_SAVING.search(str(frame).rpartition("/")[2]) for frame in frames)


def _inside(samples: Samples, name: str, window: tuple[float, float]) -> float:
    column = samples.columns.get(name)
    if column is None:
        return math.nan
    start, end = window
    between = float(np.median(np.diff(samples.t))) if len(samples.t) > 1 else 0.0
    lag_s = min(max(LAG_S, between), (end - start) / 2)  # the first reading is also of the time before
    values = column[(samples.t > start + lag_s) & (samples.t <= end)]
    return mean_of(values.tolist())


def _written(samples: Samples, window: tuple[float, float]) -> float:
    column = samples.columns.get("disk_write")
    if column is None:
        return math.nan
    inside = (samples.t > window[0]) & (samples.t <= window[1] + 1.0)
    return float(np.nansum((column * np.diff(samples.t, prepend=0.0))[inside]))
