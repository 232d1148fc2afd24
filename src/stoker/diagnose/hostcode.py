"""Host code: time in the user's own code, outside every span, by what it does and on which line.

How long the loop was outside every span is measured; what it did there is what looks at its stack saw. So a
share is never a count of samples alone.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from stoker.diagnose import remedies
from stoker.diagnose.features import Features
from stoker.diagnose.pricing import beside, idle, of_judged, own_code, speedup
from stoker.diagnose.thresholds import at
from stoker.diagnose.verdicts import Abstention, percent, priced
from stoker.findings import Finding
from stoker.recording import Seen

KIND = "host_code"
_DOES = {
    "logging": "logging",
    "metrics": "computing metrics",
    "output": "printing",
    "saving": "saving files by code of its own",
    "io": "waiting for files or sockets",
    "gc": "collecting garbage",
    "lock": "waiting for a lock or a queue",
    "optimizer": "updating weights by code of its own",
    "average": "averaging weights by code of its own",
    "other": "in code of its own",
}
_CAUSES = ("logging", "metrics", "output", "gc", "gil", "io", "optimizer")  # everything else is "other"
_COMPUTES = ("metrics", "optimizer", "average")
_CAUSE_OF = {"saving": "io", "average": "optimizer"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """One thing the loop does outside every span: its share of the judged time, its lines, longest first."""

    what: str
    share: float
    looks: int
    lines: tuple[str, ...]


def host_code(features: Features) -> Finding | Abstention:
    """The loop is in the program's own code, and the card has nothing to do meanwhile."""
    if not features.loop.steps or not features.stacks.seen:
        return Abstention(kind=KIND, why="nobody looked at the loop's stack")
    spent = (*outside(features), *_gc(features), *held(features))
    found = [one for one in spent if _costs(one) and not _is_part_of_saves(one, features)]
    if not found:
        return Abstention(kind=KIND, why="the program's own code takes little of the time")
    worst = max(found, key=lambda one: one.share)
    cause = _CAUSE_OF.get(worst.what, worst.what if worst.what in _CAUSES else "other")
    lost, most = _lost(features, worst)
    where = f" in {worst.lines[0]}" if worst.lines else ""
    return priced(
        features,
        KIND,
        cause=cause,
        share=of_judged(features, lost),
        speedup=speedup(lost),
        at_most=most,
        confidence=0.9 if worst.looks >= 20 else 0.75,
        summary=_summary(worst, where),
        evidence=tuple(_evidence(worst, found)),
        remedy=remedies.host_code(worst.what),
    )


def outside(features: Features) -> list[Spent]:
    """What the loop did outside every span, and in its own optimizer."""
    seen, total = features.stacks.seen, features.stacks.seconds
    unseen = [one for one in seen if not one.inside]
    looked = sum(one.seconds for one in unseen)
    share = features.loop.unattributed + features.loop.stood
    found = (
        [_spent(what, unseen, share / looked) for what in {one.what for one in unseen}] if looked > 0 else []
    )
    own = [one for one in seen if one.inside == "optimizer" and one.what != "compute"]
    working = 1.0 - features.loop.share["startup"]
    return [
        *(one for one in found if one.what not in ("batch", "compute", "optimizer")),
        *_merged(
            "optimizer",
            [one for one in found if one.what == "optimizer"],
            own,
            working / total if total else 0.0,
        ),
    ]


def own_batches(features: Features) -> Spent | None:
    """Batches that the loop makes itself, outside every loader."""
    unseen = [one for one in features.stacks.seen if not one.inside]
    looked = sum(one.seconds for one in unseen)
    if not looked or not any(one.what == "batch" for one in unseen):
        return None
    return _spent("batch", unseen, (features.loop.unattributed + features.loop.stood) / looked)


def line_in(features: Features, kind: str) -> str:
    """The line of the program that most of the time inside spans of this kind is spent in, if it is one."""
    rows = [one for one in features.stacks.seen if one.inside == kind]
    total = sum(one.seconds for one in rows)
    worst = max(rows, key=lambda one: one.seconds, default=None)
    return worst.line if worst and worst.seconds >= 0.3 * total and worst.looks >= 3 else ""


def _lost(features: Features, one: Spent) -> tuple[float, bool]:
    """What it costs of a step, and whether that is only the most. Code that has the card compute takes what
    the card does for it along, so that it may cost its whole time."""
    if one.what in _COMPUTES:
        whole = one.share / max(features.loop.stepping, one.share, 0.01)
        return whole, whole > beside(features, one.share)
    if one.what in ("gc", "gil"):  # in whatever the loop was; counted while steps went on
        return min(one.share, idle(features)), False
    return own_code(features, one.share), False


