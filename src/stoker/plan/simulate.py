"""Discrete-event simulation of a job, from the first byte to the last: thousands of nodes, one store.

Bytes are a fluid: between two events every rate is constant, so what a node has at the next event is exact,
and nobody chooses a step size. Events: a node starts, a buffer is full or empty, an epoch ends, a save begins
or ends, a node is lost. Nodes that are alike are one class, so 10,000 cost what ten do; stretches in which
one save interval is like the next are taken in one stride.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stoker.plan.fluid import Job
from stoker.plan.scene import Cluster, Course, Policy
from stoker.plan.strides import Strides

_MOST_EVENTS = 50_000
_IN_VAIN = 20  # losses before a single save: such a job does not end


def play(cluster: Cluster, policy: Policy) -> Course:
    """A job under a policy, until its epochs are read."""
    job, strides = Job(cluster, policy), Strides()
    for _ in range(_MOST_EVENTS):
        if job.done or job.in_vain >= _IN_VAIN:
            break
        if job.begin_save():
            strides.save_begun(job)
        job.advance()
    return job.course()


def sweep(cluster: Cluster, policy: Policy, counts: Sequence[int]) -> list[Course]:
    """The same job on other numbers of nodes: the same bytes a node and an epoch, so that only the store
    stays as it is."""
    return [play(replace(cluster, nodes=count, dataset=cluster.share * count), policy) for count in counts]


def usual_policies(cluster: Cluster) -> tuple[Policy, ...]:
    """Ways to bring the data, all of which save alike; where there are checkpoints, also saves that stop the
    loop."""
    spread = min(60.0, cluster.interval_s / 10) if cluster.interval_s else 0.0
    ways = (
        Policy(name="read from the store", staging="none", save_stagger_s=spread),
        Policy(name="copy everything first", staging="everything", save_stagger_s=spread),
        Policy(name="copy with peers", staging="everything", peers=True, save_stagger_s=spread),
        Policy(name="stage shares", staging="share", save_stagger_s=spread),
    )
    stopping = Policy(name="stage shares, saves stop the loop", staging="share", saving="stop")
    return (*ways, stopping) if cluster.checkpoint else ways
