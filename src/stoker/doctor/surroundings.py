"""Container and scheduler facts, and what the kernel's log tells."""

from __future__ import annotations

import re
from collections.abc import Iterator

from stoker.doctor.check import Check, Seen, cards, fail, known, ok, warn
from stoker.doctor.need import Need
from stoker.machine.snapshot import Snapshot

# What NVIDIA's list of XID errors says of the card itself; the others come from programs.
_CARD_XIDS = {
    48: "double-bit memory error",
    62: "internal halt",
    63: "memory row replaced",
    64: "memory row could not be replaced",
    74: "NVLink error",
    79: "fell off the bus",
    92: "many single-bit memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "GSP firmware does not answer",
    120: "GSP firmware error",
    140: "unrecovered memory error",
    149: "NVLink error",
}


def container(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    name = known(snapshot.surroundings.container)
    told = [f"container {name}" if name else "no container"]
    told += ["virtual machine"] * (snapshot.surroundings.virtual is True)
    told += ["Slurm job"] * (snapshot.surroundings.slurm is True)
    yield ok(f"{', '.join(told)}, kernel {known(snapshot.surroundings.kernel)}")


def slurm(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    if not known(snapshot.surroundings.slurm):
        return
    environ = snapshot.environ
    asked, given = environ.get("SLURM_CPUS_PER_TASK", ""), len(known(snapshot.cpu.usable))
    if asked.isdigit() and "SRUN_CPUS_PER_TASK" not in environ and given < int(asked):
        yield warn(
            f"--cpus-per-task={asked} was asked for, this step has {given} cores (srun ignores it since "
            "22.05)",
            f"export SRUN_CPUS_PER_TASK={asked}",
        )
    elif not asked and cards(snapshot) and given < 2 * len(cards(snapshot)):
        yield warn(
            f"no --cpus-per-task: {given} cores for {len(cards(snapshot))} GPU", "#SBATCH --cpus-per-task=8"
        )
    else:
        yield ok(f"{given} cores in this step" + (f", {asked} asked for" if asked else ""))


def gpu_errors(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    found: dict[int, int] = {}
    for line in known(snapshot.log):
        if match := re.search(r"NVRM: Xid \([^)]*\): (\d+)", line):
            found[int(match[1])] = found.get(int(match[1]), 0) + 1
    bad = [f"XID {xid} ({_CARD_XIDS[xid]}) × {count}" for xid, count in found.items() if xid in _CARD_XIDS]
    other = [f"XID {xid} × {count}" for xid, count in found.items() if xid not in _CARD_XIDS]
    if bad:
        yield fail(
            ", ".join(bad), "nvidia-smi -q -d ECC,PAGE_RETIREMENT,ROW_REMAPPER  # drain the node, reset"
        )
    if other:
        yield warn(
            f"{', '.join(other)}: of programs, mostly", "dmesg -T | grep NVRM  # which process, and when"
        )
    if not found:
        yield ok("no XID in the kernel's log")


def kills(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    count = snapshot.cgroup.oom_kills
    if isinstance(count, int) and count:
        yield warn(
            f"{count} processes of this cgroup were killed for memory",
            "stoker plan …  # says what memory limit the job needs",
        )
    lines = [
        line for line in known(snapshot.log) if re.search(r"Out of memory|oom-kill:|out of memory", line)
    ]
    if lines:
        yield warn(
            f"{len(lines)} kills for memory, the last: {lines[-1][:120]}",
            "dmesg -T | grep -i 'killed process'",
        )
    if not count and not lines:
        yield ok("nobody was killed for memory")


def hardware_errors(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    pattern = (
        r"[Bb]us error|fatal signal 7|Memory failure:|I/O error, dev|nvme.*timeout|not responding|LustreError"
    )
    lines = [line for line in known(snapshot.log) if re.search(pattern, line)]
    if lines:
        yield warn(f"{len(lines)} lines, the last: {lines[-1][:120]}", "dmesg -T | tail -100")
    else:
        yield ok("no bus, disk or mount error in the kernel's log")


CHECKS = (
    Check(
        name="container",
        subject="surroundings",
        why="Limits, devices and fixes differ between a bare machine, a container and a pod.",
        look=container,
    ),
    Check(
        name="Slurm step",
        subject="surroundings",
        why="A step that did not ask for cores gets one for each task, and the loader shares it with "
        "training.",
        look=slurm,
    ),
    Check(
        name="GPU errors",
        subject="kernel log",
        why="A card that has told an error of its own will tell it again, in the middle of the next run.",
        look=gpu_errors,
    ),
    Check(
        name="memory kills",
        subject="kernel log",
        why="A worker that was killed for memory shows only as a loader that hangs or a bus error.",
        look=kills,
    ),
    Check(
        name="I/O and bus errors",
        subject="kernel log",
        why="A disk or mount that fails now and then is a stall of seconds each time, before it is an error.",
        look=hardware_errors,
    ),
)