def _spent(what: str, rows: list[Seen], share_a_second: float) -> Spent:
    mine = [one for one in rows if one.what == what]
    return Spent(
        what=what,
        share=sum(one.seconds for one in mine) * share_a_second,
        looks=sum(one.looks for one in mine),
        lines=_by_function(mine),
    )


def _by_function(rows: list[Seen]) -> tuple[str, ...]:
    """Their lines, those of the function that takes longest first: it may be a little of everything in it."""
    spent = defaultdict[tuple[str, str], float](float)
    for one in rows:
        spent[_function(one.line)] += one.seconds
    order = sorted(rows, key=lambda one: (-spent[_function(one.line)], -one.seconds))
    return tuple(one.line for one in order if one.line)


def _function(line: str) -> tuple[str, str]:
    """File and name of `file:line name`."""
    place, _, name = line.rpartition(" ")
    return place.rpartition(":")[0], name


def _merged(what: str, found: list[Spent], own: list[Seen], share_a_second: float) -> list[Spent]:
    """A hand-written update outside every span, or an optimizer of the user's own inside one."""
    share = sum(one.share for one in found) + sum(one.seconds for one in own) * share_a_second
    lines = (*(line for one in found for line in one.lines), *_by_function(own))
    looks = sum(one.looks for one in found) + sum(one.looks for one in own)
    return [Spent(what=what, share=min(share, 0.999), looks=looks, lines=lines)] if looks else []


def _costs(one: Spent) -> bool:
    least = {
        "other": at("other_code"),
        "lock": at("other_code"),
        "average": at("other_code"),
        "optimizer": at("own_optimizer"),
    }
    return one.share >= least.get(one.what, at("host_code")) and (
        one.looks >= at("looks") or one.what == "gc"
    )


def _is_part_of_saves(one: Spent, features: Features) -> bool:
    """What a program does around its saves, as copying or syncing, has its price with theirs."""
    return one.what == "saving" and features.loop.share["checkpoint"] >= one.share


def _gc(features: Features) -> list[Spent]:
    """Collections that nobody asked for run inside whatever allocates: they are counted, not seen."""
    stacks = features.stacks
    share = stacks.gc_s / stacks.seconds if stacks.seconds > 0 else 0.0
    asked = next((one for one in outside(features) if one.what == "gc"), None)
    ran_in = sorted(filter(None, stacks.gc_lines), key=lambda line: -stacks.gc_lines[line])
    lines = asked.lines if asked else tuple(ran_in)
    if stacks.gc_count < at("collections"):
        return []
    return [Spent(what="gc", share=min(share, 0.999), looks=stacks.gc_count, lines=lines)]


def held(features: Features) -> list[Spent]:
    """Another thread holds the interpreter: looks come late, the loop neither runs nor waits for a core. That
    may also be what a loop waits for that has asked for a batch, unless workers still make it."""
    stacks, host = features.stacks, features.host
    if host is None or not stacks.looks or stacks.late < at("held") * stacks.looks or not stacks.threads:
        return []
    line, count = max(stacks.threads.items(), key=lambda item: item[1])
    if count < at("held") * stacks.late:
        return []
    making = host.workers >= 0.5 and host.workers_running >= 0.5 * host.workers
    elsewhere = ("collective", "checkpoint", "startup", "copy", *(("data",) if making else ()))
    waits = sum(features.loop.share[name] for name in elsewhere)
    # The loop also waits for a core, because of that thread or of others: for each by the cores they use.
    others = max(host.others, 0.0) / max(max(host.others, 0.0) + host.beside, 0.01)
    share = 1.0 - host.trainer_cpu - max(host.rank_delay, 0.0) * others - waits
    return [Spent(what="gil", share=share, looks=count, lines=(line,))] if share == share else []


def _summary(worst: Spent, where: str) -> str:
    if worst.what == "gil":
        lost = f"the loop waits for it {percent(worst.share)} of the time"
        return f"another thread holds the interpreter{where}: {lost}"
    return f"the loop is not training but {_DOES[worst.what]} {percent(worst.share)} of the time{where}"


def _evidence(worst: Spent, found: list[Spent]) -> list[str]:
    lines = [f"seen in {line}" for line in dict.fromkeys(worst.lines[:3])]
    also = [one for one in found if one is not worst and one.what != "gil"]
    return [
        f"{percent(worst.share)} of the time, {worst.looks} looks at the loop's stack",
        *lines,
        *(f"and {percent(one.share)} of the time {_DOES[one.what]}" for one in also),
    ]
