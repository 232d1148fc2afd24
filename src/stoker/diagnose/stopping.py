"""Hangs and checkpoint stalls: ranks that wait for one another, a host that stands, saving."""

from __future__ import annotations

from stoker.diagnose import remedies
from stoker.diagnose.features import Features
from stoker.diagnose.pauses import Pause
from stoker.diagnose.pricing import beside, idle_in, in_steps, speedup
from stoker.diagnose.thresholds import at
from stoker.diagnose.verdicts import Abstention, above, below, known, listed, percent, priced
from stoker.findings import Finding
from stoker.formats.sizes import counted


def collective_hang(features: Features) -> Finding | Abstention:
    """No step ends while the card spins, or ranks wait in a collective that others never joined."""
    kind = "collective_hang"
    if features.facts.get("profiler"):
        return Abstention(kind=kind, why="a profiler's trace ends when the profiler does, not the job")
    absent, waiting = _absent(features)
    found = [pause for pause in _long(features, at("spin_s")) if spins(pause) or (pause.last and waiting)]
    if not found and _lost_peer(features):
        return _peer_lost(features)
    if features.loop.regular or not found:
        return _blind(features, kind) or _spinning_all_along(features)
    worst = max(found, key=lambda pause: pause.seconds)
    ops = sorted(set(features.ranks.ops.values()))
    stood = _stacks(features, absent, worst)
    who = f"rank {listed(absent)} never joined" if absent else "a peer, or a kernel, never answers"
    if len(stood) == 1:
        who = f"{who} but {stood[0].partition(' ')[2].partition(' ')[2]}"
    if not absent and len(ops) > 1:
        who = f"ranks are in different ones, {' and '.join(ops)}"
    where = (f"ranks {listed(waiting)} wait in a collective; {who}",) if waiting else ()
    return priced(
        features,
        kind,
        share=sum(pause.excess_s for pause in found) / features.judged_s,
        confidence=0.95 if known(worst.sm) or waiting else 0.8,
        summary=f"no step ended for {worst.seconds:.1f} s while ranks wait in a collective: {who}",
        evidence=(
            _silence(features, worst),
            *_card_meanwhile(worst),
            *where,
            *stood,
        ),
        remedy=remedies.COLLECTIVE_HANG,
        missing=() if waiting else ("which rank is absent: collectives were not recorded",),
    )


def host_hang(features: Features) -> Finding | Abstention:
    """No step ends and the card is idle: the host stopped."""
    kind = "host_hang"
    if features.facts.get("profiler"):
        return Abstention(kind=kind, why="a profiler's trace ends when the profiler does, not the job")
    _, waiting = _absent(features)
    stops = [pause for pause in _long(features, at("hang_s") / 2) if _stopped(pause)]
    found = [
        one
        for one in stops
        if one.seconds >= at("hang_s") or one.seconds >= at("hang_share") * features.judged_s
    ]
    if waiting or features.loop.regular or not found:
        return _blind(features, kind) or _idle_all_along(features)
    worst = max(found, key=lambda pause: pause.seconds)
    where = _stacks(features, [worst.rank], worst)
    stood = where[-1].partition(" stood in ")[2] if where else ""
    return priced(
        features,
        kind,
        share=sum(pause.excess_s for pause in found) / features.judged_s,
        confidence=0.9 if known(worst.util) else 0.7,
        summary=f"no step ended for {worst.seconds:.1f} s and the GPU had nothing to do: the host stopped"
        + (f" in {stood}" if stood else ""),
        evidence=(_silence(features, worst), *_card_meanwhile(worst), *where),
        remedy=remedies.HOST_HANG[1:] if stood else remedies.HOST_HANG,
        missing=() if where else ("where it stopped: no stack was recorded",),
    )


def checkpoint_stall(features: Features) -> Finding | Abstention:
    """Saving stops the loop."""
    kind, loop = "checkpoint_stall", features.loop
    saves = [pause for pause in loop.pauses if _saves(features, pause)]
    spanned = loop.share["checkpoint"]
    pause_s = sum(pause.excess_s for pause in saves) / len(saves) if saves else 0.0
    share = max(spanned, pause_s * len(saves) / features.judged_s if features.judged_s else 0.0)
    if share < at("pause_share"):
        paused_s = sum(pause.excess_s for pause in loop.pauses if not (pause.last and _ended_well(features)))
        unseen = not features.host and paused_s >= at("pause_share") * features.judged_s
        missing = ("disk writes, which tell saving from a hang",) if unseen else ()
        return Abstention(kind=kind, why=f"saving took {percent(share)} of the time", missing=missing)
    between_s = sum(pause.excess_s for pause in saves if not pause.last)
    seen_s = features.judged_s * loop.share["checkpoint"]
    lost = (
        idle_in(features, "checkpoint")
        if seen_s >= between_s
        else beside(features, between_s / features.judged_s)
    )
    return priced(
        features,
        kind,
        share=share,
        speedup=speedup(lost),
        confidence=0.95 if spanned >= at("pause_share") else _sure_of(saves, loop.regular),
        summary=f"saving stops the loop for {percent(share)} of the time",
        evidence=_saving(saves, spanned),
        remedy=remedies.save(pause_s=pause_s if len(saves) > 1 else 0.0, step_s=loop.median_s),
        missing=() if spanned else ("checkpoint spans: saves were told from long steps and disk writes",),
    )


