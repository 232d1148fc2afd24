"""Features: a recording as the numbers that rules look at, of loop, card, host and ranks. Unknown is NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.diagnose.activity import Worked, last_look
from stoker.diagnose.card import Card, card
from stoker.diagnose.host import Host, host
from stoker.diagnose.judged import from_first_step
from stoker.diagnose.ledger import Ledger, ledger
from stoker.diagnose.pauses import Pause, find_pauses, is_regular
from stoker.diagnose.ranks import Together, together
from stoker.diagnose.timeline import STATES, Timeline, timeline
from stoker.intervals import Intervals, merged
from stoker.recording import KINDS, Event, Floats, RankRecord, Recording, Stacks


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """What the training loop did. Shares are of the wall time, means over the ranks."""

    steps: int
    share: dict[str, float]
    unseen: frozenset[str]  # kinds of spans that nobody could have recorded
    pauses: tuple[Pause, ...] = ()
    regular: bool = False
    median_s: float = math.nan
    unattributed: float = math.nan  # of the wall time, between the ends of the first and the last step
    stepping: float = 1.0  # share of the wall time from the end of the first step to that of the last
    stood: float = 0.0  # the same of stops that no span explains
    burst: float = math.nan  # of the loader's wait: how much of it came in a few long waits
    late: float = math.nan  # the loader's share of all steps but the first
    first_steps_wait: float = math.nan  # of the loader's wait: how much of it came in the first two steps
    epochs: float = math.nan  # of it: how much came at the first step and again every so many
    copy_gb_s: float = math.nan
    copy_bytes: float = math.nan  # of one step
    tokens_s: float = math.nan
    tflops: float = math.nan  # of one card, while it computed

    @property
    def working(self) -> float:
        """Share of the time the card had work: while kernels were launched, or the host waited for them."""
        return self.share["compute"] + self.share["sync"]

    @property
    def paused(self) -> float:
        """Seconds that steps lasted longer than usual for no reason a span tells."""
        return sum(pause.excess_s for pause in self.pauses)


@dataclass(frozen=True, kw_only=True, slots=True)
class Paced:
    """What steps were made of: shares of the time from the end of the first judged step to that of the last,
    and of the same time the cards' ledger. What gain a price tells is a gain of this."""

    whole: float  # share of the judged time that all steps take, the first one too
    share: dict[str, float]
    ledger: Ledger | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """Everything a rule may look at."""

    judged_s: float  # wall time from the first usual step on; Recording.wall_s is the whole run's
    began_s: float  # when that was, in the recording's time
    cards: int
    ended: str
    loop: Loop
    card: Card | None
    host: Host | None
    ranks: Together
    facts: dict[str, Any] = field(default_factory=dict)  # the recording's own
    events: dict[int, tuple[Event, ...]] = field(default_factory=dict)  # by rank
    retries: int = 0  # of the allocator, all ranks together
    stacks: Stacks = field(default_factory=Stacks)  # of the rank with most steps
    ledger: Ledger | None = None  # of the cards; None where none was read
    paced: Paced | None = None  # None where there were not two steps
    worked: Worked | None = None  # what a profiler saw the card do, in the last look at the busiest rank

    def fact(self, *names: str) -> float:
        """A number among the facts under any of its names, also inside the loader's; NaN if absent."""
        loader = self.facts.get("loader")
        for source in (self.facts, loader if isinstance(loader, dict) else {}):
            for name in names:
                value = source.get(name)
                if isinstance(value, (int, float)):
                    return float(value)
        return math.nan


def features(recording: Recording) -> Features:
    """Boil a recording down; what came before the first step is not looked at."""
    judged, began_s = from_first_step(recording)
    lines = tuple(timeline(rank, wall_s=judged.wall_s, ended=judged.ended) for rank in judged.ranks)
    unseen = frozenset(judged.facts.get("unseen", ()))
    loop = _loop(judged, lines, unseen)
    stacks = max(judged.ranks, key=lambda rank: len(rank.steps.end)).stacks if judged.ranks else Stacks()
    return Features(
        judged_s=judged.wall_s,
        began_s=began_s,
        cards=max(len(judged.gpus), len(judged.ranks), 1),
        ended=judged.ended,
        loop=loop,
        card=card(judged, idle=_idle(loop, judged.wall_s, stacks), copying=loop.share["copy"]),
        host=host(judged, lines[0] if lines else None),
        ranks=together(judged.ranks, lines),
        facts=judged.facts,
        events={rank.rank: rank.events for rank in judged.ranks},
        retries=sum(map(_retries, judged.ranks)),
        stacks=stacks,
        ledger=ledger(judged, lines),
        paced=_paced(judged, lines),
        worked=last_look(recording),
    )


