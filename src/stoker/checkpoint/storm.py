"""Many writers, one store: who writes when, and what that buys. Pure.

A thousand ranks that save at the same moment arrive at a store built for less: each write slows all others,
and the readers that feed the GPUs with them. Limits spread them out; `simulate` says what that is worth.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from stoker.errors import UsageError
from stoker.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How hard a job may hit its disks and stores; 0 is no limit.

    `node_writers` and `job_writers` ranks write at a time; `write_bytes_per_s` is one rank's rate to its
    checkpoint folder, `drain_bytes_per_s` one rank's rate to the remote tier; the writers of a job begin
    spread over `stagger_s` seconds, node by node."""

    node_writers: int = 0
    job_writers: int = 0
    write_bytes_per_s: float = 0.0
    drain_bytes_per_s: float = 0.0
    stagger_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 0:
                raise UsageError(f"{name}={getattr(self, name)} is negative", hint="0 means no limit")


def waits_for(world: World, limits: Limits) -> list[int]:
    """The ranks that must have written before this one begins. Tokens are handed on in a fixed order, so
    that nothing needs to count them: the k-th after me may begin when I am done."""
    ranks = []
    if limits.node_writers and world.local_rank >= limits.node_writers:
        ranks.append(world.rank - limits.node_writers)
    if limits.job_writers:
        before = _turn(world) - limits.job_writers
        if before >= 0:
            ranks.append(_rank_of(before, world))
    return ranks


def start_delay_s(world: World, limits: Limits) -> float:
    """When this rank begins, so that nodes begin evenly over the stagger."""
    return limits.stagger_s * world.node / world.nodes


def _turn(world: World) -> int:
    """One rank of every node first: their disks and links are different ones."""
    if world.size != world.nodes * world.local_size:
        return world.rank
    return world.local_rank * world.nodes + world.node


def _rank_of(turn: int, world: World) -> int:
    if world.size != world.nodes * world.local_size:
        return turn
    return (turn % world.nodes) * world.local_size + turn // world.nodes


# --- simulation ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """Writers that save at the same moment to one store, while readers go on reading from it.

    Up to `knee` streams the store gives `store_bytes_per_s`; with more it loses to seeks, locks and
    retries: at (1 + k) times the knee it gives 1 / (1 + slope * k) of it."""

    writers: int
    bytes_each: float
    store_bytes_per_s: float
    writer_bytes_per_s: float
    knee: int = 64
    slope: float = 0.1
    readers: int = 0
    read_bytes_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Storm:
    """What such a save was like."""

    seconds: float  # until the last writer is done
    mean_writer_s: float  # from a writer's first byte to its last
    most_writers: int
    least_read_share: float  # of what the readers wanted, in the worst moment
    read_bytes_lost: float


def simulate(fleet: Fleet, limits: Limits) -> Storm:
    """Play a save through: active writers share the store equally, with the readers and each other."""
    starts = _starts(fleet, limits)
    cap = min(fleet.writer_bytes_per_s, limits.write_bytes_per_s or math.inf)
    now = served = took = lost = 0.0
    most, least, begun = 0, 1.0, 0
    active: list[tuple[float, float]] = []  # (bytes served to each by the time this one is done, its start)
    while begun < fleet.writers or active:
        while begun < fleet.writers and starts[begun] <= now and _may_begin(len(active), limits):
            heapq.heappush(active, (served + fleet.bytes_each, now))
            begun += 1
        rate, share = _shares(fleet, len(active), cap)
        until_done = (active[0][0] - served) / rate if active else math.inf
        can_begin = begun < fleet.writers and _may_begin(len(active), limits)
        until_start = starts[begun] - now if can_begin else math.inf
        passed = min(until_done, until_start)
        most, least = max(most, len(active)), min(least, share)
        lost += passed * (1 - share) * fleet.read_bytes_per_s
        now += passed
        served = active[0][0] if until_done <= until_start else served + passed * rate
        while active and active[0][0] <= served:
            took += now - heapq.heappop(active)[1]
    return Storm(
        seconds=now,
        mean_writer_s=took / fleet.writers,
        most_writers=most,
        least_read_share=least,
        read_bytes_lost=lost,
    )


def _starts(fleet: Fleet, limits: Limits) -> list[float]:
    return [limits.stagger_s * at / fleet.writers for at in range(fleet.writers)]


def _may_begin(active: int, limits: Limits) -> bool:
    return not limits.job_writers or active < limits.job_writers


def _shares(fleet: Fleet, active: int, cap: float) -> tuple[float, float]:
    """The rate of one writer, and the share of their wish that the readers get."""
    streams = active + fleet.readers
    if not streams:
        return cap, 1.0
    beyond = max(0.0, streams / fleet.knee - 1)
    total = fleet.store_bytes_per_s / (1 + fleet.slope * beyond)
    fair = total / streams
    wish = fleet.read_bytes_per_s
    read = min(wish, max(fair * fleet.readers, total - active * cap))
    rate = min(cap, (total - read) / active) if active else cap
    return max(rate, 1e-9), read / wish if wish else 1.0
