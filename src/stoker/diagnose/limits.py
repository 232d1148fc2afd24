"""Resource exhaustion: clocks held down by heat or power (throttling), the card's memory, /dev/shm."""

from __future__ import annotations

import math

from stoker.diagnose import remedies
from stoker.diagnose.card import Card
from stoker.diagnose.features import Features
from stoker.diagnose.thresholds import at
from stoker.diagnose.verdicts import Abstention, above, below, known, percent, priced
from stoker.findings import Finding


def throttling(features: Features) -> Finding | Abstention:
    """Heat or the power supply holds the clocks down. The software power cap is not that."""
    kind, card = "throttling", features.card
    if card is None or not (known(card.clock_mean) or card.slowed or known(card.capped)):
        why = "clocks and their reasons were not read"
        return Abstention(kind=kind, why=why, missing=("clock event reasons",))
    worst = max(card.slowed.values(), default=0.0)
    low = card.clock if known(card.clock) else card.clock_mean
    if worst >= at("slowed") and not above(low, at("slowed_clock")):
        return _throttling(features, card, share=worst, clock=low if known(low) else 0.8, confidence=0.95)
    unread = not known(card.capped)
    slow = below(card.clock_mean, at("low_clock")) and above(card.util, 90) and below(card.power, 0.9)
    if unread and slow:
        return _throttling(features, card, share=1.0, clock=card.clock_mean, confidence=0.55)
    return Abstention(kind=kind, why="no slowdown reason was set for long")


def _throttling(features: Features, card: Card, *, share: float, clock: float, confidence: float) -> Finding:
    reason = max(card.slowed, key=lambda name: card.slowed[name], default="")
    cause = "thermal" if "thermal" in reason else "power_brake" if "power" in reason else ""
    heat = f", {card.temp_c:.0f} °C" if known(card.temp_c) else ""
    slowed = f"slowed down in {percent(share)} of the busy readings"
    return priced(
        features,
        "throttling",
        cause=cause,
        share=share * (1 - clock),
        confidence=confidence,
        summary=f"the GPU runs at {percent(clock)} of its clock: {reason or 'why was not read'}",
        evidence=(f"{slowed}, to {percent(clock)} of the boost clock{heat}",),
        remedy=remedies.POWER_BRAKE if cause == "power_brake" else remedies.HEAT,
        missing=() if reason else ("clock event reasons",),
    )


def memory_pressure(features: Features) -> Finding | Abstention:
    """The card is nearly full, and the allocator pays for it in every step."""
    kind, card, loop = "memory_pressure", features.card, features.loop
    lost = loop.unattributed if loop.steps else 0.0
    if "out of memory" in features.ended.lower() and "cuda" in features.ended.lower():
        return _memory(features, lost, "an allocation failed and the job ended with it")
    if features.retries and features.retries >= at("retries") * loop.steps:
        return _memory(features, lost, f"the allocator found no room and retried {features.retries} times")
    if card is None or not known(card.memory_peak):
        return Abstention(kind=kind, why="the card's memory was not read", missing=("GPU memory",))
    if _churns(card, lost):
        often = f"{card.memory_turns / 2:.1f} times a second"
        return _memory(
            features, lost, f"{percent(card.memory_swing)} of it is given back and taken again {often}"
        )
    why = f"at most {percent(card.memory_peak)} of the card's memory in use, steadily"
    return Abstention(kind=kind, why=why)


def _churns(card: Card, lost: float) -> bool:
    """Memory is given back and taken again at the limit, or so much of it that steps take longer."""
    if card.memory_swing < at("memory_swing") or card.memory_turns < at("memory_turns"):
        return False
    costs = lost >= at("memory_cost")
    limit = at("memory_half") if costs and card.memory_swing >= 2 * at("memory_swing") else at("memory_full")
    return card.memory_peak >= limit and (costs or card.memory_peak >= 0.9)


def _memory(features: Features, lost: float, how: str) -> Finding:
    peak = features.card.memory_peak if features.card else math.nan
    full = f"the card's memory is {percent(peak)} full: " if known(peak) else ""
    return priced(
        features,
        "memory_pressure",
        share=lost,
        confidence=0.9 if lost >= at("memory_cost") else 0.7,
        summary=f"{full}{how}",
        evidence=(f"{full}{how}", f"{percent(lost)} of the time outside data, copies and compute"),
        remedy=remedies.MEMORY,
    )


def shm_pressure(features: Features) -> Finding | Abstention:
    """/dev/shm is full, filling, or was when a worker died of it."""
    kind, host = "shm_pressure", features.host
    crashed = "SIGBUS" in features.ended or _bus_error(features)
    if host is None or not known(host.shm_peak):
        if crashed:
            return _shm(features, 0.7, "a process died of a bus error", ("how full /dev/shm was",))
        return Abstention(kind=kind, why="/dev/shm was not read", missing=("/dev/shm",))
    full = f"/dev/shm is {percent(host.shm_peak)} full"
    if not crashed and features.fact("num_workers") == 0 and not host.workers >= 0.5:
        return Abstention(kind=kind, why=f"{full}, but no worker passes batches through it")
    if crashed:
        return _shm(features, 0.98 if host.shm_peak >= 0.5 else 0.8, f"a process died of a bus error; {full}")
    if host.shm_peak >= at("shm_full"):
        return _shm(features, 0.9, full)
    batch = features.fact("batch_bytes") if features.fact("num_workers") >= 1 else math.nan
    if above(batch, (1 - host.shm_peak) * host.shm_total):
        return _shm(features, 0.85, f"{full}: the next batch of {batch / 2**20:.0f} MiB does not fit")
    if host.shm_grew >= 0.5 and host.workers > 0 and _stands_in_loader(features):
        return _shm(features, 0.75, f"the loader gives no batch, and {full}: as much again does not fit")
    soon = host.shm_full_in_s <= max(at("shm_soon") * features.judged_s, 300.0)
    if soon and host.shm_peak >= 0.2:
        return _shm(features, 0.75, f"{full} and its trend fills it in {host.shm_full_in_s:.0f} s")
    return Abstention(kind=kind, why=f"/dev/shm was at most {percent(host.shm_peak)} full")


def _stands_in_loader(features: Features) -> bool:
    hangs = [event for events in features.events.values() for event in events if event.what == "hang"]
    return any(event.facts.get("inside") == "data" for event in hangs)


def _bus_error(features: Features) -> bool:
    texts = [event.text.lower() for events in features.events.values() for event in events]
    return any("bus error" in text or "sigbus" in text for text in texts)


def _shm(features: Features, confidence: float, what: str, missing: tuple[str, ...] = ()) -> Finding:
    host = features.host
    size = (f"/dev/shm holds {host.shm_total / 2**30:.3g} GiB",) if host and known(host.shm_total) else ()
    return priced(
        features,
        "shm_pressure",
        share=features.loop.share["stalled"] if any(pause.last for pause in features.loop.pauses) else 0.0,
        confidence=confidence,
        summary=f"{what}; loader workers pass batches through it and die, or hang, without room",
        evidence=(what, *size),
        remedy=remedies.shm(features),
        missing=missing,
    )