def _paced(recording: Recording, lines: tuple[Timeline, ...]) -> Paced | None:
    rank = max(recording.ranks, key=lambda one: len(one.steps.end), default=None)
    ends = rank.steps.end if rank is not None else np.zeros(0)
    if rank is None or len(ends) < 2 or ends[-1] <= ends[0] or recording.wall_s <= 0:
        return None
    free = _unwatched(rank, float(ends[0]), float(ends[-1]))
    spent = {
        name: sum(float(line.within(name, free.start, free.end).sum()) for line in lines) / len(lines)
        for name in STATES
    }
    return Paced(
        whole=min(float(ends[-1] - rank.steps.start[0]) / recording.wall_s, 1.0),
        share={name: seconds / free.seconds for name, seconds in spent.items()},
        ledger=ledger(recording, lines, within=free),
    )


def _unwatched(rank: RankRecord, begin_s: float, end_s: float) -> Intervals:
    """This time without deep looks, in which steps take longer and end with the profiler's own work; but all
    of it where a trace is all there is."""
    whole = merged(np.array([begin_s]), np.array([end_s]))
    looks = merged(np.array([one.start_s for one in rank.looks]), np.array([one.end_s for one in rank.looks]))
    left = whole.without(looks)
    return left if left.seconds > 0.1 * whole.seconds else whole


def _idle(loop: Loop, judged_s: float, stacks: Stacks) -> float:
    """The share of time in which the loop gave the card nothing to do, as far as it was seen: also in code of
    the program's own that looks at its stack have met."""
    if not loop.steps:
        return 0.0
    paused = loop.paused / judged_s if judged_s > 0 else 0.0
    known = sum(loop.share[name] for name in ("data", "checkpoint", "startup"))
    unseen = [one for one in stacks.seen if not one.inside]
    looked = sum(one.seconds for one in unseen)
    own = sum(one.seconds for one in unseen if one.what not in ("compute", "optimizer"))
    outside = loop.unattributed * own / looked if looked > 0 else 0.0
    return min(known + max(paused, loop.share["stalled"]) + outside, 1.0)


def _loop(recording: Recording, lines: tuple[Timeline, ...], unseen: frozenset[str]) -> Loop:
    rank, line = max(
        zip(recording.ranks, lines, strict=True),
        key=lambda pair: len(pair[0].steps.end),
        default=(None, None),
    )
    share = _shares(lines, recording.wall_s)
    if rank is None or line is None:
        return Loop(steps=0, share=share, unseen=frozenset(KINDS))
    waits = line.within("data", rank.steps.start, rank.steps.end)
    each = [find_pauses(recording, *pair) for pair in zip(recording.ranks, lines, strict=True)]
    pauses = max(each, key=lambda some: sum(pause.excess_s for pause in some))
    gb_s, copied = _copying(rank)
    return Loop(
        steps=len(rank.steps.end),
        median_s=_median(rank.steps.end - rank.steps.start),
        share=share,
        unattributed=_between_steps("unattributed", rank, line, recording.wall_s),
        stepping=_stepping(rank, recording.wall_s),
        stood=_between_steps("stalled", rank, line, recording.wall_s),
        unseen=unseen,
        burst=_burst(waits),
        late=_late(waits, rank),
        first_steps_wait=_first_steps_wait(waits, rank),
        epochs=max(_epochs(waits, rank), _restarts(rank)),
        copy_gb_s=gb_s,
        copy_bytes=copied,
        tokens_s=_per_second(rank.steps.tokens, recording.wall_s),
        tflops=_tflops(rank, line),
        pauses=pauses,
        regular=is_regular(pauses),
    )


def _shares(lines: tuple[Timeline, ...], wall_s: float) -> dict[str, float]:
    if not lines or wall_s <= 0:
        return dict.fromkeys(STATES, 0.0)
    spent = [line.seconds() for line in lines]
    return {name: sum(one[name] for one in spent) / len(spent) / wall_s for name in STATES}


