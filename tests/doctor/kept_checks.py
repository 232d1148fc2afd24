"""What checks see on recorded machines, word by word, and where that turns over: kept, and compared.

    PYTHONPATH=tests python tests/doctor/kept_checks.py

writes `kept/` anew, after a check was changed on purpose: its difference is what to look at then.
`turns.json` holds, for one fact of a machine at a time, two neighbouring values between which a check sees
something else, and what: so each limit is kept with the side that it belongs to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from gate_machines import JOBS
from machines import LARGE, NAMES, machine
from remedies import AROUND

from kept_values import keep
from stoker.doctor.check import Result
from stoker.doctor.examine import as_lines, examine
from stoker.doctor.need import Need
from stoker.machine.plain import as_plain, from_plain
from stoker.machine.snapshot import Snapshot

KEPT = Path(__file__).parent / "kept"
NEEDS = {"nothing": Need(), "much": LARGE, **JOBS}
SCENES = [f"{name} for {need}" for name in NAMES for need in ("nothing", "much", "16 nodes")]
SCENES += [f"{name} for much in {around}" for name in NAMES for around in AROUND]
_MANY = sorted(
    {0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 50, 64, 90, 100, 128, 200, 300, 512, 700, 1000}
    | {2000, 4096, 9000, 20_000, 65_536, 10**6}
    | {1 << power for power in range(22, 46, 2)}
)
_SHARES = (0.0, 0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0, 2.0, 8.0, 1e8, 1e10)
_PLACE = re.compile(r"\[\d+\]")


def scene(name: str) -> list[Result]:
    """A recorded machine, before a job, in a pod or container."""
    known, _, rest = name.partition(" for ")
    need, _, around = rest.partition(" in ")
    snapshot = machine(known)
    if around:
        kernel = snapshot.surroundings.kernel
        snapshot = replace(snapshot, surroundings=replace(AROUND[around], kernel=kernel))
    return examine(snapshot, need=NEEDS[need])


def said(name: str) -> dict[str, Any]:
    results = scene(name)
    changes = [[change.do, change.undo] for result in results for change in result.seen.changes]
    return {"lines": [line for line in as_lines(results) if "why:" not in line], "changes": changes}


# --- turns ----------------------------------------------------------------------------------------


@cache
def plain(name: str) -> str:
    return json.dumps(as_plain(machine(name)))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The facts of a machine, by where they stand."""
    if isinstance(value, dict) and "unknown" not in value:
        for name, one in value.items():
            yield from leaves(one, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value and not path.endswith("options"):
        for number, one in enumerate(value[:3]):
            yield from leaves(one, f"{path}[{number}]")
    else:
        yield path, value


def changed(whole: Any, path: str, value: Any) -> Snapshot:
    whole = deepcopy(whole)
    *parts, last = re.findall(r"[^.\[\]]+", path)
    inside = whole
    for part in parts:
        inside = inside[int(part) if isinstance(inside, list) else part]
    inside[int(last) if isinstance(inside, list) else last] = value
    return from_plain(Snapshot, whole)


def told(snapshot: Snapshot, need: Need) -> set[str]:
    """What is seen, without numbers."""
    return {
        re.sub(
            r"[\d.,]+", "#", f"{one.level} {one.check.name}: {one.seen.read} / {' / '.join(one.seen.fix)}"
        )[:160]
        for one in examine(snapshot, need=need)
    }


def across(turn: list[Any]) -> list[list[str]]:
    """What is no longer seen with the second value, and what is seen instead."""
    name, path, low, high, *_ = turn
    known, _, need = name.partition(" for ")
    below, above = (told(changed(json.loads(plain(known)), path, one), NEEDS[need]) for one in (low, high))
    return [sorted(below - above), sorted(above - below)]


def _turns() -> list[list[Any]]:
    found: dict[str, list[Any]] = {}
    tried: dict[str, int] = {}
    for known in NAMES:
        whole = json.loads(plain(known))
        for path, value in leaves(whole):
            kind = _PLACE.sub("[]", path)
            if tried.get(kind, 0) >= 2:
                continue
            tried[kind] = tried.get(kind, 0) + 1
            for need in ("nothing", "much"):
                for low, high in _between(whole, path, value, NEEDS[need]):
                    turn = [f"{known} for {need}", path, low, high]
                    try:
                        seen = across(turn)
                    except ValueError:  # no such fact
                        continue
                    if any(seen):
                        found.setdefault(json.dumps([kind, seen]), [*turn, *seen])
    return list(found.values())


def _between(whole: Any, path: str, value: Any, need: Need) -> Iterator[tuple[Any, Any]]:
    def see(one: Any) -> set[str]:
        try:
            return told(changed(whole, path, one), need)
        except ValueError:  # no such fact
            return {"cannot be"}

    if isinstance(value, bool):
        yield value, not value
    elif isinstance(value, (int, float)) and value is not None:
        some: tuple[float, ...] = tuple(_MANY) if isinstance(value, int) else _SHARES
        seen = [see(one) for one in some]
        for at in range(len(some) - 1):
            low, high = some[at], some[at + 1]
            while seen[at] != seen[at + 1]:
                middle = (low + high) // 2 if isinstance(value, int) else (low + high) / 2
                if middle in (low, high):
                    yield low, high
                    break
                low, high = (middle, high) if see(middle) == seen[at] else (low, middle)
    elif isinstance(value, str):
        yield value, "another"
    for other in (None, {"unknown": "not read"}):
        if value != other:
            yield value, other


def main() -> None:
    keep(KEPT / "checks.json", {name: said(name) for name in SCENES})
    rows = [json.dumps(turn, ensure_ascii=False) for turn in _turns()]
    (KEPT / "turns.json").write_text("[\n" + ",\n".join(rows) + "\n]\n", "utf-8")


if __name__ == "__main__":
    main()
