"""GPU inefficiency: copies in the way, wrong precision, tiny kernels (launch-bound), host syncs."""

from __future__ import annotations

import math

from stoker.diagnose import remedies
from stoker.diagnose.activity import Worked
from stoker.diagnose.card import Card
from stoker.diagnose.features import Features
from stoker.diagnose.pricing import idle, idle_in, in_steps, of_judged, speedup
from stoker.diagnose.thresholds import at
from stoker.diagnose.verdicts import Abstention, above, below, known, percent, priced
from stoker.findings import Finding


def h2d_copy(features: Features) -> Finding | Abstention:
    """The loop waits for copies to the card."""
    kind, loop = "h2d_copy", features.loop
    if "h2d" in loop.unseen or not loop.steps:
        return _copy_by_the_bus(features)
    share = loop.share["copy"]
    if share < at("copy_share"):
        return Abstention(kind=kind, why=f"copies took {percent(share)} of the time")
    rate = _copy_rate(features)
    cause = _copy_cause(features, rate)
    because = {"pageable": ": from pageable memory", "not overlapped": ": they are not overlapped", "": ""}
    speed = f", at {rate:.1f} GB/s" if known(rate) else ""
    unseen = ("bytes copied: pageable and unoverlapped copies look alike without them",)
    lost = _copy_loss(features, rate)
    return priced(
        features,
        kind,
        cause=cause,
        share=of_judged(features, lost),
        speedup=speedup(lost),
        confidence=0.95 if known(rate) else 0.8,
        summary=f"the loop waits for copies to the GPU {percent(share)} of the time{because[cause]}",
        evidence=(f"{percent(share)} of the time in copies{speed}", *_bus(features)),
        remedy=remedies.copy(cause),
        missing=() if known(rate) else unseen,
    )


def _bus_gb_s(features: Features) -> float:
    return features.card.peaks.pcie_gb_s if features.card and features.card.peaks else 25.0


def _copy_rate(features: Features) -> float:
    """GB/s while copying: from the bytes of the copies, or from the bus counter."""
    if known(features.loop.copy_gb_s):
        return features.loop.copy_gb_s
    share = features.loop.share["copy"]
    return features.card.pcie_rx_gb_s / share if features.card and share > 0 else math.nan


def _copy_cause(features: Features, rate: float) -> str:
    if not known(rate):
        return ""
    return "not overlapped" if rate >= at("pinned_rate") * _bus_gb_s(features) else "pageable"


def _copy_loss(features: Features, rate: float) -> float:
    """Pinned and on a stream of its own a copy hides behind compute, as far as the bus is fast enough; and a
    card that computes is not made quicker by it."""
    share = in_steps(features, "copy")
    pinned = share * min(rate / _bus_gb_s(features), 1.0) if known(rate) else share / 2
    told = features.paced.ledger if features.paced else None
    computes = told.busy if told is not None and told.exact else 0.0
    return max(1.0 - max(1.0 - share, pinned, computes), 0.0)


def _bus(features: Features) -> tuple[str, ...]:
    card = features.card
    if card is None or not known(card.util):
        return ()
    rx = f", {card.pcie_rx_gb_s:.1f} GB/s into the card" if known(card.pcie_rx_gb_s) else ""
    sm = f", SM activity {card.sm:.0f}%" if known(card.sm) else ""
    pinned = f"the bus gives {_bus_gb_s(features):.0f} GB/s to pinned memory"
    return (f"GPU utilisation {card.util:.0f}%{sm}{rx}; {pinned}",)


def _copy_by_the_bus(features: Features) -> Finding | Abstention:
    """Nobody timed the copies: much traffic into a card that is half idle."""
    kind, card = "h2d_copy", features.card
    missing = ("the time of copies",)
    if card is None or not above(card.pcie_rx_gb_s, at("copy_rx_gb_s")) or not below(card.sm, 60):
        return Abstention(kind=kind, why="copies were not timed", missing=missing)
    of_bus = card.pcie_rx_gb_s / _bus_gb_s(features)
    cause = "pageable" if of_bus < 0.25 else "not overlapped" if of_bus > 0.4 else ""
    return priced(
        features,
        kind,
        cause=cause,
        share=min(of_bus, 1 - card.sm / 100),
        confidence=0.5,
        summary=f"{card.pcie_rx_gb_s:.1f} GB/s flow into the GPU while its units are half idle",
        evidence=_bus(features),
        remedy=remedies.copy(cause),
        missing=missing,
    )


