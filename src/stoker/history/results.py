"""Benchmark results as entries: files of `benchmarks/results`."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from stoker.errors import UnreadableError
from stoker.history.figures import HIGHER, LOWER, NEITHER, Entry, Figure, Origin
from stoker.history.record import entry_id

_NOT_MEASURED = {"machine", "versions", "notes", "question", "rounds", "runs", "all", "platform", "cores"}
# A unit and which way is better, by how a name ends; the first that fits.
_UNITS = (
    (r"(mtok|tok|tokens|samples|steps)_(per_)?s$", r"\1/s", HIGHER),
    (r"(gb|mb|gib|mib|bytes)_(per_)?s$", r"\1/s", HIGHER),
    (r"(tflops|flops|mfu|speedup)$", r"\1", HIGHER),
    (r"(?:^|[_ ])(s|ms|us)$", r"\1", LOWER),
    (r"seconds$", "s", LOWER),
    (r"(?:^|_)(rss_mb|pss_mb|memory)$", r"\1", LOWER),
    (r"(percent|wait_share|idle)$", r"\1", LOWER),
    (r"(ratio|share)$", "ratio", HIGHER),
)


def read_results(path: Path) -> list[Entry]:
    """Every run of a file; what is no number is left out."""
    try:
        runs = json.loads(path.read_text("utf-8"))["runs"]
        return [_entry(path, run) for run in runs]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableError(
            f"{path} is no file of benchmark results: {type(error).__name__}: {error}",
            hint='it holds {"runs": [{"at", "commit", "machine", "report"}, …]}',
        ) from error


def _entry(path: Path, run: Mapping[str, Any]) -> Entry:
    commit = str(run.get("commit", ""))
    report = run["report"]
    return Entry(
        id=entry_id("results", path.stem, run["at"], run["machine"]),
        kind="benchmark",
        title=path.stem,
        at=datetime.fromisoformat(run["at"]).timestamp(),
        told=time.time(),
        origin=Origin(
            machine=str(run["machine"]),
            commit=commit.removesuffix("-dirty"),
            dirty=commit.endswith("-dirty"),
            versions={name: str(value) for name, value in _versions(report).items()},
        ),
        figures=tuple(_figures(report, ())),
        run=str(path),
    )


def _versions(report: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("machine", "versions"):
        part = report.get(name)
        found |= {k: v for k, v in part.items() if isinstance(v, str)} if isinstance(part, dict) else {}
    return found


def _figures(value: object, path: tuple[str, ...]) -> Iterator[Figure]:
    """Numbers by their path; {"median", "all"} is one number with the range of its rounds."""
    if isinstance(value, dict):
        if isinstance(value.get("median"), (int, float)) and isinstance(value.get("all"), list):
            rounds = [float(one) for one in value["all"] if _is_number(one)]
            yield from _figure(path, value["median"], rounds)
            return
        for name, part in value.items():
            if name not in _NOT_MEASURED:
                yield from _figures(part, (*path, str(name)))
    elif _is_number(value):
        yield from _figure(path, value, [])


def _figure(path: tuple[str, ...], value: Any, rounds: list[float]) -> Iterator[Figure]:
    if path and math.isfinite(value):
        unit, better = unit_of(path)
        yield Figure(
            name="/".join(path),
            value=float(value),
            unit=unit,
            better=better,
            low=min(rounds, default=None),
            high=max(rounds, default=None),
        )


def unit_of(path: tuple[str, ...]) -> tuple[str, str]:
    """As the last part of a path says it, or one above: `median_mb_per_s/stoker default`."""
    for part in reversed(path):
        for pattern, unit, better in _UNITS:
            if found := re.search(pattern, part):
                return found.expand(unit).replace("_mb", " MB"), better
    return "", NEITHER


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
