"""Coverage: do the pieces of a checkpoint make every tensor whole, each element exactly once? Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stoker.checkpoint.saved.apart import unmarked
from stoker.checkpoint.saved.layout import SKIPPED, Box, Part, path_name
from stoker.errors import BadCheckpointError, CheckpointError


def check_parts(parts: Sequence[Part], *, save: str) -> None:
    """Are these the parts of one save, and do they hold every tensor whole?"""
    strangers = [part.rank for rank, part in enumerate(parts) if part.save != save or part.rank != rank]
    if strangers:
        raise BadCheckpointError(f"parts of ranks {strangers} belong to another save", hint=SKIPPED)
    first: dict[str, Box] = {}
    more: dict[str, list[Box]] = {}  # most tensors are of one piece: no list for each of those
    for box in (piece.box for part in parts for piece in part.pieces):
        name = box.name
        if first.setdefault(name, box) is not box:
            more.setdefault(name, [first[name]]).append(box)
    pieces = (more.get(name) or [box] for name, box in first.items())
    faults = [fault for some in pieces if (fault := cover_fault(some))]
    if faults:
        raise BadCheckpointError(
            f"{faults[0]} ({len(faults)} such tensors)",
            hint="every rank must give the same objects to step()",
        )


def check_names(parts: Sequence[Part]) -> None:
    """No name may be a tensor's on one rank and a value's, or the beginning of other names, on another: a
    restore would hand one rank what the other saved. Of one rank alone that is seen when it is flattened."""
    if len(parts) == 1:
        return
    tensors = {unmarked(piece.box.path)[0] for part in parts for piece in part.pieces}
    values = {path for part in parts for path, _ in part.values}
    beginnings = {path[:end] for path in tensors | values for end in range(1, len(path))}
    clash = next(iter(sorted(map(path_name, tensors & (values | beginnings)))), "")
    if clash:
        raise CheckpointError(
            f"{clash} is a tensor on one rank, and something else on another",
            hint="give ranks that hold something else another name for it",
        )


def cover_fault(boxes: Sequence[Box]) -> str:
    """Why these boxes do not make one tensor, every element exactly once; nothing if they do."""
    first = boxes[0]
    for box in boxes:
        if (box.shape, box.dtype) != (first.shape, first.dtype):
            said = f"{first.dtype} {list(first.shape)} and {box.dtype} {list(box.shape)}"
            return f"{box.name} is both {said}"
        if any(o < 0 or o + n > s for o, n, s in zip(box.offsets, box.sizes, box.shape, strict=True)):
            return f"a piece of {box.name} lies outside of it"
    if len(boxes) > 1 and _overlap(boxes):
        return f"two pieces of {first.name} overlap"
    held, whole = sum(math.prod(box.sizes) for box in boxes), math.prod(first.shape)
    return "" if held == whole else f"no rank saved all of {first.name}: {held:,} of {whole:,} elements"


def _overlap(boxes: Sequence[Box]) -> bool:
    """Swept along the first axis: only boxes whose rows meet are compared."""
    near: list[Box] = []
    for box in sorted((box for box in boxes if 0 not in box.sizes), key=lambda box: box.offsets):
        if not box.sizes:
            return len(boxes) > 1
        near = [one for one in near if one.offsets[0] + one.sizes[0] > box.offsets[0]]
        if any(_meet(one, box) for one in near):
            return True
        near.append(box)
    return False


def _meet(one: Box, other: Box) -> bool:
    starts = map(max, one.offsets, other.offsets)
    stops = (
        min(a + m, b + n)
        for a, m, b, n in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
    return all(start < stop for start, stop in zip(starts, stops, strict=True))
