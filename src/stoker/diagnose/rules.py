"""Rule list: every rule in a visible order, and the verdict they come to together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stoker.diagnose.endings import crashed, ending_of, interrupted, preempted
from stoker.diagnose.features import Features, features
from stoker.diagnose.hostcode import host_code
from stoker.diagnose.limits import memory_pressure, shm_pressure, throttling
from stoker.diagnose.sharing import communication_bound, straggler
from stoker.diagnose.starving import data_starvation
from stoker.diagnose.stopping import (
    checkpoint_stall,
    collective_hang,
    evaluation,
    host_hang,
    unexplained,
)  # fmt: skip
from stoker.diagnose.thresholds import at
from stoker.diagnose.verdicts import Abstention, known, percent
from stoker.diagnose.working import h2d_copy, host_sync, launch_bound, precision
from stoker.findings import Finding, worst_first
from stoker.formats.sizes import counted
from stoker.recording import Recording

Rule = Callable[[Features], Finding | Abstention]

RULES: tuple[Rule, ...] = (
    crashed,
    preempted,
    interrupted,
    collective_hang,
    host_hang,
    shm_pressure,
    data_starvation,
    host_code,
    evaluation,
    h2d_copy,
    checkpoint_stall,
    memory_pressure,
    throttling,
    precision,
    launch_bound,
    host_sync,
    straggler,
    communication_bound,
)

# What a finding explains is no finding of its own: a crashed loader stops the loop, a loop that hangs makes
# ranks wait, a card full to the brim leaves holes between kernels.
EXPLAINS = {
    "shm_pressure": ("host_hang", "collective_hang"),
    "collective_hang": ("host_hang", "straggler", "communication_bound", "launch_bound", "host_sync"),
    "host_hang": ("straggler", "communication_bound", "launch_bound", "host_sync"),
    "memory_pressure": ("host_sync", "launch_bound"),
    "launch_bound": ("host_sync", "precision"),
    "straggler": ("communication_bound",),
}
UNEXPLAINED = 0.12  # of the time: Python between steps takes a few percent
_ENDED_WELL = ("exit 0", "running", "ended when its window was over")
# A job that no longer moves, or soon will not, comes before one that is slow.
_FATAL = ("shm_pressure", "collective_hang", "host_hang")
_STOPS = ("collective_hang", "host_hang")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Findings, worst first; none where too little was seen to say healthy. And who abstained, and why."""

    findings: tuple[Finding, ...]
    abstained: tuple[Abstention, ...]

    @property
    def healthy(self) -> bool:
        return [finding.kind for finding in self.findings] == ["healthy"]


def diagnose(recording: Recording) -> Verdict:
    """What is wrong with a run, worst first."""
    return judge(features(recording))


def judge(seen: Features) -> Verdict:
    """Ask every rule and keep what no other finding explains."""
    answers = [rule(seen) for rule in RULES]
    found = [answer for answer in answers if isinstance(answer, Finding)]
    abstained = [answer for answer in answers if isinstance(answer, Abstention)]
    explained = {kind for finding in found for kind in _explains(finding, seen)}
    kept = _fatal_first(worst_first([finding for finding in found if finding.kind not in explained]), seen)
    if not kept:
        answer = healthy(seen, abstained)
        if isinstance(answer, Finding):
            kept = [answer]
        else:
            abstained.append(answer)
    return Verdict(findings=tuple(kept), abstained=tuple(abstained))


def _explains(finding: Finding, seen: Features) -> tuple[str, ...]:
    """One rank that waits for data is a straggler; data_starvation is when all do."""
    alone = finding.kind == "straggler" and finding.cause == "data" and seen.ranks.data < at("data_share")
    return (
        *EXPLAINS.get(finding.kind, ()),
        *(("data_starvation",) if alone else ()),
        *(("crashed",) if _why_it_crashed(finding, seen) else ()),
    )


def _why_it_crashed(finding: Finding, seen: Features) -> bool:
    """A job that stood was ended for it; a full /dev/shm kills workers, a full card the program."""
    cause, text = ending_of(seen).get("cause"), seen.ended
    if finding.kind == "shm_pressure":
        return "SIGBUS" in text or cause == "exit"
    if finding.kind == "memory_pressure":
        return "out of memory" in text.lower()
    return finding.kind in _STOPS and cause in ("exit", "nccl") and _stopped(seen)


def _stopped(seen: Features) -> bool:
    return any(pause.last for pause in seen.loop.pauses) or not seen.loop.steps


