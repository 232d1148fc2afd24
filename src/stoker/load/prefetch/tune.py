"""Autotuning of prefetch depth and reading threads: how many groups to keep ready, how many read. Pure.

Ready groups and readers grow while the consumer waits, and shrink when they only cost memory. Readers are
doubled while reads are waited for and cores are idle: what they wait for is the storage's answer, so there
may be many more of them than cores. (Whether the latest doubling helped cannot be told from the next second
or two: chunks come in bursts.) One ready group more is a trial: if the waits stay, it is taken back. Every
change is recorded with its reason, and so is a limit that keeps readers from growing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

_WINDOW = 16  # groups between two looks, at least
_LOOK_S = 0.2  # and seconds: in less, one turn of the scheduler looks like a slow loader
_WAITING = 0.02  # of the wall time: below this a wait is noise
_CALM = 8  # looks without a wait before something is given back
_HELPED = 0.75  # of the wait before: what a ready group more should bring it down to
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
    keeps readers from being more."""

    depth: int
    readers: int
    cores: int = 1
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Seconds since the last look: all of them, those the consumer waited for a group, those the
    assembling thread waited for chunks, and those it waited because enough groups were ready."""

    wall_s: float
    consumer_s: float
    reading_s: float
    full_s: float
    cpu_s: float = 0.0  # of all threads of the process

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
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A setting, since which group it holds, and why."""

    group: int
    setting: Setting
    reason: str


def next_setting(
    now: Setting, seen: Seen, *, limits: Limits, calm: int, trial: float | None = None
) -> tuple[Setting, str]:
    """The setting from here on, and why; the reason is empty when nothing changes. `trial` is the share of
    waiting before a ready group more was tried."""
    if trial is not None and seen.waited > max(_WAITING, trial * _HELPED):
        return replace(now, depth=now.depth - 1), "one more ready group did not help: less memory will do"
    if seen.waited > _WAITING:
        return _grow(now, seen, limits, f"the consumer waited {seen.waited:.0%} of the time")
    if calm >= _CALM and now.depth > 2:
        return replace(now, depth=now.depth - 1), "no wait for a while: less memory will do"
    if calm >= _CALM and now.readers > 1 and seen.reading_s < 0.05 * seen.wall_s:
        return replace(now, readers=now.readers - 1), "reading is far ahead: fewer readers will do"
    return now, ""


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
        self._limits, self._calm, self._groups, self._looked = limits, 0, 0, 0
        self._trial: float | None = None  # the share of waiting before a ready group more is tried
        self._barred = 0  # looks until that may be tried again
        self._last = Seen(wall_s=0.0, consumer_s=0.0, reading_s=0.0, full_s=0.0)
        self.setting, self.limit, self.waited_s = start, "", 0.0
        self.choices: list[Choice] = [Choice(group=0, setting=start, reason="to begin with")]

    def after_group(self, total: Seen) -> bool:
        """Count a group, with the seconds since the beginning; True when the setting changed."""
        self._groups += 1
        seen, self.waited_s = total.since(self._last), total.consumer_s
        few = self._groups - self._looked < _WINDOW and seen.wall_s < _LONG_S
        if few or seen.wall_s < _LOOK_S:
            return False
        self._last, self._looked = total, self._groups
        limits = replace(self._limits, depth=self.setting.depth) if self._barred else self._limits
        setting, reason = next_setting(self.setting, seen, limits=limits, calm=self._calm, trial=self._trial)
        self.limit = limit_reached(self.setting, seen, limits)
        self._calm = 0 if seen.waited > _WAITING or reason else self._calm + 1
        failed = self._trial is not None and setting.depth < self.setting.depth
        self._barred = _BARRED if failed else max(0, self._barred - 1)
        self._trial = seen.waited if setting.depth > self.setting.depth else None
        if reason:
            self._choose(setting, reason)
        return bool(reason)

    def _choose(self, setting: Setting, reason: str) -> None:
        self.setting = setting
        # the record is for people: the first choices and the latest say enough
        self.choices = [*self.choices[:50], *self.choices[50:][-50:]]
        self.choices.append(Choice(group=self._groups, setting=setting, reason=reason))

    def history(self) -> Sequence[Choice]:
        return tuple(self.choices)