# --- kernels --------------------------------------------------------------------------------------


def precision(features: Features) -> Finding | Abstention:
    """Matrices multiplied in fp32: the card is busy and its tensor cores are not."""
    kind, card = "precision", features.card
    if card is None:
        return Abstention(kind=kind, why="no GPU readings", missing=("the GPU",))
    if known(card.fp32) and known(card.tensor) and above(card.sm, 10):
        if card.fp32 < at("fp32_of_sm") * card.sm or card.tensor > at("tensor_of_sm") * card.sm:
            why = f"tensor cores {card.tensor:.0f}%, fp32 units {card.fp32:.0f}% active"
            return Abstention(kind=kind, why=why)
        if features.worked is None or not known(features.worked.tensor):
            return _precision(features, card, 0.95, (), share=_in_matrices(features, card))
    if features.worked is not None and known(features.worked.tensor):
        return _by_kernels(features, card, features.worked)
    if _as_quick_as_fp32(features, card) and above(card.working_util, 95) and above(card.power, at("hot")):
        return _precision(features, card, 0.6, ("activity of fp32 units and tensor cores (GPM or DCGM)",))
    missing = () if known(features.loop.tflops) else ("activity of the tensor cores, or FLOPs",)
    return Abstention(kind=kind, why="nothing says that fp32 units do the work", missing=missing)


def _by_kernels(features: Features, card: Card, seen: Worked) -> Finding | Abstention:
    """A profiler named the kernels: whether matrices are multiplied on tensor cores is in their names."""
    if seen.tensor >= at("tensor_named") or seen.plain < at("matrices"):
        why = f"{percent(seen.tensor)} of the time in matrix kernels is on tensor cores"
        return Abstention(kind="precision", why=why)
    names = [one.name[:60] for one in seen.kernels if one.matrix and not one.tensor][:2]
    told = f"{percent(seen.plain)} of the kernels' time in {', '.join(names)}"
    return _precision(features, card, 0.85, (), share=seen.plain * seen.compute_s / seen.window_s, told=told)


_FP32_FULL = (
    85.0  # percent: how active fp32 units are in a kernel that multiplies matrices as quickly as it can
)


def _in_matrices(features: Features, card: Card) -> float:
    """Of the time, by the counter of the fp32 units."""
    computing = features.loop.working if features.loop.steps else card.util / 100
    return min(card.fp32 / _FP32_FULL, computing)


def _as_quick_as_fp32(features: Features, card: Card) -> bool:
    """Without counters: as many FLOPs as fp32 units reach, and not because memory holds them up."""
    if card.peaks is None or above(card.memory_busy, at("memory_busy")):
        return False
    of_fp32 = features.loop.tflops / card.peaks.fp32
    return at("fp32_low") <= of_fp32 <= at("fp32_high")


def _precision(
    features: Features,
    card: Card,
    confidence: float,
    missing: tuple[str, ...],
    *,
    share: float | None = None,
    told: str = "",
) -> Finding:
    """tf32 is as many times quicker as its peak is higher: matrices gain two thirds of that, as fp32 comes
    nearer to its peak than tf32, and a whole training step half. `share` is of the time in matrices where
    that is known, else all that computes."""
    computing = features.loop.working if features.loop.steps else card.util / 100
    part = 0.5 if share is None else 2 / 3
    computing = computing if share is None else share
    gain = max(part * card.peaks.tf32 / card.peaks.fp32, 1.5) if card.peaks else 2.0
    said = [f"GPU utilisation {card.util:.0f}%", *filter(None, [told])]
    if known(card.fp32):
        said.append(f"fp32 units {card.fp32:.0f}% active, tensor cores {card.tensor:.0f}%")
    if known(features.loop.tflops) and card.peaks:
        mfu = percent(features.loop.tflops / card.peaks.bf16)
        said.append(f"{features.loop.tflops:.0f} TFLOP/s, {mfu} of the bf16 peak")
    return priced(
        features,
        "precision",
        share=computing * (1 - 1 / gain),
        confidence=confidence,
        at_most=True,
        summary="matrices are multiplied in fp32: the GPU is busy and its tensor cores are idle",
        evidence=tuple(said),
        remedy=remedies.PRECISION,
        missing=missing,
    )


