"""Goodput accounting: every second of a job's life in one account, and what each restart cost. Pure.

A restart throws away what was done after the save it resumes from. That save is known by its step where a
Checkpointer told it; else it is the last one seen. Work before it is productive; work after it is repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from stoker.diagnose.timeline import STATES
from stoker.history.goodput.attempts import Attempt, Life, Save, covered_s

ACCOUNTS = (
    "productive",  # steps whose result is kept, evaluation among them
    "startup",  # from a process's beginning to its first step
    "restore",  # of that: loading a checkpoint
    "repeated",  # steps, and the unfinished one, whose result was lost and done again
    "starved",  # waiting for data, in steps that were kept
    "saving",  # held up by a save
    "stalled",  # standing, for no reason that is seen
    "ending",  # after the last step
    "down",  # between one run's end and the next one's beginning: in a queue, or nobody had noticed
    "unseen",  # recorded and overwritten since: the ring of a long run came round
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """What one restart cost, in seconds, and why it is thought to have resumed where it did."""

    run: str
    ended: str  # how the one before ended
    repeated_s: float
    down_s: float
    startup_s: float
    restore_s: float
    resumed: str

    @property
    def cost_s(self) -> float:
        return self.repeated_s + self.down_s + self.startup_s + self.restore_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """A job's wall time, mean over its ranks; the accounts sum to it."""

    wall_s: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(ACCOUNTS, 0.0))
    restarts: tuple[Restart, ...] = ()
    steps: int = 0

    def share(self, name: str) -> float:
        return self.seconds[name] / self.wall_s if self.wall_s > 0 else float("nan")


@dataclass(slots=True)
class _Spell:
    """A life within its attempt, on the clock of the job, and until when its work was kept."""

    life: Life
    attempt: Attempt
    shift: float  # from the run's time to the job's
    kept: float  # in the run's time
    resumed: str = ""


def account(attempts: Sequence[Attempt]) -> Account:
    """The whole job's; attempts are in the order of time."""
    if not attempts:
        return Account()
    began = attempts[0].began
    wall_s = max(one.began + one.wall_s for one in attempts) - began
    ranks = sorted({life.rank for one in attempts for life in one.lives})
    if not ranks:
        nothing = dict.fromkeys(ACCOUNTS, 0.0) | {"startup": sum(one.wall_s for one in attempts)}
        return Account(wall_s=wall_s, seconds=nothing | {"down": max(0.0, wall_s - nothing["startup"])})
    each = [_of_rank(_spells(attempts, rank, began), attempts, wall_s=wall_s, began=began) for rank in ranks]
    seconds = {name: float(np.mean([one.seconds[name] for one in each])) for name in ACCOUNTS}
    return Account(wall_s=wall_s, seconds=seconds, restarts=each[0].restarts, steps=each[0].steps)


def _spells(attempts: Sequence[Attempt], rank: int, began: float) -> list[_Spell]:
    return [
        _Spell(life=life, attempt=one, shift=one.began + one.unseen_s - began, kept=life.end)
        for one in attempts
        for life in sorted(one.lives, key=lambda life: life.start)
        if life.rank == rank
    ]


def _of_rank(
    spells: Sequence[_Spell], attempts: Sequence[Attempt], *, wall_s: float, began: float
) -> Account:
    lost = [0.0, *(_resume(spells, number) for number in range(1, len(spells)))]
    total = dict.fromkeys(ACCOUNTS, 0.0)
    parts = [_parts(spell, is_last=spell is spells[-1]) for spell in spells]
    for part in parts:
        for name, value in part.items():
            total[name] += value
    total["unseen"] = sum(one.unseen_s for one in attempts)
    total["down"] = max(0.0, wall_s - sum(total.values()))
    restarts = [
        Restart(
            run=spell.attempt.run,
            ended=before.attempt.ended if spell.attempt is not before.attempt else "restarted within its run",
            repeated_s=lost[number],
            down_s=max(0.0, spell.life.start + spell.shift - before.life.end - before.shift),
            startup_s=parts[number]["startup"],
            restore_s=parts[number]["restore"],
            resumed=spell.resumed,
        )
        for number, (before, spell) in enumerate(pairwise(spells), start=1)
    ]
    steps = sum(spell.life.steps for spell in spells)
    return Account(wall_s=wall_s, seconds=total, restarts=tuple(restarts), steps=steps)


def _resume(spells: Sequence[_Spell], number: int) -> float:
    """Cut what this life's beginning threw away off the ones before it; gives the seconds of work lost."""
    spell, before = spells[number], spells[:number]
    told = [one for one in spell.life.restores if one.told]
    if told and told[-1].step is None:
        place, spell.resumed = None, "a fresh start: it found no checkpoint"
    elif told:
        place = _saved(before, told[-1].step)
        spell.resumed = f"step {told[-1].step}, as its checkpointer told"
        if place is None:
            spell.resumed += "; that save was not seen here"
            return 0.0
    else:
        place = _saved(before, None)
        spell.resumed = "the last save that was seen, presumably" if place else "no save was seen before it"
    first, at = place if place else (0, before[0].life.start)
    lost = 0.0
    for index in range(first, number):
        until = at if index == first else before[index].life.start
        lost += _work(before[index], until, before[index].kept)
        before[index].kept = min(before[index].kept, until)
    return lost


def _saved(before: Sequence[_Spell], step: int | None) -> tuple[int, float] | None:
    """Which life made the save, and when its loop went on after it; of step None, the last save of all."""
    for index in range(len(before) - 1, -1, -1):
        saves: list[Save] = [one for one in before[index].life.saves if step is None or one.step == step]
        if saves:
            return index, saves[-1].end
    return None


def _parts(spell: _Spell, *, is_last: bool) -> dict[str, float]:
    """One life's seconds by account, without what lies between lives."""
    life = spell.life
    whole, kept = (_states(life, life.start, until) for until in (life.end, spell.kept))
    restore = covered_s([(one.start, one.end) for one in life.restores])
    ending = _states(life, max(life.last_step, life.start), life.end)["unattributed"] if life.steps else 0.0
    ending = ending if spell.kept >= life.end else 0.0
    fixed = {
        "startup": max(0.0, whole["startup"] - restore),
        "restore": min(restore, whole["startup"]),
        "stalled": whole["stalled"],
        "saving": whole["checkpoint"],
        "starved": kept["data"],
        "ending": ending,
    }
    working = {name for name in STATES if name not in ("startup", "stalled", "checkpoint", "data")}
    productive = sum(kept[name] for name in working) - ending
    repeated = life.end - life.start - sum(fixed.values()) - productive
    return {**fixed, "productive": productive, "repeated": max(0.0, repeated)}


def _work(spell: _Spell, since: float, until: float) -> float:
    """Seconds between two moments that a restart threw away."""
    if until <= since:
        return 0.0
    states = _states(spell.life, since, until)
    return sum(value for name, value in states.items() if name not in ("startup", "stalled", "checkpoint"))


def _states(life: Life, since: float, until: float) -> dict[str, float]:
    start, end = np.array([since]), np.array([max(since, until)])
    return {name: float(life.line.within(name, start, end)[0]) for name in STATES}
