"""Write staggering, concurrency limits: many writers, one store, who writes when. Pure.

A thousand ranks that save at the same moment arrive at a store built for less: each write slows all others,
and the readers that feed the GPUs with them. Limits spread them out; `stoker plan --simulate` says what that
is worth.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.errors import UsageError
from stoker.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How hard a job may hit its disks and stores; 0 is no limit.

    `node_writers` and `job_writers` ranks write at a time, and so many drain, `node_readers` and
    `job_readers` read at a restore; `write_bytes_per_s` is one rank's rate to its checkpoint folder,
    `drain_bytes_per_s` one rank's rate to the remote tier, `read_bytes_per_s` one rank's rate at a restore;
    the writers of a job begin spread over `stagger_s` seconds, node by node."""

    node_writers: int = 0
    job_writers: int = 0
    write_bytes_per_s: float = 0.0
    drain_bytes_per_s: float = 0.0
    stagger_s: float = 0.0
    node_readers: int = 0
    job_readers: int = 0
    read_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 0:
                raise UsageError(f"{name}={getattr(self, name)} is negative", hint="0 means no limit")


def waits_for(world: World, limits: Limits) -> list[int]:
    """The ranks that must have written, or uploaded, before this one begins."""
    return _before(world, per_node=limits.node_writers, per_job=limits.job_writers)


def reads_after(world: World, limits: Limits) -> list[int]:
    """The ranks that must have read before this one begins."""
    return _before(world, per_node=limits.node_readers, per_job=limits.job_readers)


def _before(world: World, *, per_node: int, per_job: int) -> list[int]:
    """Tokens are handed on in a fixed order, so that nothing needs to count them: the k-th after me may
    begin when I am done."""
    ranks = []
    if per_node and world.local_rank >= per_node:
        ranks.append(world.rank - per_node)
    if per_job:
        before = _turn(world) - per_job
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
