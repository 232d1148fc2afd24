"""The card is given work and does it badly: copies in the way, the wrong precision, tiny kernels, slow clocks."""

from __future__ import annotations

import math

from stoker.diagnose.features import Features
from stoker.diagnose.readings import Card
from stoker.diagnose.thresholds import at
from stoker.diagnose.verdicts import Abstention, above, below, known, percent, priced
from stoker.findings import Finding

NOTHING: tuple[str, ...] = ()


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
    said = f"{percent(share)} of the time in copies" + (f", at {rate:.1f} GB/s" if known(rate) else "")
    return priced(
        features,
        kind,
        cause=cause,
        share=_copy_loss(features, rate),
        confidence=0.95 if known(rate) else 0.8,
        summary=f"the loop waits for copies to the GPU {percent(share)} of the time"
        + (f": memory is {cause}" if cause == "pageable" else f": {cause}" if cause else ""),
        evidence=(said, *_bus(features)),
        remedy=_copy_remedy(cause),
        missing=()
        if known(rate)
        else ("bytes copied: pageable and unoverlapped copies look alike without them",),
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
    """Pinned and on a stream of its own a copy hides behind compute, as far as the bus is fast enough."""
    share = features.loop.share["copy"]
    pinned = share * min(rate / _bus_gb_s(features), 1.0) if known(rate) else share / 2
    beside = 1.0 - share
    return max(share - max(pinned - beside, 0.0), 0.0)


def _bus(features: Features) -> tuple[str, ...]:
    card = features.card
    if card is None or not known(card.util):
        return ()
    rx = f", {card.pcie_rx_gb_s:.1f} GB/s into the card" if known(card.pcie_rx_gb_s) else ""
    sm = f", SM activity {card.sm:.0f}%" if known(card.sm) else ""
    return (
        f"GPU utilisation {card.util:.0f}%{sm}{rx}; the bus gives {_bus_gb_s(features):.0f} GB/s to pinned memory",
    )


def _copy_remedy(cause: str) -> tuple[str, ...]:
    overlap = "copy the next batch on its own stream while this one computes: tensor.to(device, non_blocking=True), or stoker.feed"
    smaller = "send the smaller type (uint8 images, int32 tokens) and convert on the GPU"
    pin = "DataLoader(pin_memory=True), or tensor.pin_memory() once on a buffer that is reused"
    return (overlap, smaller) if cause == "not overlapped" else (pin, overlap, smaller)


def _copy_by_the_bus(features: Features) -> Finding | Abstention:
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
        remedy=_copy_remedy(cause),
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
            return Abstention(
                kind=kind, why=f"tensor cores {card.tensor:.0f}%, fp32 units {card.fp32:.0f}% active"
            )
        return _precision(features, card, 0.95, ())
    mfu = _mfu(features)
    if _as_quick_as_fp32(features, card) and above(card.working_util, 95) and above(card.power, at("hot")):
        return _precision(features, card, 0.6, ("activity of fp32 units and tensor cores (GPM or DCGM)",))
    missing = () if known(mfu) else ("activity of the tensor cores, or FLOPs",)
    return Abstention(kind=kind, why="nothing says that fp32 units do the work", missing=missing)


def _mfu(features: Features) -> float:
    peaks = features.card.peaks if features.card else None
    return features.loop.tflops / peaks.bf16 if peaks else math.nan


def _as_quick_as_fp32(features: Features, card: Card) -> bool:
    """Without counters: as many FLOPs as fp32 units reach, and not because memory holds them up."""
    if card.peaks is None or above(card.memory_busy, at("memory_busy")):
        return False
    of_fp32 = features.loop.tflops / card.peaks.fp32
    return at("fp32_low") <= of_fp32 <= at("fp32_high")


def _precision(features: Features, card: Card, confidence: float, missing: tuple[str, ...]) -> Finding:
    """tf32 multiplies as many times quicker as its peak is higher; half of that is what a training step gains."""
    computing = features.loop.share["compute"] if features.loop.steps else card.util / 100
    gain = max(0.5 * card.peaks.tf32 / card.peaks.fp32, 1.5) if card.peaks else 2.0
    share = computing * (1 - 1 / gain)
    mfu = _mfu(features)
    said = [f"GPU utilisation {card.util:.0f}%"]
    if known(card.fp32):
        said.append(f"fp32 units {card.fp32:.0f}% active, tensor cores {card.tensor:.0f}%")
    if known(mfu):
        said.append(f"{features.loop.tflops:.0f} TFLOP/s, {percent(mfu)} of the bf16 peak")
    return priced(
        features, "precision", share=share, confidence=confidence, speedup=1 / (1 - share),
        summary="matrices are multiplied in fp32: the GPU is busy and its tensor cores are idle",
        evidence=tuple(said),
        remedy=(
            'torch.set_float32_matmul_precision("high") allows tf32: one line, no change of types',
            'torch.autocast("cuda", dtype=torch.bfloat16) around forward and loss: twice tf32',
        ),
        missing=missing,
    )  # fmt: skip


def launch_bound(features: Features) -> Finding | Abstention:
    """Kernels too small to fill the card: launching them takes longer than running them."""
    kind, card = "launch_bound", features.card
    if card is None or not known(card.util):
        return Abstention(kind=kind, why="no GPU readings", missing=("the GPU",))
    if not _mostly_computes(features):
        return Abstention(kind=kind, why="the loop does not spend its time computing")
    if known(card.sm):
        tiny = card.working_sm < at("tiny_sm") and card.sm < at("tiny_of_util") * card.util
        confidence, missing = 0.92, NOTHING
    else:
        mfu = _mfu(features)
        tiny = (
            below(card.power, at("spin_power")) and (not known(mfu) or mfu < 0.05) and card.working_util < 95
        )
        confidence, missing = 0.6, ("SM activity (GPM or DCGM)",)
    if not tiny:
        return Abstention(
            kind=kind, why=f"SM activity {card.sm:.0f}% at {card.util:.0f}% utilisation", missing=missing
        )
    share = _computing(features) * (
        1 - max(card.working_sm if known(card.sm) else card.power * 100, 10.0) / 100
    )
    return priced(
        features, kind, share=share, confidence=confidence, speedup=_bounded(share),
        summary="kernels are too small to fill the GPU: the loop waits for launches, not for arithmetic",
        evidence=(_activity(card), *_one_core(features)),
        remedy=(
            'torch.compile(model, mode="reduce-overhead"): fuses kernels and replays them as CUDA graphs',
            "a larger batch: kernels grow, their number does not",
            "fused=True or foreach=True for the optimizer: one kernel instead of one per parameter",
        ),
        missing=missing,
    )  # fmt: skip


def host_sync(features: Features) -> Finding | Abstention:
    """Good kernels with holes between them: the host waits for the card, then the card for the host."""
    kind, card = "host_sync", features.card
    if card is None or not known(card.util):
        return Abstention(kind=kind, why="no GPU readings", missing=("the GPU",))
    gaps = _computing(features) * (1 - card.working_util / 100)
    if (
        not _mostly_computes(features)
        or card.working_util >= at("gaps_util")
        or "data" in features.loop.unseen
    ):
        return Abstention(kind=kind, why=f"utilisation {card.working_util:.0f}% while the loop computes")
    if gaps < max(at("gaps_share"), 2 * card.util_error / 100):
        return Abstention(kind=kind, why=f"the card idles {percent(gaps)} of the time between kernels")
    if isinstance(launch_bound(features), Finding):
        return Abstention(kind=kind, why="kernels are too small to begin with")
    share = gaps
    synced = features.loop.share["sync"]
    return priced(
        features, kind, share=share, confidence=0.9 if synced > 0.05 else 0.65,
        summary=f"the GPU idles {percent(share)} of the time between kernels: the host waits for it and then it for the host",
        evidence=(_activity(card), *((f"{percent(synced)} of the time in .item(), .cpu() or synchronize()",) if synced else ())),
        remedy=(
            "no .item(), .cpu(), print(loss) or synchronize() in every step: keep sums on the GPU, read them every 50 steps",
            "CUDA_LAUNCH_BLOCKING must not be set; torch.cuda.set_sync_debug_mode(\"warn\") names the lines",
        ),
        missing=() if synced else ("where the host waits: stoker watch names the lines",),
    )  # fmt: skip


def _mostly_computes(features: Features) -> bool:
    return features.loop.steps > 0 and _computing(features) >= 0.1


def _computing(features: Features) -> float:
    share = features.loop.share
    hidden = share["unattributed"] if "compute" in features.loop.unseen else 0.0
    return share["compute"] + share["sync"] + share["collective"] + hidden


def _bounded(share: float) -> float:
    """Nobody makes a launch-bound loop as quick as its arithmetic: graphs and fusion gave three times at best."""
    return min(1 / (1 - min(share, 0.99)), 3.0)


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


# --- clocks and memory ----------------------------------------------------------------------------


def throttling(features: Features) -> Finding | Abstention:
    """Heat or the power supply holds the clocks down. The software power cap is not that."""
    kind, card = "throttling", features.card
    if card is None or not (known(card.clock_mean) or card.slowed or known(card.capped)):
        return Abstention(
            kind=kind, why="clocks and their reasons were not read", missing=("clock event reasons",)
        )
    worst = max(card.slowed.values(), default=0.0)
    low = card.clock if known(card.clock) else card.clock_mean
    if worst >= at("slowed") and not above(low, at("slowed_clock")):
        return _throttling(features, card, worst, low if known(low) else 0.8, 0.95)
    unread = not known(card.capped)
    if unread and below(card.clock_mean, at("low_clock")) and above(card.util, 90) and below(card.power, 0.9):
        return _throttling(features, card, 1.0, card.clock_mean, 0.55)
    return Abstention(
        kind=kind, why="no slowdown reason was set for long" if not unread else "no reasons read"
    )


def _throttling(features: Features, card: Card, share: float, clock: float, confidence: float) -> Finding:
    reasons = max(card.slowed, key=lambda reason: card.slowed[reason], default="")
    cause = {"thermal": "thermal", "power": "power_brake"}.get(reasons.split(",")[0].split(" ")[0], "")
    heat = f", {card.temp_c:.0f} °C" if known(card.temp_c) else ""
    lost = share * (1 - clock)
    remedy = (
        "look at fans, air flow and dust; compare with other cards of the node (nvidia-smi -q -d TEMPERATURE,PERFORMANCE)",
        "drain the node if it stays: one slow card slows every rank",
    )
    return priced(
        features, "throttling", cause=cause, share=lost, confidence=confidence,
        summary=f"the GPU runs at {percent(clock)} of its clock: {reasons or 'why was not read'}",
        evidence=(f"slowed down in {percent(share)} of the busy readings, to {percent(clock)} of the boost clock{heat}",),
        remedy=remedy if cause != "power_brake" else ("the power supply asks the card to slow down: check the rack's feeds and PSUs", remedy[1]),
        missing=() if reasons else ("clock event reasons",),
    )  # fmt: skip


def memory_pressure(features: Features) -> Finding | Abstention:
    """The card is nearly full, and the allocator pays for it in every step."""
    kind, card, loop = "memory_pressure", features.card, features.loop
    retries = features.facts.get("alloc_retries", 0)
    if card is None or not known(card.memory_peak):
        if retries:
            return _memory(
                features, math.nan, loop.share["unattributed"], f"the allocator retried {retries} times"
            )
        return Abstention(kind=kind, why="the card's memory was not read", missing=("GPU memory",))
    swings = card.memory_swing >= at("memory_swing") and card.memory_turns >= at("memory_turns")
    lost = loop.share["unattributed"] if loop.steps else 0.0
    full = card.memory_peak >= at("memory_full")
    if retries or (swings and full and (lost >= at("memory_cost") or card.memory_peak >= 0.9)):
        how = (
            f"the allocator retried {retries} times"
            if retries
            else f"{percent(card.memory_swing)} of it is given back and taken again {card.memory_turns / 2:.1f} times a second"
        )
        return _memory(features, card.memory_peak, lost, how)
    return Abstention(
        kind=kind, why=f"at most {percent(card.memory_peak)} of the card's memory in use, steadily"
    )


def _memory(features: Features, peak: float, lost: float, how: str) -> Finding:
    full = f"the card's memory is {percent(peak)} full, and " if known(peak) else ""
    return priced(
        features, "memory_pressure", share=lost, confidence=0.9 if lost >= at("memory_cost") else 0.7,
        summary=f"{full}{how}",
        evidence=(f"{full}{how}", f"{percent(lost)} of the time outside data, copies and compute"),
        remedy=(
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: less fragmentation, fewer retries",
            "no torch.cuda.empty_cache() in the loop: it gives back what the next step takes again",
            "a smaller batch with gradient accumulation, or activation checkpointing, frees the last tenth",
        ),
    )  # fmt: skip
