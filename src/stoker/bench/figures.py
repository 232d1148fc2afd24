"""Benchmark results: figures with their unit, what limits them and what the machine could give.

One record for every surface: the table, the JSON, the page, the history, `stoker plan --measured`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from stoker.errors import UsageError
from stoker.formats.sizes import say_size, three_digits

UNITS = ("B/s", "s", "1/s", "share", "B", "count")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One number. `name` is what it is compared by over time: it holds the settings, not the outcome."""

    name: str
    value: float
    unit: str
    better: str = "more"  # or "less"
    limit: str = ""  # what keeps it from being better
    beside: Mapping[str, float] = field(default_factory=dict)  # what was seen with it: latencies, CPU

    def __post_init__(self) -> None:
        if self.unit not in UNITS or self.better not in ("more", "less"):
            raise UsageError(f"{self.name}: {self.unit!r}, {self.better!r}", hint=f"units are {UNITS}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What one command measured."""

    verb: str  # path, loader, …
    of: str  # what was measured: a folder, a dataset, ranks
    figures: Sequence[Figure]
    advice: Sequence[str] = ()
    passed: bool = True  # where there is something to pass
    measured: Mapping[str, float] = field(default_factory=dict)  # values of a job, for `stoker plan`
    notes: Sequence[str] = ()  # what was not measured, and why

    def as_plain(self) -> dict[str, Any]:
        plain = {"bench": self.verb, "of": self.of, "passed": self.passed}
        figures = [asdict(one) for one in self.figures]
        return {
            **plain,
            "figures": figures,
            "advice": list(self.advice),
            "notes": list(self.notes),
            "measured": dict(self.measured),
        }


def say(value: float, unit: str) -> str:
    """A value as a person reads it."""
    if unit == "B/s":
        return f"{say_size(value)}/s"
    if unit == "B":
        return say_size(value)
    if unit == "s":
        return say_seconds(value)
    if unit == "share":
        return f"{value:.1%}"
    return f"{three_digits(value)}{'/s' if unit == '1/s' else ''}"


def say_seconds(value: float) -> str:
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= factor:
            return f"{three_digits(value / factor)} {unit}"
    return f"{three_digits(value * 1e9)} ns"


def as_lines(bench: Bench) -> list[str]:
    """The table of a terminal: name, value, what was seen beside it, what limits it."""
    rows = [(one.name, say(one.value, one.unit), beside(one), one.limit) for one in bench.figures]
    widths = [max((len(row[at]) for row in rows), default=0) for at in range(3)]
    lines = [f"{bench.verb} · {bench.of}", ""]
    for name, value, seen, limit in rows:
        lines.append(f"  {name:{widths[0]}}  {value:>{widths[1]}}  {seen:{widths[2]}}  {limit}".rstrip())
    for title, said in (("what to set", bench.advice), ("not measured", bench.notes)):
        if said:
            lines += ["", title, *(f"  - {line}" for line in said)]
    return lines


_ENDINGS = {"_bytes_s": "B/s", "_share": "share", "_s": "s", "_bytes": "B"}


def beside(figure: Figure) -> str:
    """`p50_s` is a time, `read_bytes_s` a rate, `cpu_share` a share; others are plain numbers."""
    return ", ".join(_said(name, value) for name, value in figure.beside.items())


def _said(name: str, value: float) -> str:
    for ending, unit in _ENDINGS.items():
        if name.endswith(ending):
            return f"{name.removesuffix(ending).replace('_', ' ')} {say(value, unit)}"
    return f"{name.replace('_', ' ')} {three_digits(value)}"
