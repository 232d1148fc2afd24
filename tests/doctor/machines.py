"""Recorded machines: this one's like, and hand-made ones with known faults."""

from __future__ import annotations

from pathlib import Path

from stoker.doctor.check import Level, Result
from stoker.doctor.examine import examine
from stoker.doctor.need import Need
from stoker.machine.snapshot import Snapshot, read_snapshot

FOLDER = Path(__file__).parents[1] / "recordings" / "machines"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
GIB = 1 << 30

# More than any of the recorded machines has.
LARGE = Need(
    shm_bytes=16 * GIB,
    memory_bytes=120 * GIB,
    cpu_cores=96,
    memlock_bytes=64 * GIB,
    cache_bytes=8 << 40,
    open_files=2_000_000,
    read_bytes_s=14_400_000_000,
    gpus=16,
)


def machine(name: str) -> Snapshot:
    return read_snapshot(FOLDER / f"{name}.json")


def faults(results: list[Result]) -> dict[str, Level]:
    """The checks that found something, and how bad."""
    order = ("warn", "fail")
    found: dict[str, Level] = {}
    for result in sorted(results, key=lambda one: order.index(one.level) if one.level in order else -1):
        if result.level in order:
            found[result.check.name] = result.level
    return found


def seen(snapshot: Snapshot, check: str, need: Need | None = None) -> list[Result]:
    """What one check sees."""
    return [result for result in examine(snapshot, need=need) if result.check.name == check]