def _fatal_first(findings: list[Finding], seen: Features) -> list[Finding]:
    """What ended the job, then what stopped it, then what slows it down."""
    stopped = _stopped(seen)

    def place(one: Finding) -> int:
        if one.kind == "crashed":
            return 0
        return 1 if one.kind == "shm_pressure" or (one.kind in _FATAL and stopped) else 2

    return sorted(findings, key=place)


def healthy(seen: Features, abstained: list[Abstention]) -> Finding | Abstention:
    """Nothing is wrong, as far as was seen; what limits the run next."""
    said = [str(one) for one in seen.facts.get("missing", ())]
    missing = tuple(dict.fromkeys([*(name for one in abstained for name in one.missing), *said]))
    doubt = _doubt(seen, abstained)
    if doubt:
        return Abstention(kind="healthy", why=doubt, missing=missing)
    return Finding(
        kind="healthy",
        summary=f"nothing is wrong; next ceiling: {_ceiling(seen)}",
        evidence=_health(seen),
        missing=missing,
        confidence=round(max(0.95 - 0.1 * len(missing), 0.4), 2),
        remedy=(),
    )


def _doubt(seen: Features, abstained: list[Abstention]) -> str:
    """Why what was seen is not enough to call a run healthy."""
    card, loop = seen.card, seen.loop
    if card is None and (not loop.steps or seen.facts.get("gpu")):
        return "the GPU was not read" if loop.steps else "no step was seen, and the GPU was not read"
    if 0 < loop.steps < at("enough_steps"):
        return f"only {counted(loop.steps, 'step')} ended"
    if seen.ended and seen.ended not in _ENDED_WELL:
        return f"it ended badly: {seen.ended[:200]}"
    stops = ("collective_hang", "host_hang", "checkpoint_stall")
    if loop.steps and any(one.kind in stops and one.missing for one in abstained):
        return "a long stop could not be explained"
    if unexplained(seen):
        return unexplained(seen)
    if card is not None and card.working_util < 70:
        return f"the GPU is used {card.util:.0f}% of the time, and why not more was not seen"
    if card is not None and not loop.steps and not (card.sm >= 50 or card.power >= 0.5):
        return "the GPU is busy but hardly works, and whether steps went on was not seen"
    if card is not None and loop.steps and "h2d" in loop.unseen and not known(card.sm + card.pcie_rx_gb_s):
        return "neither copies nor the activity of the card's units were seen"
    unattributed = loop.unattributed + loop.share["stalled"] if "compute" not in loop.unseen else 0.0
    blind = card is not None and (not known(card.memory_peak) or card.working_util < 90)
    if unattributed >= (UNEXPLAINED if blind else 0.5):
        return f"{percent(unattributed)} of the time is explained by nothing that was seen{_standing(seen)}"
    return ""


def _standing(seen: Features) -> str:
    """The line of the program in which the loop was seen most often outside every span."""
    spent: dict[str, float] = {}
    for event in (one for events in seen.events.values() for one in events if one.what == "stack"):
        spent[event.text] = spent.get(event.text, 0.0) + float(event.facts.get("seconds") or 0.0)
    return f": the loop was mostly in {max(spent, key=lambda text: spent[text])}" if spent else ""


def _health(seen: Features) -> tuple[str, ...]:
    card, loop = seen.card, seen.loop
    said = []
    if loop.steps:
        steady = loop.share["data"] * (1 - loop.first_steps_wait)
        once = ", after the first batches" if steady < loop.share["data"] - 0.02 else ""
        waits = f"{percent(steady)} of the time waiting for data{once}"
        if 0 < loop.share["data"] * seen.judged_s < at("least_wait_s"):
            waits = f"{1000 * loop.share['data'] * seen.judged_s:.0f} ms waiting for data in all"
        said.append(f"{counted(loop.steps, 'step')} of {1000 * loop.median_s:.4g} ms, {waits}")
    if card and known(card.util):
        power = f", power {percent(card.power)} of its limit" if known(card.power) else ""
        said.append(f"GPU utilisation {card.util:.0f}%{power}")
    if card and card.capped >= 0.5:
        said.append("the software power cap is set: normal at full load")
    return tuple(said)


def _ceiling(seen: Features) -> str:
    card = seen.card
    if card is None:
        return "compute (the GPU was not read)"
    if card.capped >= 0.5 or card.power >= 0.95:
        return "the card's power limit"
    if card.dram >= 60:
        return f"the card's memory bandwidth ({card.dram:.0f}% used)"
    if known(card.tensor):
        return f"the kernels themselves (tensor cores {card.tensor:.0f}% active)"
    return "the kernels themselves"
