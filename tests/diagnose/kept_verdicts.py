"""What is read out of runs, what the rules say of them, and where that turns over: kept, and compared.

    python tests/diagnose/kept_verdicts.py

writes `kept/` anew, after a rule or a text was changed on purpose: its difference is what to look at then.
`borders.json` holds, for one number of a run at a time, two neighbouring floats between which something else
is said, and what: so each border is kept with the side that it belongs to.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from any_run import any_run
from degraded import FOLDER, NAMES

from kept_values import keep, plain
from stoker.diagnose.features import Features, features
from stoker.diagnose.rules import Verdict, judge
from stoker.diagnose.thresholds import THRESHOLDS
from stoker.watch.runs.flat import read_flat

KEPT = Path(__file__).parent / "kept"
DRAWN, MORE = 24, 48  # more of them for borders alone
RUNS = (*NAMES, *(f"drawn {seed}" for seed in range(DRAWN)))
_LEAST = 1e-9  # nothing that is measured is less and not nothing
_MANY = sorted(
    {one.value for one in THRESHOLDS.values()}
    | {
        0,
        _LEAST,
        0.01,
        0.15,
        0.4,
        0.45,
        0.6,
        0.75,
        0.8,
        0.9,
        0.95,
        0.99,
        1,
        1.5,
        2,
        3,
        4,
        6,
        8,
        12,
        25,
        40,
        50,
    }
    | {60, 70, 75, 80, 98, 100, 200, 1000, 1e5, 1e7, 1e8, 1e10}
)


@cache
def seen(name: str) -> Features:
    """A recorded run or one that was drawn, boiled down."""
    word, _, seed = name.partition(" ")
    return features(any_run(int(seed)) if word == "drawn" else read_flat(FOLDER / f"{name}.jsonl"))


def said(verdict: Verdict) -> list[Any]:
    return [*(plain(one) for one in verdict.findings), *(plain(one) for one in verdict.abstained)]


# --- borders --------------------------------------------------------------------------------------

_DIGITS = re.compile(r"\d[\d,.]*(e[+-]?\d+)?")


def words(run: Features) -> Counter[str]:
    """What is said, without its numbers."""
    verdict = judge(run)
    told: Counter[str] = Counter()
    for one in verdict.findings:
        texts = (one.summary, *one.evidence, *one.remedy, *one.missing)
        told[f"{one.kind}: {one.cause}, {one.confidence}, {one.at_most}"] += 1
        told.update(_DIGITS.sub("#", text)[:90] for text in texts)
    told.update(_DIGITS.sub("#", f"not {one.kind}: {one.why}")[:90] for one in verdict.abstained)
    return told


def leaves(run: Features) -> Iterator[str]:
    """The numbers of a run's features by name."""
    for part in ("loop", "card", "host", "ranks"):
        whole = getattr(run, part)
        for one in fields(whole) if whole is not None else ():
            value = getattr(whole, one.name)
            if isinstance(value, float):
                yield f"{part}.{one.name}"
            elif one.name == "share":
                yield from (f"{part}.share.{name}" for name in value)
    yield from ("judged_s", *(f"fact.{name}" for name in ("num_workers", "batch_bytes")))
    yield from (f"stacks.{name}" for name in ("looks", "late", "gc_s", "gc_count", "seconds"))
    if run.loop.pauses:
        yield from (
            f"pause.{name}" for name in ("excess_s", "util", "sm", "power", "written", "saving_s", "end")
        )
    if run.stacks.seen:
        yield from ("seen.seconds", "seen.looks")
    if run.ledger:
        yield "ledger.busy"


def changed(run: Features, leaf: str, value: float) -> Features:
    """The same run, with one number another."""
    part, _, name = leaf.partition(".")
    if not name:
        return replace(run, **{leaf: value})
    if part == "fact":
        return replace(run, facts={**run.facts, name: value})
    if part == "pause":
        first, *rest = run.loop.pauses
        return replace(run, loop=replace(run.loop, pauses=(replace(first, **{name: value}), *rest)))
    if part == "seen":
        first, *rest = run.stacks.seen
        return replace(run, stacks=replace(run.stacks, seen=(replace(first, **{name: value}), *rest)))
    whole = getattr(run, part)
    if name.startswith("share."):
        share = {**whole.share, name.removeprefix("share."): value}
        return replace(run, loop=replace(whole, share=share))
    return replace(run, **{part: replace(whole, **{name: value})})


def across(border: list[Any]) -> tuple[Counter[str], Counter[str]]:
    """What is no longer said, and what is said instead, on the upper side of a border."""
    name, leaf, low, high, *_ = border
    below, above = (words(changed(seen(name), leaf, float(value))) for value in (low, high))
    return below - above, above - below


def _borders() -> list[list[Any]]:
    found: dict[str, list[Any]] = {}
    for name in (*RUNS, *(f"drawn {seed}" for seed in range(DRAWN, MORE))):
        for leaf in leaves(seen(name)):
            for low, high in _turns(seen(name), leaf):
                border: list[Any] = [name, leaf, low, high]
                gone, new = across(border)
                key = json.dumps([leaf, f"{low:.6g}", sorted(gone), sorted(new)])
                loosely = json.dumps([leaf, sorted(gone), sorted(new)])
                if key not in found and sum(one.startswith(loosely) for one in found) < 1:
                    found.setdefault(loosely, [*border, sorted(gone), sorted(new)])
    return list(found.values())


def _turns(run: Features, leaf: str) -> Iterator[tuple[float, float]]:
    values = _MANY[1:] if leaf == "judged_s" else _MANY  # a run of no length has no pauses
    told = [_said(run, leaf, value) for value in values]
    for at in range(len(values) - 1):
        low, high = float(values[at]), float(values[at + 1])
        if told[at] == told[at + 1] or high == _LEAST:
            continue
        below = told[at]
        while (middle := (low + high) / 2) not in (low, high):
            low, high = (middle, high) if _said(run, leaf, middle) == below else (low, middle)
        if _said(run, leaf, low) is not None and _said(run, leaf, high) is not None:
            yield low, high


def _said(run: Features, leaf: str, value: float) -> Counter[str] | None:
    """None of a run that cannot be: no recording comes to such numbers."""
    try:
        return words(changed(run, leaf, value))
    except (ArithmeticError, ValueError):
        return None


def main() -> None:
    keep(KEPT / "readings.json", {name: seen(name) for name in RUNS})
    keep(KEPT / "verdicts.json", {name: said(judge(seen(name))) for name in RUNS})
    lines = [json.dumps(one, ensure_ascii=False) for one in _borders()]
    (KEPT / "borders.json").write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")


if __name__ == "__main__":
    main()