def evaluation(features: Features) -> Finding | Abstention:
    """Evaluation is work and no fault, unless it takes a large part of a training job."""
    share = features.loop.share["evaluation"]
    if share < at("evaluation"):
        return Abstention(kind="evaluation", why=f"evaluation took {percent(share)} of the time")
    return priced(
        features,
        "evaluation",
        share=share,
        speedup=speedup(in_steps(features, "evaluation")),  # what the card computes for it goes with it
        confidence=0.9,
        summary=f"evaluation takes {percent(share)} of the time",
        evidence=(f"{percent(share)} of {features.judged_s:.1f} s without gradients",),
        remedy=remedies.EVALUATION,
    )


def unexplained(features: Features) -> str:
    """A stop so long that a run is not called healthy unless it was seen what went on."""
    for pause in _long(features, at("hang_s")):
        if not (features.loop.regular or _wrote(pause) or _worked(pause)):
            return f"no step ended for {pause.seconds:.1f} s, and why was not seen"
    return ""


# --- pauses ---------------------------------------------------------------------------------------


def spins(pause: Pause) -> bool:
    """Utilisation high, work none."""
    if not above(pause.util, at("spin_util")):
        return False
    if known(pause.sm):
        return pause.sm < at("spin_sm")
    return below(pause.power, at("spin_power"))


def _long(features: Features, least_s: float) -> list[Pause]:
    """Pauses long enough for a hang; what follows the last step of a run that ended well is its end."""
    floor = max(least_s, at("hang_steps") * features.loop.median_s)
    ended = _ended_well(features)
    return [
        pause
        for pause in features.loop.pauses
        if pause.seconds >= floor and pause.saving_s < 0.5 * pause.seconds and not (ended and pause.last)
    ]


def _ended_well(features: Features) -> bool:
    return features.ended == "exit 0"


def _stopped(pause: Pause) -> bool:
    if _wrote(pause) or spins(pause):
        return False
    if not (known(pause.written) or pause.last or pause.stacked):
        return False  # it went on, and nobody saw the disk: saving looks the same
    if known(pause.util):
        return pause.util < at("idle_util")
    return pause.last or pause.stacked  # without a card: a loop that never went on, or one caught standing


def _wrote(pause: Pause) -> bool:
    """Enough, quickly enough for the loop to wait for it, and not while the process was seen standing."""
    quickly = pause.written >= at("written_s") * pause.seconds
    return above(pause.written, at("written")) and quickly and not pause.stacked


def _saves(features: Features, pause: Pause) -> bool:
    if pause.saving_s >= 0.5 * pause.excess_s:
        return True
    if pause.stacked or (pause.last and _ended_well(features)):
        return False
    if "checkpoint" not in features.loop.unseen:  # saves are spans, but for those of a kind nobody hooks
        return pause.saving
    if _worked(pause):
        return False
    if features.loop.regular and "data" not in features.loop.unseen:
        return _wrote(pause) or not known(pause.util) or pause.util < at("idle_util")
    return _wrote(pause) and not spins(pause)


def _worked(pause: Pause) -> bool:
    """The card did: an evaluation, or a longer batch."""
    busy = above(pause.util, 50) and not spins(pause)
    return busy and (above(pause.sm, 20) or above(pause.power, 0.45))


def _sure_of(saves: list[Pause], regular: bool) -> float:
    wrote = sum(map(_wrote, saves)) / len(saves)
    return round(0.5 + 0.25 * wrote + 0.15 * regular, 2)


def _silence(features: Features, pause: Pause) -> str:
    after = "and none followed" if pause.last else f"until step {pause.step} ended"
    start, end = features.began_s + pause.start, features.began_s + pause.end
    return f"no step of rank {pause.rank} ended from {start:.1f} s to {end:.1f} s, {after}"


def _card_meanwhile(pause: Pause) -> tuple[str, ...]:
    said = [
        f"GPU utilisation {pause.util:.0f}%" if known(pause.util) else "",
        f"SM activity {pause.sm:.1f}%" if known(pause.sm) else "",
        f"power {percent(pause.power)} of its limit" if known(pause.power) else "",
    ]
    return (", ".join(filter(None, said)) + " meanwhile",) if any(said) else ()


