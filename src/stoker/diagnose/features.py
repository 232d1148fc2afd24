"""A recording as the numbers that rules look at: the loop, the card, the host, the ranks. Unknown is NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.diagnose.card import Card, card
from stoker.diagnose.host import Host, host
from stoker.diagnose.judged import from_first_step
from stoker.diagnose.pauses import Pause, find_pauses, is_regular
from stoker.diagnose.ranks import Together, together
from stoker.diagnose.timeline import STATES, Timeline, timeline
from stoker.recording import KINDS, Event, Floats, RankRecord, Recording


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """What the training loop did. Shares are of the wall time, means over the ranks."""

    steps: int
    median_s: float
    share: dict[str, float]
    bare: float  # share of the wall time unattributed between the ends of the first and the last step
    unseen: frozenset[str]  # kinds of spans that nobody could have recorded
    burst: float  # of the loader's wait: how much of it came in a few long waits
    late: float  # the loader's share of all steps but the first
    opening: float  # of the loader's wait: how much of it came in the first two steps
    epochs: float  # of the loader's wait: how much of it came at the first step and again every so many
    copy_gb_s: float
    copy_bytes: float  # of one step
    tokens_s: float
    tflops: float  # of one card, while it computed
    pauses: tuple[Pause, ...]
    regular: bool

    @property
    def working(self) -> float:
        """Share of the time the card had work: while kernels were launched, or the host waited for them."""
        return self.share["compute"] + self.share["sync"]

    @property
    def paused(self) -> float:
        """Seconds that steps lasted longer than usual for no reason a span tells."""
        return sum(pause.excess_s for pause in self.pauses)


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """Everything a rule may look at."""

    wall_s: float  # from the first step on
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
    recording, began_s = from_first_step(recording)
    lines = tuple(timeline(rank, wall_s=recording.wall_s, ended=recording.ended) for rank in recording.ranks)
    unseen = frozenset(recording.facts.get("unseen", ()))
    loop = _loop(recording, lines, unseen)
    return Features(
        wall_s=recording.wall_s,
        began_s=began_s,
        cards=max(len(recording.gpus), len(recording.ranks), 1),
        ended=recording.ended,
        loop=loop,
        card=card(recording, idle=_idle(loop, recording.wall_s), copying=loop.share["copy"]),
        host=host(recording, lines[0] if lines else None),
        ranks=together(recording.ranks, lines),
        facts=recording.facts,
        events={rank.rank: rank.events for rank in recording.ranks},
        retries=sum(map(_retries, recording.ranks)),
    )


def _idle(loop: Loop, wall_s: float) -> float:
    """The share of time in which the loop gave the card nothing to do, as far as it was seen."""
    if not loop.steps:
        return 0.0
    paused = loop.paused / wall_s if wall_s > 0 else 0.0
    known = sum(loop.share[name] for name in ("data", "checkpoint", "startup"))
    return min(known + max(paused, loop.share["stalled"]), 1.0)


def _loop(recording: Recording, lines: tuple[Timeline, ...], unseen: frozenset[str]) -> Loop:
    rank, line = max(
        zip(recording.ranks, lines, strict=True),
        key=lambda pair: len(pair[0].steps.end),
        default=(None, None),
    )
    share = _shares(lines, recording.wall_s)
    if rank is None or line is None:
        nothing = dict.fromkeys(
            (
                "median_s",
                "bare",
                "burst",
                "late",
                "opening",
                "epochs",
                "copy_gb_s",
                "copy_bytes",
                "tokens_s",
                "tflops",
            ),
            math.nan,
        )
        return Loop(steps=0, share=share, unseen=frozenset(KINDS), pauses=(), regular=False, **nothing)
    waits = line.within("data", rank.steps.start, rank.steps.end)
    each = [find_pauses(recording, *pair) for pair in zip(recording.ranks, lines, strict=True)]
    pauses = max(each, key=lambda some: sum(pause.excess_s for pause in some))
    gb_s, copied = _copying(rank)
    return Loop(
        steps=len(rank.steps.end),
        median_s=_median(rank.steps.end - rank.steps.start),
        share=share,
        bare=_bare(rank, line, recording.wall_s),
        unseen=unseen,
        burst=_burst(waits),
        late=_late(waits, rank),
        opening=_opening(waits, rank),
        epochs=_epochs(waits, rank),
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


def _bare(rank: RankRecord, line: Timeline, wall_s: float) -> float:
    """The first step does not count: it loads kernels, and its forward is not seen."""
    seconds = line.within("unattributed", rank.steps.end[:1], rank.steps.end[-1:])
    return float(seconds.sum()) / wall_s if wall_s > 0 else 0.0


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


def _opening(waits: Floats, rank: RankRecord) -> float:
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
