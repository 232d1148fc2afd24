"""Loops on a card as physics has them: the host queues work and goes on, the card works it off in order.

A step is a list of what the host does; what it takes is simulated, so that a cause can be taken away and the
gain be known instead of guessed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from stoker.recording import KINDS, GpuRecord, RankRecord, Recording, Samples, Seen, Spans, Stacks, Steps

QUEUE_S = 0.06  # of work that the host may be ahead: a thousand launches


@dataclass(frozen=True, kw_only=True)
class Do:
    """One thing: the host is at it for `host_s` and queues `card_s` of work; or it waits for the card."""

    what: str  # a kind of span; "" for code of the program's own
    host_s: float = 0.0
    card_s: float = 0.0
    waits: bool = False
    copies_s: float = 0.0  # a copy in the stream that the host waits for, after all that was queued
    pieces: int = 1  # kernels are queued one after the other
    line: str = ""


@dataclass
class Ran:
    """What it came to."""

    step_s: float
    busy: list[tuple[float, float]] = field(default_factory=list)
    spans: list[tuple[str, float, float, int]] = field(default_factory=list)
    own: list[tuple[str, float]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def held(self, at: float, seconds: float) -> Ran:
        """The same, all of it that begins after a moment so much later."""

        def later(t: float, begun: float) -> float:
            return t + seconds if begun >= at else t

        return Ran(
            step_s=self.step_s,
            busy=[(later(start, start), later(end, start)) for start, end in self.busy],
            spans=[(what, later(a, a), later(b, a), size) for what, a, b, size in self.spans],
            own=self.own,
            ends=[later(end, end - 1e-9) for end in self.ends],
        )


def ran(step: list[Do], *, steps: int = 120) -> Ran:
    """Go through the steps, host and card side by side."""
    host, card = 0.0, 0.0
    found, done = Ran(step_s=0.0), []
    for _ in range(steps):
        for one in step:
            begin = host
            for _ in range(one.pieces):
                host = max(host + one.host_s / one.pieces, card - QUEUE_S)
                if one.card_s:
                    start = max(host, card)
                    card = start + one.card_s / one.pieces
                    found.busy.append((start, card))
            if one.waits:
                host = max(host, card)
            if one.copies_s:
                waited = max(host, card)
                if waited > begin:  # as two events of the card around the copy tell it
                    found.spans.append(("sync", begin, waited, 0))
                host = card = waited + one.copies_s
                found.spans.append(("h2d", waited, host, 1 << 28))
            elif one.what:
                found.spans.append((one.what, begin, host, 0))
            else:
                found.own.append((one.line, host - begin))
        found.ends.append(host)
        done.append(max(host, card))
    found.ends[-1] = done[-1]
    found.step_s = (done[-1] - done[9]) / (steps - 10)
    return found


def recorded(run: Ran, *, counted: bool = True) -> Recording:
    """As a watched run would have it: spans, looks at the stack, readings of the card ten times a second."""
    wall = run.ends[-1]
    rows = sorted(run.spans, key=lambda row: row[1])
    ends = np.array(run.ends)
    unknown = np.full(len(ends), np.nan)
    spent: dict[str, float] = {}
    for line, seconds in run.own:
        spent[line] = spent.get(line, 0.0) + seconds
    rank = RankRecord(
        rank=0,
        node="a",
        gpu=0,
        spans=Spans(
            kind=np.array([KINDS.index(row[0]) for row in rows], np.uint8),
            start=np.array([row[1] for row in rows]),
            end=np.array([row[2] for row in rows]),
            step=np.zeros(len(rows), np.int64),
            bytes=np.array([row[3] for row in rows], np.int64),
        ),
        steps=Steps(
            number=np.arange(len(ends)),
            start=np.concatenate([[0.0], ends[:-1]]),
            end=ends,
            tokens=unknown,
            flops=unknown,
        ),
        memory=Samples(t=np.zeros(0), columns={}),
        stacks=Stacks(
            seconds=wall,
            looks=max(round(4 * wall), 40),
            seen=tuple(
                Seen(inside="", what=line.partition(" ")[2] or "other", line=line, seconds=s, looks=40)
                for line, s in spent.items()
            ),
        ),
    )
    return Recording(
        title="train.py",
        wall_s=wall,
        ended="exit 0",
        ranks=(rank,),
        gpus=(_card(run, wall, counted=counted),),
        hosts=(),
    )


def _card(run: Ran, wall: float, *, counted: bool) -> GpuRecord:
    t = np.arange(0.1, wall, 0.1)
    edges = np.concatenate([[0.0], t])
    sums = np.array([0.0, *np.cumsum([end - start for start, end in run.busy])])
    times = np.array([0.0, *(end for _, end in run.busy)])
    starts = np.array([start for start, _ in run.busy])

    def done(at: float) -> float:
        number = int(np.searchsorted(starts, at))
        return float(
            min(sums[number], sums[max(number - 1, 0)] + max(at - (starts[number - 1] if number else at), 0))
        )

    busy = 100 * np.diff([done(float(at)) for at in edges]) / np.diff(edges)
    assert times[-1] >= 0
    late = t + 0.13
    columns = {
        "util": busy,
        "power_w": np.full(len(t), 500.0),
        "sm_util": 0.9 * busy,
        "fb_used": np.full(len(t), 1e10),
    }
    columns |= {
        "any_tensor_util": 0.4 * busy,
        "fp32_util": 0.02 * busy,
        "pcie_rx_mib": np.full(len(t), 100.0),
    }
    if counted:
        columns["graphics_util"] = busy
    return GpuRecord(
        node="a",
        index=0,
        name="NVIDIA H200",
        power_limit_w=700.0,
        memory_bytes=1 << 37,
        samples=Samples(t=late, columns=columns),
    )
