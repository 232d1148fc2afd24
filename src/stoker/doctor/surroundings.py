"""Container, scheduler and kernel-log checks: what runs this process, and which faults were told."""

from __future__ import annotations

import re
from collections.abc import Iterator

from stoker.doctor.check import Check, Seen, about, cards, fail, known, ok, warn
from stoker.doctor.need import Need
from stoker.formats.sizes import counted
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import Snapshot

# What NVIDIA's list of XID errors says of the card itself; the others come from programs.
_CARD_XIDS = {
    48: "double-bit memory error",
    62: "internal halt",
    64: "memory row could not be replaced",
    74: "NVLink error",
    79: "fell off the bus",
    92: "many single-bit memory errors",
    95: "uncontained memory error",
    119: "GSP firmware does not answer",
    120: "GSP firmware error",
    140: "unrecovered memory error",
    149: "NVLink error",
    154: "reset required",
}
_HANDLED_XIDS = {63: "memory row replaced", 94: "contained memory error"}
_OLD_S = 7 * 86_400.0  # what was told before that, and not since, has been seen to


def container(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    name = known(snapshot.surroundings.container)
    told = [f"container {name}" if name else "no container"]
    told += ["virtual machine"] * (snapshot.surroundings.virtual is True)
    told += ["Slurm job"] * (snapshot.surroundings.slurm is True)
    told += ["seccomp filter"] * (snapshot.surroundings.seccomp is True)
    yield ok(f"{', '.join(told)}, kernel {known(snapshot.surroundings.kernel)}")


def slurm(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    if not known(snapshot.surroundings.slurm):
        return
    environ = snapshot.environ
    asked, given = environ.get("SLURM_CPUS_PER_TASK", ""), len(known(snapshot.cpu.usable))
    if asked.isdigit() and "SRUN_CPUS_PER_TASK" not in environ and given < int(asked):
        yield warn(
            f"--cpus-per-task={asked} was asked for, this step has {counted(given, 'core')} (srun "
            "ignores it since 22.05)",
            f"export SRUN_CPUS_PER_TASK={asked}",
        )
    elif not asked and cards(snapshot) and given < 2 * len(cards(snapshot)):
        yield warn(
            f"no --cpus-per-task: {counted(given, 'core')} for {counted(len(cards(snapshot)), 'GPU')}",
            "#SBATCH --cpus-per-task=8",
        )
    else:
        yield ok(f"{counted(given, 'core')} in this step" + (f", {asked} asked for" if asked else ""))


def gpu_errors(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    found: dict[int, list[float]] = {}
    for line in known(snapshot.log):
        if match := re.search(r"NVRM: Xid \([^)]*\): (\d+)", line):
            found.setdefault(int(match[1]), []).append(_age_s(line))
    known_of = {**_CARD_XIDS, **_HANDLED_XIDS}
    told = {
        xid: f"XID {xid}{f' ({known_of[xid]})' if xid in known_of else ''} × {len(ages)}{_ago(min(ages))}"
        for xid, ages in found.items()
    }
    bad = [xid for xid in told if xid in _CARD_XIDS and min(found[xid]) < _OLD_S]
    noted = [xid for xid in told if xid in known_of and xid not in bad]
    look = "nvidia-smi -q -d ECC,PAGE_RETIREMENT,ROW_REMAPPER"
    if bad:
        yield fail(", ".join(told[xid] for xid in bad), f"{look}  # drain the node, reset the card")
    if noted:
        yield warn(", ".join(told[xid] for xid in noted), f"{look}  # whether it comes again")
    if other := [words for xid, words in told.items() if xid not in known_of]:
        yield warn(
            f"{', '.join(other)}: of programs, mostly", "dmesg -T | grep NVRM  # which process, and when"
        )
    if not found:
        yield ok("no XID in the kernel's log")


def kills(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    """The kernel's log says who and when; the cgroup counts the same kills, also where the log is closed."""
    count = snapshot.cgroup.oom_kills if isinstance(snapshot.cgroup.oom_kills, int) else 0
    log = () if count and isinstance(snapshot.log, Unknown) else known(snapshot.log)
    # The kernel says `oom-kill:` and then who was killed: one of the two lines counts.
    lines = [line for line in log if re.search(r"[Oo]ut of memory: Killed", line)]
    if lines:
        ours = f", {count} of them in this cgroup" if count else ""
        yield warn(
            f"{counted(len(lines), 'kill')} for memory{ours}, {_last(lines)}",
            "dmesg -T | grep -i 'killed process'",
        )
    elif count:
        yield warn(
            f"{counted(count, 'process')} killed for memory in this cgroup",
            "stoker plan …  # says what memory limit the job needs",
        )
    else:
        yield ok("nobody was killed for memory")


def hardware_errors(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    pattern = (
        r"[Bb]us error|fatal signal 7|Memory failure:|I/O error, dev|nvme.*timeout|not responding|LustreError"
    )
    lines = [line for line in known(snapshot.log) if re.search(pattern, line)]
    if lines:
        yield warn(
            f"{counted(len(lines), 'line')}, {_last(lines)}",
            "dmesg -T | tail -100",
        )
    else:
        yield ok("no bus, disk or mount error in the kernel's log")


_AGE = re.compile(r"^\[(\d+) s ago\] ")


def _age_s(line: str) -> float:
    """How long before the reading it was told; recordings of earlier versions do not say: just now."""
    match = _AGE.match(line)
    return float(match[1]) if match else 0.0


def _ago(seconds: float) -> str:
    if not seconds:
        return ""
    hours = seconds / 3600
    return (
        f", {hours / 24:.0f} d ago" if hours >= 48 else f", {hours:.0f} h ago" if hours >= 2 else ", just now"
    )


def _last(lines: list[str]) -> str:
    return f"the last{_ago(_age_s(lines[-1]))}: {_AGE.sub('', lines[-1])[:120]}"


CHECKS = (
    *about(
        "surroundings",
        Check(
            "container",
            container,
            "Limits, devices and fixes differ between a bare machine, a container and a pod.",
        ),
        Check(
            "Slurm step",
            slurm,
            "A step that did not ask for cores gets one for each task, and the loader shares it with "
            "training.",
        ),
    ),
    *about(
        "kernel log",
        Check(
            "GPU errors",
            gpu_errors,
            "A card that has told an error of its own will tell it again, in the middle of the next run.",
        ),
        Check(
            "memory kills",
            kills,
            "A worker that was killed for memory shows only as a loader that hangs or a bus error.",
        ),
        Check(
            "I/O and bus errors",
            hardware_errors,
            "A disk or mount that fails now and then is a stall of seconds each time, before it is an error.",
        ),
    ),
)
