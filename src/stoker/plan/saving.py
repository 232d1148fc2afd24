"""Checkpoint interval (Young/Daly): how often to save, and what saving and failing cost. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.checkpoint.interval import advise, mtbf_of
from stoker.plan.job import Job

_STORE_SHARE = 0.1  # of the store's rate that checkpoints may take: GPUs are fed from the same store
_SHORTEST_S = 60.0  # what saving more often would gain is less than what is known of failures


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """A checkpoint's size and times, the interval of Young and Daly, and the share of time then lost.

    `sync_*` is the same for a loop that stands still until the store has everything."""

    bytes: float
    node_bytes: float
    stall_s: float  # the loop stands still for the copy to host memory only
    write_s: float  # until it is durable on NVMe
    drain_s: float  # until it is in the store
    interval_s: float
    loss: float
    sync_stall_s: float
    sync_interval_s: float
    sync_loss: float
    mtbf_s: float


def plan_saving(job: Job) -> Saving:
    size = job.checkpoint_bytes
    node, mtbf = size / job.nodes, job.mtbf or mtbf_of(job.gpus)
    if not size:
        return _nothing(mtbf)
    stall = size / job.gpus / job.snapshot_rate
    write = node / job.nvme_rate if job.nvme and job.nvme_rate else 0.0
    drain = size / _store_write_rate(job) if _store_write_rate(job) else 0.0
    durable = max(write, drain)  # a node's NVMe goes with the node
    interval = max(
        advise(stall_s=stall, write_s=durable, mtbf_s=mtbf).interval_s, drain / _STORE_SHARE, _SHORTEST_S
    )
    sync = advise(stall_s=stall + durable, write_s=0.0, mtbf_s=mtbf, restart_s=job.restart)
    return Saving(
        bytes=size,
        node_bytes=node,
        stall_s=stall,
        write_s=write,
        drain_s=drain,
        interval_s=interval,
        loss=min(1.0, stall / interval + (interval / 2 + durable + job.restart) / mtbf),
        sync_stall_s=stall + durable,
        sync_interval_s=sync.interval_s,
        sync_loss=sync.loss,
        mtbf_s=mtbf,
    )


def _store_write_rate(job: Job) -> float:
    known = [rate for rate in (job.store_rate, job.node_rate * job.nodes) if rate]
    return min(known, default=0.0)


def _nothing(mtbf: float) -> Saving:
    return Saving(
        bytes=0.0, node_bytes=0.0, stall_s=0.0, write_s=0.0, drain_s=0.0, interval_s=0.0, loss=0.0,
        sync_stall_s=0.0, sync_interval_s=0.0, sync_loss=0.0, mtbf_s=mtbf,
    )  # fmt: skip
