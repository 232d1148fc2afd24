"""Per-rank names, of what ranks do not hold alike: `model@0-3.head.weight` is what ranks 0 to 3 hold as
`model.head.weight`. The mark stands at the object's name, so that a path keeps its other steps. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from stoker.checkpoint.saved.layout import Path

MARK = "@"
_STRETCH = r"\d+(?:-\d+(?::\d+)?)?"
_MARKED = re.compile(rf"^(.*){MARK}({_STRETCH}(?:,{_STRETCH})*)$")


def marked(path: Path, ranks: Iterable[int]) -> Path:
    """The path under which these ranks' version of a tensor is saved."""
    return (f"{path[0]}{MARK}{_word(sorted(ranks))}", *path[1:])


def unmarked(path: Path) -> tuple[Path, tuple[int, ...]]:
    """The path as the ranks call it, and whose version it is: nobody's for a tensor that all hold alike."""
    found = _MARKED.match(str(path[0]))
    if found is None:
        return path, ()
    return (found[1], *path[1:]), tuple(rank for part in found[2].split(",") for rank in _ranks(part))


def _word(ranks: list[int]) -> str:
    """`0-3,7` or, of every second, `0-6:2`: short also for thousands of ranks."""
    return ",".join(_stretches(ranks))


def _stretches(ranks: list[int]) -> Iterator[str]:
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        end = at
        while end + 1 < len(ranks) and ranks[end + 1] - ranks[end] == step:
            end += 1
        if end == at or (end == at + 1 and step > 1):
            yield str(ranks[at])
            at += 1
            continue
        yield f"{ranks[at]}-{ranks[end]}" + (f":{step}" if step > 1 else "")
        at = end + 1


def _ranks(part: str) -> range:
    bounds, _, step = part.partition(":")
    first, _, last = bounds.partition("-")
    return range(int(first), int(last or first) + 1, int(step or 1))
