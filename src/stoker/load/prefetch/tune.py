"""Autotuning of prefetch depth and reading threads: how many groups to keep ready, how many read. Pure.

Ready groups and readers grow while the consumer waits, and shrink when they only cost memory. Readers are
doubled while reads are waited for and cores are idle: what they wait for is the storage's answer, so there
may be many more of them than cores. More of either is a trial (hill climbing): what brings neither groups
sooner nor waits down is taken back and left alone for a while. Reads from memory are waited for too, and
with 64 readers came 0.8 times as fast as with two. What one lucky look let grow a later trial of fewer
takes back. What files on their way needed goes when all of them lie here. Every change is recorded with its
reason, and so is a limit that keeps readers from growing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

_WINDOW = 16  # groups between two looks, at least
_LOOK_S = 0.2  # and seconds: in less, one turn of the scheduler looks like a slow loader
_WAITING = 0.02  # of the wall time: below this a wait is noise
_CALM = 8  # looks without a wait before something is given back
_HELPED = 0.75  # of the wait before: what more should bring it down to
_FASTER = 1.15  # times the pace before: what twice the readers should bring at the least
_AS_FAST = 0.97  # of the pace before: what fewer readers may cost
_BARRED = 64  # looks until what did not help is tried again
_LONG_S = 0.5  # a look is due, however few groups were made: storage may be slow
_BUSY = 0.8  # of the cores: more readers would only take turns
_READING = 0.3  # of the time, spent waiting for chunks: readers are what is short


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is tuned now."""

    depth: int
    readers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The most that may be used: groups and chunks on their way that fit the byte budget. `why` says what
    keeps readers from being more. Readers of files that are `fetched` also say what is needed soon, and a
    cache with too little room fetches less the more it knows: they are not taken back before all files lie
    here."""

    depth: int
    readers: int
    cores: int = 1
    why: str = ""
    fetched: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Seconds since the last look: all of them, those the consumer waited for a group, those the
    assembling thread waited for chunks, and those it waited because enough groups were ready."""

    wall_s: float
    consumer_s: float
    reading_s: float
    full_s: float
    cpu_s: float = 0.0  # of all threads of the process
    groups: int = 0
    is_coming: bool = True  # of files that are fetched: whether some are still to come

    @property
    def pace(self) -> float:
        """Groups a second."""
        return self.groups / max(self.wall_s, 1e-9)

    @property
    def is_reading(self) -> bool:
        """Whether reads are what is waited for."""
        return self.waited > _WAITING and self.reading_s > _READING * self.wall_s

    @property
    def waited(self) -> float:
        """The consumer's waits as a share."""
        return self.consumer_s / max(self.wall_s, 1e-9)

    def since(self, earlier: Seen) -> Seen:
        return Seen(
            wall_s=self.wall_s - earlier.wall_s,
            consumer_s=self.consumer_s - earlier.consumer_s,
            reading_s=self.reading_s - earlier.reading_s,
            full_s=self.full_s - earlier.full_s,
            cpu_s=self.cpu_s - earlier.cpu_s,
            groups=self.groups - earlier.groups,
            is_coming=self.is_coming,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A setting, since which group it holds, and why."""

    group: int
    setting: Setting
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What was before something else is tried: the setting, and what was seen with it."""

    before: Setting
    seen: Seen


def next_setting(
    now: Setting, seen: Seen, *, limits: Limits, calm: int, trial: Trial | None = None
) -> tuple[Setting, str]:
    """The setting from here on, and why; the reason is empty when nothing changes."""
    is_kept = limits.fetched and trial is not None and trial.before.readers != now.readers
    if trial and not is_kept and (failure := _failure(now, seen, trial)):
        return trial.before, failure
    if seen.waited > _WAITING:
        return _grow(now, seen, limits, f"the consumer waited {seen.waited:.0%} of the time")
    if calm >= _CALM and now.depth > 2:
        return replace(now, depth=now.depth - 1), "no wait for a while: less memory will do"
    if calm >= _CALM and now.readers > 1 and seen.reading_s < 0.05 * seen.wall_s:
        return replace(now, readers=now.readers - 1), "reading is far ahead: fewer readers will do"
    return now, ""


def _failure(now: Setting, seen: Seen, trial: Trial) -> str:
    """Why what was tried is taken back; empty if it stays."""
    before = trial.before
    if now.readers < before.readers:
        is_slower = seen.pace < _AS_FAST * trial.seen.pace
        return "fewer readers bring less" if is_slower else ""
    if seen.waited <= max(_WAITING, trial.seen.waited * _HELPED):
        return ""
    if now.depth > before.depth:
        return "one more ready group did not help: less memory will do"
    is_faster = seen.pace >= _FASTER * trial.seen.pace
    return "" if is_faster else "more readers did not help: fewer will do"


def _grow(now: Setting, seen: Seen, limits: Limits, why: str) -> tuple[Setting, str]:
    if seen.is_reading and now.readers < limits.readers and not _is_busy(now, seen, limits):
        return replace(now, readers=min(limits.readers, 2 * now.readers)), f"{why}, mostly for reads"
    # depth evens out a loader that is now ahead, now late; one that is late on the whole it does not help
    if seen.full_s > seen.consumer_s and now.depth < limits.depth:
        return replace(now, depth=now.depth + 1), why
    return now, ""


def _is_busy(now: Setting, seen: Seen, limits: Limits) -> bool:
    """Whether more readers than cores would only wait for a core."""
    return now.readers >= limits.cores and seen.cpu_s > _BUSY * limits.cores * seen.wall_s


def limit_reached(now: Setting, seen: Seen, limits: Limits) -> str:
    """What keeps a loader that waits for reads from reading more at once; empty if nothing does."""
    if not seen.is_reading:
        return ""
    if _is_busy(now, seen, limits):
        return f"cores: reading and verifying keep {limits.cores} busy"
    return f"readers: {limits.why}" if now.readers >= limits.readers else ""


class Tuner:
    """Looks at the waits every few groups and remembers what it chose. Used by one thread."""

    def __init__(self, start: Setting, limits: Limits) -> None:
        self._start, self._limits, self._calm, self._groups = start, limits, 0, 0
        self._trial: Trial | None = None
        self._deeper_in = self._more_in = 0  # looks until a ready group more, or more readers, may be tried
        self._fewer_in = -1  # looks until fewer readers are; below zero: they have never been made more
        self._last = Seen(wall_s=0.0, consumer_s=0.0, reading_s=0.0, full_s=0.0)
        self.setting, self.limit, self.waited_s = start, "", 0.0
        self.choices: list[Choice] = [Choice(group=0, setting=start, reason="to begin with")]

    def is_due(self, wall_s: float) -> bool:
        """Whether there is a look after the next group: the CPU's clock need not be read after others."""
        groups, seconds = self._groups + 1 - self._last.groups, wall_s - self._last.wall_s
        return seconds >= _LOOK_S and (groups >= _WINDOW or seconds >= _LONG_S)

    @property
    def awaits_files(self) -> bool:
        """Whether it wants to know if some are still to come."""
        return self._limits.fetched

    def after_group(self, total: Seen) -> bool:
        """Count a group, with the seconds since the beginning; True when the setting changed."""
        is_due = self.is_due(total.wall_s)
        self._groups += 1
        total = replace(total, groups=self._groups)
        seen, self.waited_s = total.since(self._last), total.consumer_s
        if self._limits.fetched and not seen.is_coming:
            self._last = total
            return self._begin_anew()
        if not is_due:
            return False
        self._last = total
        now, limits = self.setting, self._limits_now()
        setting, reason = next_setting(now, seen, limits=limits, calm=self._calm, trial=self._trial)
        is_fewer = not reason and self._is_due_for_fewer(seen)
        if is_fewer:
            setting, reason = replace(now, readers=now.readers // 2), "fewer readers may bring as much"
        self.limit = limit_reached(now, seen, limits)
        self._calm = 0 if seen.waited > _WAITING or reason else self._calm + 1
        self._settle(now, setting)
        is_more = setting.depth > now.depth or setting.readers > now.readers
        is_back = self._trial is not None and setting == self._trial.before
        self._trial = Trial(before=now, seen=seen) if is_fewer or (is_more and not is_back) else None
        if reason:
            self._choose(setting, reason)
        return bool(reason)

    def _begin_anew(self) -> bool:
        """All files lie here: what readers were needed for is over. 64 of them, and their chunks, took a warm
        epoch a quarter more CPU than two."""
        before, self._limits = self.setting, replace(self._limits, fetched=False)
        self._trial, self._calm, self._deeper_in, self._more_in, self._fewer_in = None, 0, 0, 0, -1
        if before != self._start:
            self._choose(self._start, "all files lie here by now")
        return self.setting != before

    def _limits_now(self) -> Limits:
        """The limits, and no more of what did not help lately."""
        limits = self._limits
        if self._deeper_in:
            limits = replace(limits, depth=self.setting.depth)
        if self._more_in and self.setting.readers < limits.readers:
            limits = replace(limits, readers=self.setting.readers, why="more at once did not bring more")
        return limits

    def _is_due_for_fewer(self, seen: Seen) -> bool:
        is_free = self._trial is None and not self._limits.fetched
        return self._fewer_in == 0 and is_free and seen.is_reading and self.setting.readers > 1

    def _settle(self, now: Setting, setting: Setting) -> None:
        """A look has gone by; if something was on trial, say when it may be tried again."""
        self._deeper_in, self._more_in = max(0, self._deeper_in - 1), max(0, self._more_in - 1)
        self._fewer_in = max(min(0, self._fewer_in), self._fewer_in - 1)
        if (trial := self._trial) is None:
            return
        has_failed, went_up = setting == trial.before, now.readers > trial.before.readers
        if now.readers == trial.before.readers:
            self._deeper_in = _BARRED if has_failed else 0
        elif went_up:
            self._more_in, self._fewer_in = _BARRED if has_failed else 0, _BARRED // 2
        else:
            self._more_in, self._fewer_in = self._more_in if has_failed else _BARRED, _BARRED

    def _choose(self, setting: Setting, reason: str) -> None:
        self.setting = setting
        # the record is for people: the first choices and the latest say enough
        self.choices = [*self.choices[:50], *self.choices[50:][-50:]]
        self.choices.append(Choice(group=self._groups, setting=setting, reason=reason))

    def history(self) -> Sequence[Choice]:
        return tuple(self.choices)