def launch_bound(features: Features) -> Finding | Abstention:
    """Kernels too small to fill the card: launching them takes longer than running them."""
    kind, card = "launch_bound", features.card
    if card is None or not known(card.util):
        return Abstention(kind=kind, why="no GPU readings", missing=("the GPU",))
    if not features.loop.steps or _computing(features) < 0.1:
        return Abstention(kind=kind, why="the loop does not spend its time computing")
    if not _tiny(features, card):
        if _cannot_launch_faster(features, card):
            return _launching(features, card)
        why = f"SM activity {card.sm:.0f}% at {card.util:.0f}% utilisation"
        return Abstention(kind=kind, why=why, missing=() if known(card.sm) else ("SM activity",))
    lost = _lost_to_launching(features, card)
    return priced(
        features,
        kind,
        share=of_judged(features, lost),
        confidence=0.92 if known(card.sm) else 0.6,
        speedup=speedup(lost),
        at_most=True,
        summary="kernels are too small to fill the GPU: the loop waits for launches, not for arithmetic",
        evidence=(_activity(card), *_one_core(features)),
        remedy=remedies.LAUNCH_BOUND,
        missing=() if known(card.sm) else ("SM activity (GPM or DCGM)",),
    )


def _cannot_launch_faster(features: Features, card: Card) -> bool:
    """The card is idle while the host launches, and the host hardly ever waits for the card."""
    if not _seen_inside(features) or features.ledger is None:
        return False  # whether the host waits for the card is only known where it was watched from inside
    gaps = _gaps(features, card)
    return gaps >= _notable(card) and features.loop.share["sync"] < gaps / 2


def _gaps(features: Features, card: Card) -> float:
    """Share of the judged time in which the loop computed, or waited for the card, and the card was idle."""
    told = features.ledger
    if told is not None and told.exact and "compute" not in features.loop.unseen:
        return sum(told.idle[name] for name in _COMPUTES)
    return _computing(features) * (1 - card.working_util / 100)


def _lost_to_launching(features: Features, card: Card) -> float:
    """At most what steps would gain whose kernels were all queued at once, as a CUDA graph does it. The
    Python between launches then goes by while the card works, as far as the card works longer. What remains
    is the moment from one kernel to the next, which a counter of the card has counted with the kernels."""
    paced, seen = features.paced, features.worked
    if paced is None:
        return _gaps(features, card)
    told = paced.ledger
    between = 0.0
    if told is not None and told.by_events and seen is not None and known(seen.gap_s):
        between = seen.kernel_count * seen.gap_s / seen.window_s
    lost = idle_in(features, *_COMPUTES)
    if told is not None:
        rest = sum(share for name, share in paced.share.items() if name not in _COMPUTES)
        lost = max(lost, min(lost + told.idle["unattributed"], 1.0 - max(told.busy, rest)))
    return max(lost - between, 0.0)


def _seen_inside(features: Features) -> bool:
    return bool(features.stacks.looks) or features.worked is not None


def _launching(features: Features, card: Card) -> Finding:
    gaps, lost = _gaps(features, card), _lost_to_launching(features, card)
    return priced(
        features,
        "launch_bound",
        share=of_judged(features, lost),
        speedup=speedup(lost),
        confidence=0.75,
        summary=f"the GPU idles {percent(gaps)} of the time while the host launches kernels as it can",
        evidence=(
            _activity(card),
            f"{percent(features.loop.share['sync'])} of the time waiting for the GPU",
            *_launch_runs(features),
            *_one_core(features),
        ),
        remedy=remedies.LAUNCH_BOUND,
        at_most=True,
        missing=("how far fusing kernels goes: the price is the most it can give",),
    )