def _between_steps(state: str, rank: RankRecord, line: Timeline, wall_s: float) -> float:
    """The first step does not count: it loads kernels, and its forward is not seen."""
    seconds = line.within(state, rank.steps.end[:1], rank.steps.end[-1:])
    return float(seconds.sum()) / wall_s if wall_s > 0 else 0.0


def _stepping(rank: RankRecord, wall_s: float) -> float:
    return (
        float(rank.steps.end[-1] - rank.steps.end[0]) / wall_s if len(rank.steps.end) and wall_s > 0 else 0.0
    )


def _median(values: Floats) -> float:
    return float(np.median(values)) if len(values) else math.nan


def _burst(waits: Floats) -> float:
    """How much of the wait came in a few long ones."""
    return float(waits[_long(waits)].sum() / waits.sum()) if waits.sum() > 0 else 0.0


def _late(waits: Floats, rank: RankRecord) -> float:
    """The first step is longer than the others for reasons of its own."""
    steps_s = (rank.steps.end - rank.steps.start)[1:].sum()
    return float(waits[1:].sum() / steps_s) if steps_s > 0 else math.nan


def _long(waits: Floats) -> NDArray[np.bool_]:
    """Waits ten times the usual one and above a tenth of the longest."""
    return waits > max(10 * float(np.median(waits)), 0.1 * float(waits.max()))


def _epochs(waits: Floats, rank: RankRecord) -> float:
    """A loader that starts anew shows a long wait at the run's first step, and the same again and again."""
    if waits.sum() <= 0 or rank.steps.number[0] > 2:
        return 0.0
    at = np.flatnonzero(_long(waits))
    between = np.diff(at)
    if len(at) < 3 or at[0] > 0 or np.std(between) > 0.2 * np.mean(between):
        return 0.0
    return float(waits[at].sum() / waits.sum())


def _restarts(rank: RankRecord) -> float:
    """Of the loader's wait: how much was for workers to be started and ended, and for the first batches of
    those that had just been started, where that happened again after the first time."""
    starts = [event.t for event in rank.events if event.what == "workers started"]
    data = rank.spans.kind == KINDS.index("data")
    began, took = rank.spans.start[data], (rank.spans.end - rank.spans.start)[data]
    if len([one for one in starts if one > 0]) < 2 or took.sum() <= 0:
        return 0.0
    first = np.searchsorted(began, np.array(starts) - 0.001)
    which = np.concatenate([first, first + 1])
    moved = rank.spans.bytes[data]
    if moved.any():  # a wait that brings no batch is for the end of an epoch, or for the next one's workers
        which = np.concatenate([which, np.flatnonzero(moved == 0)])
    which = np.unique(which[which < len(took)])
    return float(took[which].sum() / took.sum())


def _first_steps_wait(waits: Floats, rank: RankRecord) -> float:
    """The first steps wait for workers to start; only a recording of the run's beginning shows them."""
    if waits.sum() <= 0:
        return 0.0
    return float(waits[rank.steps.number <= 2].sum() / waits.sum())


def _copying(rank: RankRecord) -> tuple[float, float]:
    """The rate copies reached, and the bytes of a step."""
    copies = (rank.spans.kind == KINDS.index("h2d")) & (rank.spans.bytes > 0)
    seconds = float((rank.spans.end - rank.spans.start)[copies].sum())
    size = float(rank.spans.bytes[copies].sum())
    if seconds <= 0:
        return math.nan, math.nan
    return size / seconds / 1e9, size / max(len(rank.steps.end), 1)


def _per_second(values: Floats, wall_s: float) -> float:
    return float(np.nansum(values)) / wall_s if wall_s > 0 and np.isfinite(values).any() else math.nan


def _tflops(rank: RankRecord, line: Timeline) -> float:
    """TFLOP/s while the card worked: waits for data do not make a kernel slow."""
    spent = line.seconds()
    seconds = spent["compute"] + spent["sync"]
    if not np.isfinite(rank.steps.flops).any() or seconds <= 0:
        return math.nan
    return float(np.nansum(rank.steps.flops)) / seconds / 1e12


def _retries(rank: RankRecord) -> int:
    """Since the first reading: a counter of the whole process also has those of its first step."""
    counts = rank.memory.columns.get("retries", np.zeros(0))
    known = counts[np.isfinite(counts)]
    return int(known.max() - known[0]) if len(known) else 0
