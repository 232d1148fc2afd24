"""Figures and the entries that hold them: what was measured, of what, where, with which code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker.errors import UsageError

HIGHER, LOWER, NEITHER = "higher", "lower", ""
_MOST = 1e150  # beyond it the squares of a series are infinite: nobody has measured that
KINDS = ("watch", "bench", "tune", "benchmark")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One number that was measured. `better` is higher, lower, or empty where neither is."""

    name: str
    value: float
    unit: str = ""
    better: str = NEITHER
    low: float | None = None  # of the rounds that the value is the median of, where there were some
    high: float | None = None

    def __post_init__(self) -> None:
        for name in (
            "value",
            "low",
            "high",
        ):  # SQLite gives 3.0 for 3 and 0.0 for -0.0
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, float(given) + 0.0)
        if not self.name or not abs(self.value) < _MOST:  # nor is NaN
            raise UsageError(
                f"the figure {self.name!r} is {self.value}", hint="give a name and a finite number"
            )
        if self.better not in (HIGHER, LOWER, NEITHER):
            raise UsageError(
                f"{self.name}: better={self.better!r}", hint='give "higher", "lower", or "" for neither'
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where and with which code something was measured."""

    machine: str  # its kind: cores, memory, cards; runs of one kind are compared with each other
    host: str = ""
    gpus: tuple[str, ...] = ()
    commit: str = ""
    branch: str = ""
    dirty: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One run of something. The same id again is the same run, told anew: the one told last counts."""

    id: str
    kind: str
    title: str
    at: float  # when it began, in seconds since 1970
    told: float  # when this was written
    origin: Origin
    figures: tuple[Figure, ...]
    command: tuple[str, ...] = ()  # redacted
    run: str = ""  # the run folder, or the file it came from
    facts: Mapping[str, Any] = field(default_factory=dict)  # plain JSON values

    @property
    def case(self) -> str:
        """What is compared with what: runs of one command, of one benchmark."""
        return f"{self.title} ({' '.join(self.command)})" if self.command else self.title

    def figure(self, name: str) -> Figure | None:
        return next((one for one in self.figures if one.name == name), None)
