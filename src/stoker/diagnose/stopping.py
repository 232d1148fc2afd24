"""The loop stops: hangs, saving, shared memory that runs out."""

from __future__ import annotations

import math

from stoker.diagnose.features import Features
from stoker.diagnose.pauses import Pause
from stoker.diagnose.thresholds import at
from stoker.diagnose.verdicts import Abstention, above, below, known, percent, priced
from stoker.findings import Finding


def collective_hang(features: Features) -> Finding | Abstention:
    """No step ends while the card spins, or ranks wait in a collective that others never joined."""
    kind = "collective_hang"
    absent, waiting = _absent(features)
    found = [pause for pause in _long(features, at("spin_s")) if spins(pause) or (pause.last and waiting)]
    if features.loop.regular or not found:
        return _blind(features, kind) or _spinning_all_along(features)
    worst = max(found, key=lambda pause: pause.seconds)
    who = f"rank {', '.join(map(str, absent))} never joined" if absent else "a peer or a kernel never answers"
    evidence = [_silence(worst), *_card_meanwhile(worst)]
    if waiting:
        evidence.append(f"ranks {', '.join(map(str, waiting))} wait in a collective; {who}")
    return priced(
        features,
        kind,
        share=sum(pause.excess_s for pause in found) / features.wall_s,
        confidence=0.95 if known(worst.sm) or waiting else 0.8,
        summary=f"no step ended for {worst.seconds:.1f} s while the GPU spins in a kernel that waits: {who}",
        evidence=tuple(evidence),
        remedy=(
            "TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1: the flight recorder names the collective and the rank",
            "stoker watch shows each rank's stack while it hangs; look for a branch that only some ranks take",
            "init_process_group(timeout=timedelta(minutes=5)): a lost peer then ends the job and frees the cards",
        ),
        missing=() if waiting else ("which rank is absent: collectives were not recorded",),
    )


def host_hang(features: Features) -> Finding | Abstention:
    """No step ends and the card is idle: the host stopped."""
    kind = "host_hang"
    _, waiting = _absent(features)
    found = [pause for pause in _long(features, at("hang_s")) if _stopped(features, pause)]
    if waiting or features.loop.regular or not found:
        return _blind(features, kind) or _idle_all_along(features)
    worst = max(found, key=lambda pause: pause.seconds)
    where = [
        event.text
        for event in features.events
        if event.what in ("hang", "stack") and worst.start <= event.t <= worst.end + 1
    ]
    return priced(
        features,
        kind,
        share=sum(pause.excess_s for pause in found) / features.wall_s,
        confidence=0.9 if known(worst.util) else 0.7,
        summary=f"no step ended for {worst.seconds:.1f} s and the GPU was idle: the host stopped",
        evidence=(_silence(worst), *_card_meanwhile(worst), *where[:1]),
        remedy=(
            "py-spy dump --pid PID names the line it stands in (stoker watch records it while it lasts)",
            "look for a lock, a queue or a request without a timeout in that line",
        ),
        missing=() if where else ("where it stopped: no stack was recorded",),
    )


def checkpoint_stall(features: Features) -> Finding | Abstention:
    """Saving stops the loop."""
    kind = "checkpoint_stall"
    loop = features.loop
    saves = [pause for pause in loop.pauses if _saves(features, pause)]
    told = loop.share["checkpoint"]
    share = max(told, sum(pause.excess_s for pause in saves) / max(features.wall_s, 1e-9))
    if share < at("pause_share"):
        missing = () if features.host or not loop.pauses else ("disk writes, which tell saving from a hang",)
        return Abstention(kind=kind, why=f"saving took {percent(share)} of the time", missing=missing)
    return priced(
        features,
        kind,
        share=share,
        confidence=0.95 if told >= at("pause_share") else _sure_of(saves, loop.regular),
        summary=f"saving stops the loop for {percent(share)} of the time",
        evidence=_saving(features, saves, told),
        remedy=(
            "save in the background: stoker's Checkpointer, or torch.distributed.checkpoint.async_save",
            _interval(features, saves),
        ),
        missing=() if told else ("checkpoint spans: saves were told from long steps and disk writes",),
    )


