"""Prices: what a step would take if one cause alone were gone, bounded by what comes next.

Taking away time of the host's gives a step no more than the card was idle meanwhile: what it worked off then
is still to be done. That is the card's ledger by state. Without readings of a card the host's time is all
there is.
Shares here are of the time between steps (`Features.paced`): start-up and ends are paid once.
"""

from __future__ import annotations

from stoker.diagnose.features import Features

# NVML's utilisation calls a reading busy in which one kernel ran for part of it, and counts copies.
_READ_TWICE = 0.05
_HOST_WORK = ("unattributed", "stalled")  # where the program's own code is


def idle_in(features: Features, *states: str) -> float:
    """Share of the time in which the host was in these states and the card had nothing to do; of a run whose
    card was not read, in which the host was in these states."""
    paced = features.paced
    if paced is None:
        return sum(features.loop.share[name] for name in states)
    spent = sum(paced.share[name] for name in states)
    if paced.ledger is None:
        return spent
    return min(spent, sum(paced.ledger.idle[name] for name in states) + margin(features))


def own_code(features: Features, share: float) -> float:
    """Of the program's own code between steps, that which takes this share of the judged time."""
    whole = features.loop.unattributed + features.loop.stood
    return min(share / whole, 1.0) * idle_in(features, *_HOST_WORK) if whole > 0 else 0.0


def beside(features: Features, share: float) -> float:
    """Of time of the host's in whatever state, this share of the judged time."""
    of_steps = min(share / max(features.loop.stepping, share, 0.01), 1.0)
    return min(of_steps, idle(features))


def idle(features: Features) -> float:
    """Share of the time in which the card had nothing to do; 1 where that was not read."""
    told = features.paced.ledger if features.paced else None
    return 1.0 if told is None else min(1.0 - told.busy + margin(features), 1.0)


def margin(features: Features) -> float:
    told = features.paced.ledger if features.paced else None
    return 0.0 if told is None or told.exact else _READ_TWICE


def of_judged(features: Features, lost: float) -> float:
    """A share of the time between steps as one of the judged time."""
    return lost * features.paced.whole if features.paced else lost


def in_steps(features: Features, state: str) -> float:
    """Share of the time between steps, or of all that was judged where there are no two steps."""
    return features.paced.share[state] if features.paced else features.loop.share[state]


def speedup(lost: float) -> float:
    """How many times as fast steps are without so much of their time."""
    return 1 / (1 - min(max(lost, 0.0), 0.999))