def _launch_runs(features: Features) -> tuple[str, ...]:
    """What a profiler saw of it."""
    seen = features.worked
    if seen is None or not seen.launch_runs:
        return ()
    share = percent(seen.launch_idle_s / seen.window_s)
    return (f"{share} idle in {seen.launch_runs} stretches of kernels queued one by one, each too late",)


def _notable(card: Card) -> float:
    error = card.util_error if known(card.util_error) else 0.0
    return max(at("gaps_share"), 2 * error / 100)


def _tiny(features: Features, card: Card) -> bool:
    if known(card.sm):
        return card.working_sm < at("tiny_sm") and card.sm < at("tiny_of_util") * card.util
    if "h2d" in features.loop.unseen and not known(card.pcie_rx_gb_s):
        return False  # a card that waits for copies shows just the same
    slow = not known(features.loop.tflops) or (card.peaks and features.loop.tflops < 0.05 * card.peaks.bf16)
    return bool(slow) and below(card.power, at("spin_power")) and card.working_util < 95


def host_sync(features: Features) -> Finding | Abstention:
    """Good kernels with holes between them: the host waits for the card, then the card for the host."""
    kind, card = "host_sync", features.card
    if card is None or not known(card.util):
        return Abstention(kind=kind, why="no GPU readings", missing=("the GPU",))
    gaps = _gaps(features, card)
    unsure = not features.loop.steps or "data" in features.loop.unseen
    full = gaps < max(at("gaps_share"), 2 * card.util_error / 100)
    full = full or (not _sees_waits(features) and _at_work(features, card) >= at("gaps_util"))
    if unsure or full or isinstance(launch_bound(features), Finding):
        used = _at_work(features, card)
        return Abstention(kind=kind, why=f"utilisation {used:.0f}% while the loop computes")
    synced = features.loop.share["sync"]
    # Without its waits a step takes what launching takes, or what the card does: the longer of the two.
    lost = min(in_steps(features, "sync"), idle(features)) if _seen_inside(features) else gaps
    waits = (f"{percent(synced)} of the time in .item(), .cpu() or synchronize()",) if synced else ()
    return priced(
        features,
        kind,
        share=of_judged(features, lost),
        speedup=speedup(lost),
        confidence=0.9 if synced > 0.05 else 0.65,
        at_most=not _seen_inside(features),
        summary=f"the GPU idles {percent(gaps)} of the time between kernels: host and GPU wait in turns",
        evidence=(_activity(card), *waits),
        remedy=remedies.HOST_SYNC,
        missing=() if synced else ("where the host waits: stoker watch names the lines",),
    )


_COMPUTES = ("compute", "sync", "collective")


def _sees_waits(features: Features) -> bool:
    """Kernels were counted, and the host's waits for them timed: idle is then known, not told from a
    utilisation that calls some of a busy card idle."""
    told = features.ledger
    timed = _seen_inside(features) and "sync" not in features.loop.unseen
    return told is not None and told.exact and timed and features.loop.share["sync"] >= at("gaps_share")


def _at_work(features: Features, card: Card) -> float:
    """Percent of the time in which the loop computes, that the card does."""
    computing = _computing(features)
    return 100 * (1 - min(_gaps(features, card) / computing, 1.0)) if computing > 0 else card.working_util


def _computing(features: Features) -> float:
    share = features.loop.share
    hidden = share["unattributed"] if "compute" in features.loop.unseen else 0.0
    return share["compute"] + share["sync"] + share["collective"] + hidden


def _activity(card: Card) -> str:
    said = [f"GPU utilisation {card.util:.0f}%"]
    if known(card.sm):
        said.append(f"SM activity {card.sm:.1f}%")
    if known(card.tensor):
        said.append(f"tensor cores {card.tensor:.1f}%")
    if known(card.power):
        said.append(f"power {percent(card.power)} of its limit")
    return ", ".join(said)


def _one_core(features: Features) -> tuple[str, ...]:
    host = features.host
    return (f"{host.busy:.1f} cores busy: one launches kernels",) if host and 0.8 <= host.busy <= 1.6 else ()