def shm_pressure(features: Features) -> Finding | Abstention:
    """/dev/shm is full, filling, or was when a worker died of it."""
    kind, host = "shm_pressure", features.host
    crashed = "SIGBUS" in features.ended or any(
        "bus error" in event.text.lower() for event in features.events
    )
    if host is None or not known(host.shm_peak):
        if crashed:
            return _shm_finding(features, 0.7, "a process died of a bus error", ("how full /dev/shm was",))
        return Abstention(kind=kind, why="/dev/shm was not read", missing=("/dev/shm",))
    soon = host.shm_full_in_s <= max(at("shm_soon") * features.wall_s, 300.0)
    if crashed and host.shm_peak >= 0.5:
        return _shm_finding(
            features, 0.98, f"a process died of a bus error with /dev/shm {percent(host.shm_peak)} full"
        )
    if host.shm_peak >= at("shm_full"):
        return _shm_finding(features, 0.9, f"/dev/shm is {percent(host.shm_peak)} full")
    if soon and host.shm_peak >= 0.2:
        return _shm_finding(
            features,
            0.75,
            f"/dev/shm is {percent(host.shm_peak)} full and its trend fills it in {host.shm_full_in_s:.0f} s",
        )
    return Abstention(kind=kind, why=f"/dev/shm was at most {percent(host.shm_peak)} full")


# --- pauses ---------------------------------------------------------------------------------------


def spins(pause: Pause) -> bool:
    """Utilisation high, work none."""
    if not above(pause.util, at("spin_util")):
        return False
    if known(pause.sm):
        return pause.sm < at("spin_sm")
    return below(pause.power, at("spin_power"))


def _long(features: Features, least_s: float) -> list[Pause]:
    if features.ended == "exit 0":
        pauses = [pause for pause in features.loop.pauses if not pause.last]
    else:
        pauses = list(features.loop.pauses)
    floor = max(least_s, at("hang_steps") * features.loop.median_s)
    return [pause for pause in pauses if pause.seconds >= floor and pause.told < 0.5 * pause.seconds]


def _stopped(features: Features, pause: Pause) -> bool:
    if _wrote(pause) or spins(pause):
        return False
    if known(pause.util):
        return pause.util < at("idle_util")
    return pause.last  # without the card only a loop that never went on is surely stopped


def _wrote(pause: Pause) -> bool:
    return above(pause.written, at("written"))


def _saves(features: Features, pause: Pause) -> bool:
    if pause.told >= 0.5 * pause.excess_s:
        return True
    worked = above(pause.util, 50) and not spins(pause)
    if worked and (above(pause.sm, 20) or above(pause.power, 0.45)):
        return False  # the card worked: evaluation, or a longer batch
    if features.loop.regular and "data" not in features.loop.unseen:
        return _wrote(pause) or not known(pause.util) or pause.util < at("idle_util")
    return _wrote(pause) and not spins(pause)


def _sure_of(saves: list[Pause], regular: bool) -> float:
    wrote = sum(map(_wrote, saves)) / len(saves)
    return round(0.5 + 0.25 * wrote + 0.15 * regular, 2)


def _silence(pause: Pause) -> str:
    after = "and none followed" if pause.last else f"until step {pause.step} ended"
    return f"no step ended from {pause.start:.1f} s to {pause.end:.1f} s, {after}"


def _card_meanwhile(pause: Pause) -> tuple[str, ...]:
    said = [
        f"GPU utilisation {pause.util:.0f}%" if known(pause.util) else "",
        f"SM activity {pause.sm:.1f}%" if known(pause.sm) else "",
        f"power {percent(pause.power)} of its limit" if known(pause.power) else "",
    ]
    return (", ".join(filter(None, said)) + " meanwhile",) if any(said) else ()


def _absent(features: Features) -> tuple[list[int], list[int]]:
    """Ranks that never joined a collective that others wait in at the end; those that joined the fewest if all wait."""
    phases = features.ranks.last_phase
    waiting = sorted(rank for rank, phase in phases.items() if phase == "collective")
    absent = sorted(set(phases) - set(waiting)) if waiting else []
    joined = features.ranks.joined
    if waiting and not absent and len(set(joined.values())) > 1:
        absent = [rank for rank in waiting if joined.get(rank) == min(joined.values())]
    return absent, [rank for rank in waiting if rank not in absent]


def _blind(features: Features, kind: str) -> Abstention | None:
    unseen = [pause for pause in _long(features, at("hang_s")) if not known(pause.util) and not pause.last]
    if unseen and not features.loop.regular and not any(map(_wrote, unseen)):
        why = f"a step took {unseen[0].seconds:.1f} s, and what the card did meanwhile was not read"
        return Abstention(kind=kind, why=why, missing=("the GPU's utilisation during the long step",))
    return None