def _saving(saves: list[Pause], spanned: float) -> tuple[str, ...]:
    said = [f"checkpoint spans take {percent(spanned)} of the time"] if spanned else []
    if saves:
        seconds = sum(pause.excess_s for pause in saves) / len(saves)
        steps = listed([pause.step for pause in saves[:5]])
        said.append(f"{counted(len(saves), 'pause')} of {seconds:.1f} s on average, at step {steps}")
    written = [pause.written for pause in saves if _wrote(pause)]
    if written:
        said.append(f"{sum(written) / len(written) / 1e9:.2g} GB written in each, no loader wait")
    return tuple(said)


# --- who, where -----------------------------------------------------------------------------------


def _absent(features: Features) -> tuple[list[int], list[int]]:
    """Ranks that never joined a collective others wait in; if all wait, those that joined the fewest."""
    phases, joined = features.ranks.last_phase, features.ranks.joined
    waiting = sorted(rank for rank, phase in phases.items() if phase == "collective")
    absent = sorted(set(phases) - set(waiting)) if waiting else []
    if waiting and not absent and len(set(joined.values())) > 1:
        absent = [rank for rank in waiting if joined.get(rank) == min(joined.values())]
    return absent, [rank for rank in waiting if rank not in absent]


def _lost_peer(features: Features) -> bool:
    """The words with which NCCL and Gloo give up."""
    ended = features.ended.lower()
    words = ("connection closed by peer", "collective operation timeout", "nccl timeout", "timed out waiting")
    reset = "gloo" in ended and "connection reset by peer" in ended  # a store resets connections as well
    return reset or any(word in ended for word in words)


def _peer_lost(features: Features) -> Finding:
    return priced(
        features,
        "collective_hang",
        share=features.loop.share["stalled"],
        confidence=0.8,
        summary="a rank lost its peer in a collective, and the job ended with it",
        evidence=(f"it ended with: {features.ended[:200]}",),
        remedy=remedies.COLLECTIVE_HANG,
        missing=("which rank left first, and why: see the logs of the others",),
    )


def _stacks(features: Features, ranks: list[int], pause: Pause) -> tuple[str, ...]:
    """Where the ranks in question stood."""
    said = []
    for rank in ranks:
        events = features.events.get(rank, ())
        inside = [
            one for one in events if one.what in ("hang", "stack") and pause.start <= one.t <= pause.end + 1
        ]
        said += [f"rank {rank} stood in {one.text}" for one in inside[-1:]]
    return tuple(said)


# --- with little to go by -------------------------------------------------------------------------


def _blind(features: Features, kind: str) -> Abstention | None:
    unseen = [
        pause
        for pause in _long(features, at("hang_s"))
        if not (known(pause.util + pause.written) or pause.last or pause.stacked or _wrote(pause))
    ]
    if not unseen or features.loop.regular:
        return None
    worst = unseen[0]
    what = "the disk" if known(worst.util) else "the card"
    why = f"a step took {worst.seconds:.1f} s, and what {what} did meanwhile was not read"
    missing = "disk writes, which tell saving from a hang"
    if not known(worst.util):
        missing = "the GPU's utilisation during the long step"
    return Abstention(kind=kind, why=why, missing=(missing,))


def _spinning_all_along(features: Features) -> Finding | Abstention:
    kind, card = "collective_hang", features.card
    if features.loop.steps or card is None or features.judged_s < at("hang_s"):
        return Abstention(kind=kind, why="steps went on, or the card did not spin")
    works = card.sm >= at("spin_sm") if known(card.sm) else not below(card.power, at("spin_power"))
    if works or not above(card.util, at("spin_util")):
        return Abstention(kind=kind, why="the card does not spin", missing=("steps",))
    return priced(
        features,
        kind,
        share=1.0,
        confidence=0.6,
        summary=f"the GPU spins without working for all of {features.judged_s:.0f} s: it waits in a "
        "collective",
        evidence=(f"utilisation {card.util:.0f}%, power {percent(card.power)} of its limit",),
        remedy=remedies.COLLECTIVE_HANG,
        missing=("steps: whether any ended was not recorded",),
    )


def _idle_all_along(features: Features) -> Finding | Abstention:
    kind, card = "host_hang", features.card
    if features.loop.steps or card is None or features.judged_s < 2 * at("hang_s"):
        return Abstention(kind=kind, why="steps went on, or the card was not idle")
    if not below(card.util, 2):
        return Abstention(kind=kind, why="the card works", missing=("steps",))
    if features.ended.startswith("exit"):
        return Abstention(kind=kind, why=f"the program ended before its first step: {features.ended[:200]}")
    return priced(
        features,
        kind,
        share=1.0,
        confidence=0.5,
        summary=f"no step and an idle GPU for {features.judged_s:.0f} s: the host stands, or never began",
        evidence=(f"utilisation {card.util:.0f}%, power {percent(card.power)} of its limit",),
        remedy=remedies.HOST_HANG,
        missing=("steps: whether any ended was not recorded",),
    )
