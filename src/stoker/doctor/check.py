"""Health check: what is looked at, why it matters for feeding GPUs, and a pure function that looks.

A check takes a recorded machine and a need, and yields what it has seen: a level, what was read, and the
exact lines that mend it. What could not be read makes it `unknown`, with the reason, never a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from stoker.doctor.need import Need
from stoker.formats.sizes import say_binary
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import UNLIMITED, Gpu, Place, Snapshot

Level = Literal["ok", "warn", "fail", "unknown"]
LEVELS: tuple[Level, ...] = ("ok", "unknown", "warn", "fail")  # from the best to the worst

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A safe, reversible change: a line of shell that makes it and one that takes it back."""

    do: str
    undo: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What a check saw."""

    level: Level
    read: str
    fix: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()


Fix = str | tuple[str, ...] | None
Look = Callable[[Snapshot, Need], Iterable[Seen]]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that is looked at. `name` is short and stays the same between releases."""

    name: str
    look: Look
    why: str
    subject: str = ""


def about(subject: str, *checks: Check) -> tuple[Check, ...]:
    """Checks of one subject."""
    return tuple(replace(check, subject=subject) for check in checks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A check and what it saw."""

    check: Check
    seen: Seen

    @property
    def level(self) -> Level:
        return self.seen.level

    def as_plain(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "check": self.check.name,
            "subject": self.check.subject,
            "level": self.seen.level,
            "read": self.seen.read,
            "why": self.check.why,
            "fix": list(self.seen.fix),
        }


class NotKnown(Exception):
    """A check needs what could not be read."""


def known(value: Value | Unknown) -> Value:
    """The value; a check that asks for what could not be read ends as `unknown`."""
    if isinstance(value, Unknown):
        raise NotKnown(value.reason)
    return value


def look(check: Check, snapshot: Snapshot, need: Need) -> Iterator[Result]:
    """All that a check sees on a machine."""
    try:
        for seen in check.look(snapshot, need):
            yield Result(check=check, seen=seen)
    except NotKnown as error:
        yield Result(check=check, seen=Seen(level="unknown", read=str(error)))


def ok(read: str) -> Seen:
    return Seen(level="ok", read=read)


def warn(read: str, *fix: str, changes: tuple[Change, ...] = ()) -> Seen:
    return Seen(level="warn", read=read, fix=fix, changes=changes)


def fail(read: str, *fix: str, changes: tuple[Change, ...] = ()) -> Seen:
    return Seen(level="fail", read=read, fix=fix, changes=changes)


def over_places(look_at: Callable[[Place, Snapshot, Need], Seen | None], *roles: str) -> Look:
    """A check of the filesystems under these folders, each once: for the first role that lies on it."""

    def look_at_all(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
        told: set[object] = set()
        ours = [place for role in roles for place in snapshot.places if place.role == role]
        for place in ours:
            where = place.path if isinstance(place.mountpoint, Unknown) else place.mountpoint
            if where not in told:
                told.add(where)
                yield from _look_at(look_at, place, snapshot, need)

    return look_at_all


def _look_at(
    look_at: Callable[[Place, Snapshot, Need], Seen | None], place: Place, snapshot: Snapshot, need: Need
) -> Iterator[Seen]:
    try:
        seen = look_at(place, snapshot, need)
    except NotKnown as error:
        seen = Seen(level="unknown", read=str(error))
    if seen is not None:
        yield replace(seen, read=f"{place.role} {place.path}: {seen.read}")


def over_gpus(look_at: Callable[[Gpu], Seen]) -> Look:
    """A check of every card; cards that look alike are told together."""

    def look_at_all(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
        alike: dict[Seen, list[int]] = {}
        changes: dict[Seen, tuple[Change, ...]] = {}
        for gpu in cards(snapshot):
            try:
                seen = look_at(gpu)
            except NotKnown as error:
                seen = Seen(level="unknown", read=str(error))
            alone = replace(seen, changes=())  # a change names its card; cards are alike without it
            alike.setdefault(alone, []).append(gpu.index)
            changes[alone] = changes.get(alone, ()) + seen.changes
        for seen, indices in alike.items():
            read = f"GPU {', '.join(map(str, indices))}: {seen.read}"
            yield replace(seen, read=read, changes=changes[seen])

    return look_at_all


def cards(snapshot: Snapshot) -> tuple[Gpu, ...]:
    """The cards; none where they cannot be read: one check says so for all."""
    return () if isinstance(snapshot.gpus, Unknown) else snapshot.gpus


def has_rdma(snapshot: Snapshot) -> bool:
    """Whether an RDMA device is known to be there."""
    return not isinstance(snapshot.nics, Unknown) and any(nic.rdma for nic in snapshot.nics)


def for_whom(
    snapshot: Snapshot, *, kubernetes: Fix, slurm: Fix = None, container: Fix, machine: Fix
) -> tuple[str, ...]:
    """The fix for whoever starts this process: a pod's manifest, a batch script, a container, the machine's
    owner. Where no Slurm line is given, its steps are mended like whatever they run in."""
    around = snapshot.surroundings
    if around.kubernetes is True:
        lines = kubernetes
    elif around.slurm is True and slurm is not None:
        lines = slurm
    else:
        lines = container if isinstance(around.container, str) else machine
    return (lines,) if isinstance(lines, str) else lines or ()


def set_for_good(name: str, value: int) -> str:
    """A kernel setting, now and after the next start; each in a file of its own."""
    return f"sysctl -w {name}={value} && echo {name}={value} > /etc/sysctl.d/90-stoker-{name}.conf"


def cores_a_rank(snapshot: Snapshot) -> int:
    """Whole cores that each card's process may keep busy: of those it sees, and of its quota."""
    usable, quota = len(known(snapshot.cpu.usable)), snapshot.cgroup.cpu_limit_cores
    allowed = usable if isinstance(quota, Unknown) or quota is None else min(usable, quota)
    return max(1, int(allowed) // max(1, len(cards(snapshot))))


def say(count: int) -> str:
    """Bytes in the units that limits and manifests are written in: 64 MiB."""
    if count == UNLIMITED:
        return "unlimited"
    return say_binary(count)