def _spinning_all_along(features: Features) -> Finding | Abstention:
    kind, card = "collective_hang", features.card
    if features.loop.steps or card is None or features.wall_s < at("hang_s"):
        return Abstention(kind=kind, why="steps went on, or the card did not spin")
    if not (
        above(card.util, at("spin_util"))
        and (below(card.sm, at("spin_sm")) or (not known(card.sm) and below(card.power, at("spin_power"))))
    ):
        return Abstention(kind=kind, why="the card does not spin", missing=("steps",))
    return priced(
        features, kind, share=1.0, confidence=0.6,
        summary=f"the GPU spins without working for all of {features.wall_s:.0f} s: it waits in a collective",
        evidence=(f"utilisation {card.util:.0f}%, SM activity {card.sm:.1f}%, power {percent(card.power)} of its limit",),
        remedy=("py-spy dump --pid PID on every rank: the one that is not in the collective is the one to look at",),
        missing=("steps: whether any ended was not recorded",),
    )  # fmt: skip


def _idle_all_along(features: Features) -> Finding | Abstention:
    kind, card = "host_hang", features.card
    if features.loop.steps or card is None or features.wall_s < 2 * at("hang_s"):
        return Abstention(kind=kind, why="steps went on, or the card was not idle")
    if not below(card.util, 2):
        return Abstention(kind=kind, why="the card works", missing=("steps",))
    return priced(
        features, kind, share=1.0, confidence=0.5,
        summary=f"no step and an idle GPU for all of {features.wall_s:.0f} s: the host has stopped or not begun",
        evidence=(f"utilisation {card.util:.0f}%, power {percent(card.power)} of its limit",),
        remedy=("py-spy dump --pid PID names the line it stands in",),
        missing=("steps: whether any ended was not recorded",),
    )  # fmt: skip


# --- saving ---------------------------------------------------------------------------------------


def _saving(features: Features, saves: list[Pause], told: float) -> tuple[str, ...]:
    said = [f"checkpoint spans take {percent(told)} of the time"] if told else []
    if saves:
        seconds = sum(pause.excess_s for pause in saves) / len(saves)
        said.append(
            f"{len(saves)} pauses of {seconds:.1f} s on average, at steps {', '.join(str(pause.step) for pause in saves[:5])}"
        )
    written = [pause.written for pause in saves if _wrote(pause)]
    if written:
        said.append(f"{sum(written) / len(written) / 1e9:.2g} GB written in each, no loader wait")
    return tuple(said)


def _interval(features: Features, saves: list[Pause]) -> str:
    """The interval at which a blocking save of this length costs one percent."""
    if len(saves) < 2:
        return "save less often: a blocking save should cost under 1% of the time between two"
    seconds = sum(pause.excess_s for pause in saves) / len(saves)
    steps = math.ceil(99 * seconds / max(features.loop.median_s, 1e-6))
    return f"or save every {steps:,} steps: then {seconds:.1f} s of saving cost 1%"


def _shm_finding(features: Features, confidence: float, what: str, missing: tuple[str, ...] = ()) -> Finding:
    return priced(
        features,
        "shm_pressure",
        share=0.0,
        confidence=confidence,
        summary=f"{what}: loader workers pass batches through it and die of a bus error when it is full",
        evidence=(what, *_shm_facts(features)),
        remedy=_shm_remedy(features),
        missing=missing,
    )


def _shm_facts(features: Features) -> tuple[str, ...]:
    host = features.host
    return (f"/dev/shm holds {host.shm_total / 2**30:.3g} GiB",) if host and known(host.shm_total) else ()


def _shm_remedy(features: Features) -> tuple[str, ...]:
    workers = features.fact("num_workers", "workers")
    ahead = features.fact("prefetch_factor", "prefetch")
    batch = features.fact("batch_bytes")
    size = "16Gi"
    sum_ = ""
    if known(workers) and known(batch):
        ahead = ahead if known(ahead) else 2.0
        need = workers * (ahead + 1) * batch
        size = f"{max(math.ceil(1.5 * need / 2**30), 1)}Gi"
        sum_ = f" ({workers:.0f} workers × ({ahead:.0f} + 1) batches × {batch / 2**20:.0f} MiB = {need / 2**30:.2g} GiB, and half more)"
    return (
        f"Kubernetes: emptyDir {{medium: Memory, sizeLimit: {size}}} at /dev/shm; Docker: --shm-size={size.lower().rstrip('i')}{sum_}",
        "fewer workers or a smaller prefetch_factor; or stoker.feed: threads, nothing in /dev/shm",
    )
