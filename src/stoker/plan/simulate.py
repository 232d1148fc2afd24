"""Plays a job through, from the first byte to the last: thousands of nodes, one store, in seconds.

Bytes are a fluid and time goes in ticks. In each tick the nodes that want bytes share the store fairly
(none gets more than its own network or cap allows), and the job, which is in lock-step, computes as far as
the node with the least bytes. Everything a node has is one number in a vector, so 10,000 nodes cost
little more than ten.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from stoker.plan.scene import CAUSES, Cluster, Course, Floats, Policy

TICKS = 600  # of an undisturbed run; one that waits much gets longer ticks, not more of them for ever
_MOST_TICKS = 20 * TICKS  # each TICKS are twice as long as those before
_LESS_THAN_NOTHING = 1e-9


def play(cluster: Cluster, policy: Policy, *, ticks: int = TICKS) -> Course:
    """A job under a policy, until its epochs are read."""
    run = _Run(cluster, policy)
    dt = _first_tick(cluster, run.interval_s, ticks)
    for number in range(_MOST_TICKS):
        if number and number % ticks == 0:
            dt *= 2
        run.tick(dt)
        if run.done:
            break
    return run.course()


def sweep(cluster: Cluster, policy: Policy, counts: Sequence[int]) -> list[Course]:
    """The same job on other numbers of nodes: the same bytes a node and an epoch, so that only the store
    stays as it is."""
    return [
        play(replace(cluster, nodes=count, dataset=cluster.share * count), policy, ticks=TICKS // 5)
        for count in counts
    ]


def saturates_at(cluster: Cluster) -> float:
    """Nodes at which the store gives what first epochs ask of it."""
    return cluster.store_rate / cluster.demand


def usual_policies(cluster: Cluster) -> tuple[Policy, ...]:
    """From what scripts do to all that stoker does."""
    spread = min(60.0, cluster.interval_s / 10) if cluster.interval_s else 0.0
    return (
        Policy(name="read from the store", staging="none", saving="stop"),
        Policy(name="copy everything first", staging="everything", saving="stop"),
        Policy(name="copy with peers", staging="everything", peers=True, saving="behind"),
        Policy(name="stage shares", staging="share", saving="behind", save_stagger_s=spread),
    )


def _first_tick(cluster: Cluster, interval_s: float, ticks: int) -> float:
    return min(cluster.epochs * cluster.share / cluster.demand / ticks, interval_s / 4)


@dataclass(slots=True)
class _Run:
    """A job under way. Vectors are of nodes; `used` is one number, since all are in lock-step."""

    cluster: Cluster
    policy: Policy
    now: float = 0.0
    used: float = 0.0  # bytes each node has consumed
    missed: float = 0.0  # of them, those its cache did not have
    first_step: float = -1.0
    store_bytes: float = 0.0
    next_save: float = 0.0
    t: list[float] = field(default_factory=list)
    idle: list[tuple[float, ...]] = field(default_factory=list)
    store: list[float] = field(default_factory=list)
    link: Floats = field(init=False)
    starts: Floats = field(init=False)
    before: Floats = field(init=False)  # bytes still to come before step one
    landed: Floats = field(init=False)  # bytes that came of those the cache did not have
    unsaved: Floats = field(init=False)  # bytes of the checkpoint that are still to be written
    save_starts: Floats = field(init=False)
    speed: float = field(init=False)

    def __post_init__(self) -> None:
        cluster, policy = self.cluster, self.policy
        chance = np.random.default_rng(cluster.seed)
        rate = cluster.node_rate or cluster.store_rate
        slow = chance.permutation(cluster.nodes) < round(cluster.slow_links * cluster.nodes)
        self.link = np.where(slow, rate * cluster.slow_link, rate)
        self.speed = cluster.slow_gpu if round(cluster.slow_gpus * cluster.nodes) else 1.0
        self.starts = policy.stagger_s * np.arange(cluster.nodes) / cluster.nodes
        self.before = np.full(cluster.nodes, self._before())
        self.landed, self.unsaved, self.save_starts = (np.zeros(cluster.nodes) for _ in range(3))
        self.next_save = self.interval_s

    @property
    def interval_s(self) -> float:
        cluster, stops = self.cluster, self.policy.saving == "stop"
        given = (stops and cluster.stop_interval_s) or cluster.interval_s
        return given if given and cluster.checkpoint else math.inf

    @property
    def done(self) -> bool:
        return self.used >= self.cluster.epochs * self.cluster.share * (1 - 1e-9)

    # --- a tick, in the order the bytes move ---

    def tick(self, dt: float) -> None:
        dt = self._shortened(dt)
        self._begin_save()
        hit = self._hit()
        reads, writes, store = self._share_out(dt, hit)
        ready = self._is_ready()
        self._land(reads * dt)
        stalled = self._write(writes, dt)
        idle = self._compute(dt, hit=hit, stalled=stalled) if ready else (1.0, 0.0, 0.0, 0.0)
        self.now += dt
        self.t.append(self.now)
        self.idle.append(idle)
        self.store.append(store)

    def _shortened(self, dt: float) -> float:
        """An epoch ends with its tick: what would be left of a longer one would look like a wait."""
        if self.first_step < 0:
            return dt
        return max(min(dt, self._left_of_epoch() / (self.cluster.demand * self.speed)), dt / 16)

    def _share_out(self, dt: float, hit: float) -> tuple[Floats, Floats, float]:
        """Rates of reading and of writing, and the share of the store in use."""
        cluster, policy = self.cluster, self.policy
        most = np.minimum(self.link, policy.cap) if policy.cap else self.link
        wish = np.where(self.now >= self.starts, np.minimum(most, self._room(dt, hit) / dt), 0.0)
        writing = (self.unsaved > 0) & (self.now >= self.save_starts)
        wish_write = np.where(writing, np.minimum(self.link, self.unsaved / dt), 0.0)
        from_store = self._from_store()
        total = cluster.store_rate / (1 + cluster.slope * self._beyond(wish * from_store, wish_write))
        given = _fair(np.concatenate([wish * from_store, wish_write]), total)
        reads, writes = given[: cluster.nodes], given[cluster.nodes :]
        self.store_bytes += float(reads.sum()) * dt
        use = float(given.sum()) / total
        return np.minimum(wish, self._with_peers(reads, wish, from_store, total)), writes, use

    def _land(self, came: Floats) -> None:
        self.landed += np.maximum(0.0, came - self.before)
        self.before = np.maximum(0.0, self.before - came)
        self.before[self.before < _LESS_THAN_NOTHING * self.cluster.dataset] = 0.0

    def _write(self, rates: Floats, dt: float) -> float:
        """Seconds of this tick for which the loop stands still."""
        if not self.unsaved.any():
            return 0.0
        active = rates > 0
        took = float((self.unsaved[active] / rates[active]).max()) if active.any() else dt
        self.unsaved = np.maximum(0.0, self.unsaved - rates * dt)
        self.unsaved[self.unsaved < self.cluster.checkpoint * _LESS_THAN_NOTHING] = 0.0
        if self.policy.saving == "behind":
            return 0.0
        return dt if self.unsaved.any() else min(dt, took)

    def _compute(self, dt: float, *, hit: float, stalled: float) -> tuple[float, ...]:
        """Go on as far as the node with the least bytes; why not further, as shares of the tick."""
        cluster = self.cluster
        if self.first_step < 0:
            self.first_step = self.now
        stalled = min(dt, stalled + self._snapshot_s())
        could = cluster.demand * (dt - stalled)
        slow = could * self.speed
        there = float(self.landed.min()) - self.missed
        bytes_ = slow if hit >= 1 else min(slow, there / (1 - hit))
        if hit and cluster.nvme_rate:
            bytes_ = min(bytes_, cluster.nvme_rate * (dt - stalled) / hit)
        bytes_ = max(0.0, min(bytes_, self._left_of_epoch()))
        self.used += bytes_
        self.missed += bytes_ * (1 - hit)
        whole = cluster.demand * dt
        return (0.0, max(0.0, slow - bytes_) / whole, (could - slow) / whole, stalled / dt)

    # --- what the policy makes of it ---

    def _is_ready(self) -> bool:
        """Training has begun, or can: all are up and have what they begin with."""
        if self.first_step >= 0:
            return True
        first = min(self.cluster.first, self.cluster.share) if self.policy.staging == "share" else 0.0
        came = not self.before.any() and self.landed.min() >= first * (1 - 1e-9)
        return bool(came and (self.now >= self.starts).all())

    def _before(self) -> float:
        cluster = self.cluster
        if self.policy.staging == "everything":
            return min(cluster.cache, cluster.dataset)
        return 0.0

    def _epoch(self) -> int:
        return int(self.used / self.cluster.share + 1e-9)

    def _left_of_epoch(self) -> float:
        return self.cluster.share * (self._epoch() + 1) - self.used

    def _hit(self) -> float:
        """The share of this epoch's reads that a node's own cache has."""
        cluster, epoch = self.cluster, self._epoch()
        if self.policy.staging == "everything":
            return min(1.0, cluster.cache / cluster.dataset)
        if epoch == 0:
            return 0.0
        if self.policy.staging == "share":
            return min(1.0, cluster.cache / cluster.share)
        # other samples each epoch: what a node has read before it meets again by chance
        return min(cluster.cache / cluster.dataset, epoch / cluster.nodes)

    def _room(self, dt: float, hit: float) -> Floats:
        """Bytes a node would take in this tick, if they came."""
        cluster = self.cluster
        in_hand = self.landed - self.missed
        ahead = cluster.ahead + cluster.demand * dt * (1 - hit)
        if self.policy.staging == "share" and self._epoch() == 0:
            ahead = max(ahead, min(cluster.share, cluster.cache))
            ahead = min(ahead, self._left_of_epoch())  # later epochs find it in the cache
        if hit >= 1:
            ahead = 0.0
        left = cluster.epochs * cluster.share - self.used
        return self.before + np.maximum(0.0, min(ahead, left) - in_hand)

    def _from_store(self) -> float:
        """The part of what a node wants that only the store has."""
        cluster = self.cluster
        if not self.policy.peers:
            return 1.0
        if self.policy.staging == "everything" and self.before.any():
            return 1 / cluster.nodes  # each piece comes once and goes from node to node
        if self._epoch() == 0:
            return 1.0
        return max(0.0, 1 - cluster.nodes * cluster.cache / cluster.dataset)

    def _with_peers(self, reads: Floats, wish: Floats, from_store: float, total: float) -> Floats:
        """What peers add: as fast as their networks, but no piece before the store has given it."""
        if from_store >= 1:
            return reads
        if from_store <= 0:
            return wish
        return np.minimum(wish, np.minimum(reads / from_store, total))

    # --- saving ---

    def _begin_save(self) -> None:
        cluster, policy = self.cluster, self.policy
        if self.now >= self.next_save and self.first_step >= 0 and not self.unsaved.any():
            self.unsaved = np.full(cluster.nodes, cluster.checkpoint)
            self.save_starts = self.now + policy.save_stagger_s * np.arange(cluster.nodes) / cluster.nodes
            self.next_save = self.now + self.interval_s

    def _snapshot_s(self) -> float:
        """A save behind the loop costs its snapshot, in the tick in which it begins."""
        begun = self.policy.saving == "behind" and self.next_save == self.now + self.interval_s
        return self.cluster.stall_s if begun and self.unsaved.any() else 0.0

    def _beyond(self, reads: Floats, writes: Floats) -> float:
        """How far beyond its knee the store is."""
        if not self.cluster.knee:
            return 0.0
        streams = int(np.count_nonzero(reads)) + int(np.count_nonzero(writes))
        return max(0.0, streams / self.cluster.knee - 1)

    def course(self) -> Course:
        return Course(
            policy=self.policy,
            cluster=self.cluster,
            t=np.array(self.t),
            idle=np.array(self.idle).reshape(-1, len(CAUSES)).T,
            store=np.array(self.store),
            seconds=self.now,
            first_step_s=self.first_step,
            store_bytes=self.store_bytes,
            whole=self.done,
        )


def _fair(wishes: Floats, total: float) -> Floats:
    """Max-min fair: everyone gets the same, except those who want less."""
    if wishes.sum() <= total:
        return wishes
    wanting = wishes > 0
    equal = total / np.count_nonzero(wanting)
    if wishes[wanting].min() >= equal:
        return np.where(wanting, equal, 0.0)
    ordered = np.sort(wishes)
    # with the level at the k-th wish, those below have theirs and the rest have as much each
    spent = np.cumsum(ordered) + ordered * np.arange(len(ordered) - 1, -1, -1)
    at = int(np.searchsorted(spent, total))
    below = float(ordered[:at].sum())
    return np.minimum(wishes, (total - below) / (len(ordered) - at))
