"""Fluid model of a job: what each class of nodes has, the rates at this moment, and the next event.

Vectors are of classes of nodes that are alike; `used` is one number, since all nodes are in lock-step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stoker.plan.caching import from_store, hit_share, kept_after_loss, misses
from stoker.plan.scene import CAUSES, Cluster, Course, Floats, Policy
from stoker.plan.sharing import fair_level, store_total

Flags = NDArray[np.bool_]

COHORTS = 32  # steps of a spread start or save; up to so many nodes it is exact
_TINY = 1e-9  # of a whole: what rounding leaves


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second at one moment: into each class's nodes, out to the store, and through the GPUs."""

    inflow: Floats
    writes: Floats
    consumed: float
    from_store: float  # of all nodes together
    store: float  # the share of the store's rate in use


class Job:
    """A job under way. Its phases: not begun, running, stopped (for a save or after a loss)."""

    def __init__(self, cluster: Cluster, policy: Policy) -> None:
        self.cluster, self.policy = cluster, policy
        self.count, self.link, cohort = _classes(cluster, policy)
        classes = len(self.count)
        self.starts = policy.stagger_s * cohort
        self.save_delay = policy.save_stagger_s * cohort
        whole = min(cluster.cache, cluster.dataset) if policy.staging == "everything" else 0.0
        self.before = np.full(classes, float(whole))  # bytes still to come before step one
        self.in_hand, self.unsaved, self.save_starts = (np.zeros(classes) for _ in range(3))
        self.lowest, self.highest = self.in_hand.copy(), self.in_hand.copy()  # since the last save began
        self.speed = cluster.slow_gpu if round(cluster.slow_gpus * cluster.nodes) else 1.0
        self.now = self.used = self.missed = self.store_bytes = self.saturated_s = 0.0
        self.first_step = -1.0
        self.stopped_until, self.stopped_by = 0.0, ""
        self.next_save = math.inf
        self.saving_at: tuple[float, float] | None = None  # used and missed when the save under way began
        self.durable = (0.0, 0.0)  # used and missed of the newest checkpoint in the store
        self.furthest = 0.0  # what had been used before a loss; up to there work is done again
        self.next_loss = cluster.mtbf_s or math.inf
        self.in_vain = 0  # losses one after another before anything was saved
        self.total = cluster.epochs * cluster.share
        self.total_missed = misses(cluster, policy)
        self.segments: list[tuple[float, tuple[float, ...], float]] = []  # end, idle by cause, store in use

    @property
    def interval_s(self) -> float:
        stops = self.policy.saving == "stop"
        given = (stops and self.cluster.stop_interval_s) or self.cluster.interval_s
        return given if given and self.cluster.checkpoint else math.inf

    @property
    def epoch(self) -> int:
        return int(self.used / self.cluster.share + _TINY)

    @property
    def hit(self) -> float:
        return hit_share(self.cluster, self.policy, self.epoch)

    @property
    def done(self) -> bool:
        return self.used >= self.total * (1 - _TINY)

    @property
    def runs(self) -> bool:
        stops = self.policy.saving == "stop" and self.unsaved.any()
        return self.first_step >= 0 and self.now >= self.stopped_until and not stops

    # --- from one event to the next ---

    def advance(self) -> None:
        self._begin_training()
        rates = self._rates()
        wait = min((time for time in self._events(rates) if time > 0), default=math.inf)
        if not math.isfinite(wait):
            raise AssertionError(f"nothing will ever happen in {self.cluster}")
        wait = max(wait, 4 * math.ulp(self.now))  # what is nearer than the clock can tell has come
        self._note(wait, rates)
        self._move(wait, rates)
        self._settle()

    def begin_save(self) -> bool:
        """A save begins if one is due and the one before it is over."""
        if self.now < self.next_save or self.unsaved.any() or self.first_step < 0 or not self.runs:
            return False
        self.unsaved = np.full(len(self.count), float(self.cluster.checkpoint))
        self.save_starts = self.now + self.save_delay
        self.saving_at = (self.used, self.missed)
        self.next_save = math.inf if self.policy.saving == "stop" else self.now + self.interval_s
        if self.policy.saving == "behind" and self.cluster.stall_s:
            self._stop(self.cluster.stall_s, by="checkpoint")
            self.next_save += self.cluster.stall_s
        return True

    def shift(self, seconds: float, change: Floats) -> None:
        """Later by so much, with so many more bytes used, missed and read and seconds saturated, and all that
        lies ahead as far away as before."""
        used, missed, read, saturated, *in_hand = change.tolist()
        self.now += seconds
        self.next_save += seconds
        self.stopped_until += seconds
        self.save_starts += seconds
        self.used += used
        self.missed += missed
        self.store_bytes += read
        self.saturated_s += saturated
        self.in_hand += in_hand
        self.durable = (self.durable[0] + used, self.durable[1] + missed)
        if self.saving_at:
            self.saving_at = (self.saving_at[0] + used, self.saving_at[1] + missed)

    def course(self) -> Course:
        return Course(
            policy=self.policy,
            cluster=self.cluster,
            t=np.array([end for end, _, _ in self.segments]),
            idle=np.array([idle for _, idle, _ in self.segments]).reshape(-1, len(CAUSES)).T,
            store=np.array([use for _, _, use in self.segments]),
            seconds=self.now,
            first_step_s=self.first_step,
            store_bytes=self.store_bytes,
            saturated_s=self.saturated_s,
            whole=self.done,
        )

    # --- rates ---

    def _rates(self) -> Rates:
        """Who wants how much, what the fair share is, and how fast the job goes with it."""
        part, miss = self._from_store(), 1 - self.hit if self.runs else 0.0
        link = np.minimum(self.link, self.policy.cap) if self.policy.cap else self.link
        open_, full = self._wants()
        writing = np.where((self.unsaved > 0) & (self.now >= self.save_starts), self.link, 0.0)
        fastest = self._fastest() if self.runs else 0.0
        # As much as full buffers may take: then nobody's share is less than what the job moves on with.
        most = np.where(open_ | full, link, 0.0)
        reading = most if miss or open_.any() else 0 * most
        total = store_total(self.cluster, self._streams(reading * part, writing))
        moved = fastest * miss
        empty = (self.in_hand <= 0) & (open_ | full) if miss else np.zeros(len(link), bool)
        if empty.any():
            level = self._level(most * part, writing, total) / max(part, _TINY)
            moved = min(moved, float(np.minimum(link, level)[empty].min()))
        wish = np.where(full, np.minimum(link, moved), most)
        return self._given(wish, writing, part=part, total=total, consumed=moved / miss if miss else fastest)

    def _given(self, wish: Floats, writing: Floats, *, part: float, total: float, consumed: float) -> Rates:
        level = self._level(wish * part, writing, total)
        reads, writes = np.minimum(wish * part, level), np.minimum(writing, level)
        # A piece that peers pass on comes no sooner than the store has given it once.
        inflow = np.minimum(wish, np.minimum(reads / part, total)) if part else wish
        taken = float(reads @ self.count)
        return Rates(inflow, writes, consumed, taken, (taken + float(writes @ self.count)) / total)

    def _level(self, reads: Floats, writes: Floats, total: float) -> float:
        return fair_level(np.concatenate([reads, writes]), np.concatenate([self.count, self.count]), total)

    def _streams(self, reads: Floats, writes: Floats) -> float:
        return float(self.count @ ((reads > 0).astype(float) + (writes > 0)))

    def _fastest(self) -> float:
        """Bytes a second if none of them were late."""
        hit, rate = self.hit, self.cluster.demand * self.speed
        return min(rate, self.cluster.nvme_rate / hit) if hit and self.cluster.nvme_rate else rate

    def _wants(self) -> tuple[Flags, Flags]:
        """Classes that take what they get, and those whose buffers are full and take what is used."""
        begun = self.now >= self.starts
        wanting = begun & (self.to_land() > 0) & (self.in_hand <= self.ahead())
        full = wanting & (self.in_hand >= self.ahead()) & (self.before <= 0)
        return begun & ((self.before > 0) | (wanting & ~full)), full

    def ahead(self) -> float:
        """Bytes a node reads ahead: what it has room for while it stages, else a buffer."""
        cluster = self.cluster
        staging = self.policy.staging == "share" and self.epoch == 0
        return max(cluster.ahead, min(cluster.share, cluster.cache)) if staging else cluster.ahead

    def to_land(self) -> Floats:
        """Bytes a node has still to fetch: in all, or in an epoch that fills the cache for later ones."""
        staging = self.policy.staging == "share" and self.epoch == 0
        whole = min(self.cluster.share, self.total_missed) if staging else self.total_missed
        left = whole - self.missed - self.in_hand
        _snap(left, 0.0, whole)
        return left

    def _from_store(self) -> float:
        return from_store(self.cluster, self.policy, self.epoch, copying=bool((self.before > 0).any()))

    # --- events ---

    def _events(self, rates: Rates) -> Iterator[float]:
        """Seconds until something changes; those that never come are infinite or not above zero."""
        net = rates.inflow - (1 - self.hit) * rates.consumed
        coming = np.where(self.before > 0, 0.0, rates.inflow)
        for ends in (self.starts, self.save_starts[self.unsaved > 0]):
            yield from (ends - self.now).tolist()
        yield self.stopped_until - self.now
        if self.first_step >= 0:
            yield self.next_loss - self.now
        if self.runs and not self.unsaved.any():
            yield self.next_save - self.now
        yield from _until(self.before, rates.inflow)
        yield from _until(self.unsaved, rates.writes)
        yield from _until(self.to_land(), coming)
        yield from _until(self.ahead() - self.in_hand, np.where(self.before > 0, 0.0, net))
        if self.first_step < 0:
            yield from _until(self._first() - self.in_hand, coming)
        else:
            yield from _until(self.in_hand, -net)
        if rates.consumed > 0:
            left = self.cluster.share * (self.epoch + 1) - self.used
            yield min(left, self.total - self.used) / rates.consumed
            yield (self.furthest - self.used) / rates.consumed

    def _note(self, seconds: float, rates: Rates) -> None:
        self.segments.append((self.now + seconds, self._idle(rates.consumed), rates.store))
        self.saturated_s += seconds if rates.store > 1 - 1e-6 else 0.0

    def _idle(self, consumed: float) -> tuple[float, ...]:
        """Shares of this moment by cause: start, data, straggler, checkpoint, failure."""
        if self.first_step < 0:
            return (1.0, 0.0, 0.0, 0.0, 0.0)
        if not self.runs:
            failed = self.stopped_by == "failure" and self.now < self.stopped_until
            return (0.0, 0.0, 0.0, 0.0, 1.0) if failed else (0.0, 0.0, 0.0, 1.0, 0.0)
        again = consumed / self.cluster.demand if self.used < self.furthest * (1 - _TINY) else 0.0
        late = max(0.0, self.speed - consumed / self.cluster.demand)
        return (0.0, late, 1 - self.speed, 0.0, again)

    def _move(self, seconds: float, rates: Rates) -> None:
        came = rates.inflow * seconds
        first = np.minimum(came, self.before)
        self.before -= first
        used, miss = rates.consumed * seconds, 1 - self.hit
        self.used += used
        self.missed += used * miss
        self.in_hand += came - first - used * miss
        self.unsaved = np.maximum(0.0, self.unsaved - rates.writes * seconds)
        self.store_bytes += rates.from_store * seconds
        self.now += seconds

    def _settle(self) -> None:
        """What rounding left of an event is taken away, and what follows from the event is done."""
        cluster = self.cluster
        _snap(self.before, 0.0, cluster.dataset)
        # by the buffer, or one that is small beside an epoch would be full and empty at once
        buffer = max(min(self.ahead() or cluster.share, cluster.share), 1e-6 * cluster.share)
        _snap(self.in_hand, 0.0, buffer)
        _snap(self.in_hand, self.ahead(), buffer)
        if self.first_step < 0:
            _snap(self.in_hand, self._first(), cluster.share)
        np.minimum(self.lowest, self.in_hand, out=self.lowest)
        np.maximum(self.highest, self.in_hand, out=self.highest)
        edge = cluster.share * round(self.used / cluster.share)
        # only forward: a step may be smaller than what rounding is allowed to leave of an epoch
        self.used = edge if 0 < edge - self.used <= _TINY * cluster.share else self.used
        _snap(self.unsaved, 0.0, cluster.checkpoint)
        if self.saving_at and not self.unsaved.any():
            self._saved(self.saving_at)
        if self.first_step >= 0 and self.now >= self.next_loss:
            self._lose()

    def _begin_training(self) -> None:
        """Training begins when all are up and have what they begin with."""
        ready = not self.before.any() and bool((self.in_hand >= self._first()).all())
        if self.first_step < 0 and ready and bool((self.now >= self.starts).all()):
            self.first_step = self.now
            self.next_save = self.now + self.interval_s
            if self.now >= self.next_loss:  # who is lost before the first step costs nothing here
                self.next_loss += self.cluster.mtbf_s * (self.now // self.cluster.mtbf_s)

    def _first(self) -> float:
        """Bytes a node begins with: no more than it can hold, and than it will need."""
        if self.policy.staging != "share":
            return 0.0
        return min(self.cluster.first, self.cluster.share, self.total, self.ahead())

    # --- saves and losses ---

    def _saved(self, at: tuple[float, float]) -> None:
        self.durable, self.saving_at, self.in_vain = at, None, 0
        if self.policy.saving == "stop":
            self.next_save = self.now + self.interval_s

    def _stop(self, seconds: float, *, by: str) -> None:
        self.stopped_until, self.stopped_by = self.now + seconds, by

    def _lose(self) -> None:
        """A node is lost: the job starts again from the newest checkpoint in the store."""
        self.next_loss += self.cluster.mtbf_s
        self.in_vain += 1
        self.furthest = max(self.furthest, self.used)
        landed = self.missed + self.in_hand
        self.in_hand = kept_after_loss(self.cluster, self.policy, landed, missed=self.durable[1])
        self.used, self.missed = self.durable
        self.unsaved[:], self.saving_at = 0.0, None
        self._stop(self.cluster.restart_s, by="failure")
        self.next_save = self.now + self.cluster.restart_s + self.interval_s


def _classes(cluster: Cluster, policy: Policy) -> tuple[Floats, Floats, Floats]:
    """How many nodes are alike, their network's rate, and where in a spread of 0 to 1 they come."""
    spread = bool(policy.stagger_s or policy.save_stagger_s)
    cohorts = min(cluster.nodes, COHORTS) if spread else 1
    edges = [cluster.nodes * number // cohorts for number in range(cohorts + 1)]
    slow = round(cluster.slow_links * cluster.nodes)
    rate = cluster.node_rate or cluster.store_rate
    rows = []
    for low, high in pairwise(edges):
        slows = slow * high // cluster.nodes - slow * low // cluster.nodes
        at = (low + high - 1) / 2 / cluster.nodes
        rows += [(high - low - slows, rate, at), (slows, rate * cluster.slow_link, at)]
    count, link, at_ = np.array([row for row in rows if row[0]], float).T
    return count, link, at_


def _until(amounts: Floats, rates: Floats) -> Iterator[float]:
    """Seconds until each amount is used up at its rate."""
    for amount, rate in zip(amounts.tolist(), rates.tolist(), strict=True):
        if rate and amount:
            yield amount / rate


def _snap(values: Floats, to: float, scale: float) -> None:
    values[np.abs(values - to) <= _TINY * scale] = to
