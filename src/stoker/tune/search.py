"""Search: candidates by stages, each beside the unchanged program; then the best of them proven in pairs.

Choosing the best of several noisy trials flatters it: what is claimed comes from pairs that are run after the
choice, A B B A A B: a machine that drifts steadily favours neither.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stoker.formats.sizes import counted
from stoker.tune.candidates import NUMERICS, Setting, Stage, next_stages
from stoker.tune.gain import DIFFER, ENOUGH, FURTHER, LEAST, UNSEEN, Gain, compare_losses, gain_of
from stoker.tune.seen import Seen
from stoker.tune.trial import Trial

_MOST_PAIRS = 5
_LOST = 1.3  # times the unchanged window: a candidate that takes longer has lost
_NEAR = 1.02  # fewer workers that are this near to the best are better
Run = Callable[[Setting, float], Trial]  # and the seconds after which it has lost; infinite: never


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A candidate: how many times as fast it looked (0: it failed), and what became of it."""

    setting: Setting
    why: str
    times: float
    losses: str
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "setting": dict(self.setting),
            "why": self.why,
            "times": self.times,
            "losses": self.losses,
            "note": self.note,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """`best` is empty where nothing better was found."""

    best: Setting = field(default_factory=dict)
    gain: Gain | None = None
    losses: str = UNSEEN
    tried: tuple[Tried, ...] = ()
    trials: tuple[Trial, ...] = ()
    why: str = ""  # why nothing better was found, or was not looked for further


class Search:
    """Runs trials while there is time for them."""

    def __init__(self, run: Run, seen: Seen, *, until: float, each_s: float, numerics: bool) -> None:
        self._run, self._seen, self._until, self._numerics = run, seen, until, numerics
        self._each_s = each_s  # what a trial takes, before any was run
        self._plain: list[Trial] = []  # the program unchanged
        self._since_plain = 0
        self.trials: list[Trial] = []
        self.tried: list[Tried] = []
        self.stopped = ""

    def search(self, *, plain: Trial) -> Outcome:
        """`plain` is the first window, which was measured before."""
        self._plain.append(plain)
        best: Setting = {}
        times = 1.0
        for stage_of in next_stages(self._seen, numerics=self._numerics):
            stage = stage_of(best)
            if stage is not None and not self.stopped:
                best, times = self._stage(stage, best, times)
        if not best:
            why = self.stopped or ("no setting was faster" if self.tried else "")
            return self._outcome(why=why)
        return self._prove(best)

    def _stage(self, stage: Stage, best: Setting, times: float) -> tuple[Setting, float]:
        """The best of a stage, where it is better than the best before by more than noise."""
        found = [one for setting in stage.settings if (one := self._try(setting, stage.why))]
        least = times * (FURTHER if best else LEAST)
        good = [one for one in found if one.times >= least and self._may_be(one)]
        if not good:
            return best, times
        top = max(one.times for one in good)
        near = [one for one in good if one.times * _NEAR >= top]
        chosen = min(near, key=lambda one: int(one.setting.get("num_workers") or 0))
        return chosen.setting, chosen.times

    def _may_be(self, one: Tried) -> bool:
        """Losses that differ are results that change: that wants the user's word."""
        return one.losses != DIFFER or self._numerics

    def _try(self, setting: Setting, why: str) -> Tried | None:
        # What is found must still be proven. But nothing is found where nothing is tried: beside the first
        # one, by which the time of trials is known, one pair is enough.
        if not self._has_time(candidates=1, pairs=ENOUGH if self.tried else 1):
            self.stopped = self._no_time()
            return None
        if self._since_plain >= 2:
            self._plain_again()
        # Only a candidate may lose: a busy moment must not end the unchanged program, nor the proof.
        trial = self._trial(setting, lost_s=_LOST * self._plain[-1].seconds)
        self._since_plain += 1
        times = self._plain[-1].seconds / trial.seconds if math.isfinite(trial.seconds) else 0.0
        losses = compare_losses([one.losses for one in self._plain], trial.losses)
        one = Tried(setting=setting, why=why, times=times, losses=losses, note=trial.failure)
        self.tried.append(one)
        return one

    def _prove(self, best: Setting) -> Outcome:
        """Pairs until their interval says enough, or the time is over."""
        pairs: list[tuple[float, float]] = []
        losses: list[float] = []
        while len(pairs) < _MOST_PAIRS and (self._has_time(pairs=1) or not pairs):
            plain, tried = self._pair(best, plain_first=len(pairs) % 2 == 0)
            if not (math.isfinite(plain.seconds) and math.isfinite(tried.seconds)):
                failure = plain.failure or tried.failure
                return self._outcome(why=f"in a second trial the best setting failed: {failure}")
            losses = list(tried.losses) or losses
            pairs.append((plain.seconds, tried.seconds))
            if gain_of(pairs).settled:
                break
        gain = gain_of(pairs)
        agree = compare_losses([one.losses for one in self._plain], losses)
        changes = any(best.get(name) for name in NUMERICS)
        if not gain.proven:
            return self._outcome(gain=gain, losses=agree, why=_unproven(gain, best))
        if agree == DIFFER and not (self._numerics or changes):
            return self._outcome(gain=gain, losses=agree, why="the best setting changes the first losses")
        return self._outcome(best=best, gain=gain, losses=agree)

    def _pair(self, best: Setting, *, plain_first: bool) -> tuple[Trial, Trial]:
        if plain_first:
            return self._plain_again(), self._trial(best)
        tried = self._trial(best)
        return self._plain_again(), tried

    def _plain_again(self) -> Trial:
        self._since_plain = 0
        trial = self._trial({})
        if math.isfinite(trial.seconds):
            self._plain.append(trial)
        return trial

    def _trial(self, setting: Setting, *, lost_s: float = math.inf) -> Trial:
        trial = self._run(setting, lost_s)
        self.trials.append(trial)
        return trial

    def _has_time(self, *, candidates: int = 0, pairs: int) -> bool:
        """By the longest of the last ones of each kind: a winner's windows are short, those beside it not."""
        plain_s = self._took_s(plain=True) or self._each_s
        tried_s = self._took_s(plain=False) or plain_s
        return time.monotonic() + candidates * tried_s + pairs * (plain_s + tried_s) <= self._until

    def _no_time(self) -> str:
        """Of a search that tried nothing: how much would be enough."""
        if self.tried:
            return "there was no time for more candidates: give more --minutes"
        missing = time.monotonic() + (1 + 2 * ENOUGH) * self._each_s - self._until
        more = math.ceil(missing / 60) if math.isfinite(missing) else 1
        return (
            f"there was no time for one candidate, a trial takes {self._each_s:.0f} s:"
            f" give {counted(max(more, 1), 'minute')} more (--minutes)"
        )

    def _took_s(self, *, plain: bool) -> float:
        took = [one.took_s for one in self.trials if bool(one.setting) is not plain]
        return max(took[-2:], default=0.0)

    def _outcome(self, **found: Any) -> Outcome:
        return Outcome(tried=tuple(self.tried), trials=tuple(self.trials), **found)


def _unproven(gain: Gain, best: Setting) -> str:
    """Too few pairs are no finding about the setting: whoever reads it must not take it for one."""
    if gain.pairs < ENOUGH and gain.times >= LEAST:
        named = ", ".join(f"{name}={value}" for name, value in best.items())
        fitted = f"{gain.pairs} of {ENOUGH} pairs fitted into the time"
        return f"{named} looked {gain.times:.2f} times as fast, but only {fitted}: give more --minutes"
    return f"the best setting gave {gain}: that proves nothing"
