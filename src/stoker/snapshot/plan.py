"""Which tensors there are, in which boxes, and which of them this rank writes.

The boxes come from the planners of torch.distributed.checkpoint, which know every kind of sharded tensor.
What several ranks hold alike is written once: `share` deals it out over those that hold it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from stoker.errors import UsageError
from stoker.saved.layout import Box, Path, Piece, path_name, pieces_text, place
from stoker.snapshot.state import DTensor, Flat, Objects, bare, plain_name

# A tensor that many ranks hold is cut into slabs of rows of this size, so that none writes it all.
SLAB_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """A piece of the file, the tensors of the state that it is, and where it begins in what this rank
    holds of them."""

    piece: Piece
    path: Path
    row: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What this rank writes, in the order of its file."""

    signature: tuple[Any, ...]
    writes: tuple[Write, ...]
    pieces: tuple[Piece, ...]  # of the writes, and of tensors that share their memory
    bytes: int
    hasty_bytes: int  # the first so many bytes may change before the optimizer's next step
    pieces_text: str = ""  # the pieces as they stand in the part's description
    shared: Mapping[Path, Sequence[Path]] = field(default_factory=dict)  # a tensor → those it is saved for

    def fits(self, flat: Flat) -> bool:
        """Whether a state is still as planned; tensors that shared their memory may have parted since."""
        return signature(flat) == self.signature and all(
            _memory(flat.tensors[first], first) == _memory(flat.tensors[other], other)
            for first, others in self.shared.items()
            for other in others
        )

    def tensors(self, flat: Flat) -> list[torch.Tensor]:
        """What to copy for each write: this rank's part of the live tensors."""
        return [_cut(local(flat.tensors[write.path]), write) for write in self.writes]


def signature(flat: Flat) -> tuple[Any, ...]:
    """What a plan depends on."""
    return tuple(
        (path, tensor.shape, tensor.dtype, getattr(tensor, "placements", None))
        for path, tensor in flat.tensors.items()
    )


def held_boxes(flat: Flat) -> tuple[list[Box], dict[Path, list[Path]]]:
    """The boxes this rank holds, and the tensors that share the memory of another: saved once."""
    firsts: dict[Any, Path] = {}
    shared: dict[Path, list[Path]] = {}
    alone: dict[str, torch.Tensor] = {}
    paths = {path_name(path): path for path in flat.tensors}
    for path, tensor in flat.tensors.items():
        first = firsts.setdefault(_memory(tensor, path), path)
        if first == path:
            alone[path_name(path)] = tensor
        else:
            shared.setdefault(first, []).append(path)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(alone, is_coordinator=True)
    items = planner.create_local_plan().items
    boxes = [box_of(paths[item.index.fqn], item) for item in items]
    return [box for box in boxes if box.bytes or not box.shape or 0 in box.shape], shared


def share(held: Sequence[Sequence[Box]]) -> list[list[Box]]:
    """Deal boxes out, so that each is written by one of the ranks that hold it, and all write about as much.

    Pure: every rank that computes it from the same lists gets the same answer."""
    holders: dict[Box, list[int]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            holders.setdefault(box, []).append(rank)
    load = [0] * len(held)
    dealt: list[list[Box]] = [[] for _ in held]
    units = [
        (slab, ranks)
        for box, ranks in holders.items()
        for slab in (_slabs(box, len(ranks)) if len(ranks) > 1 else [box])
    ]
    # what only one can write first, then the largest first: the small ones even out what is left
    for box, ranks in sorted(units, key=lambda unit: (len(unit[1]) > 1, -unit[0].bytes)):
        rank = min(ranks, key=lambda one: load[one])
        load[rank] += box.bytes
        dealt[rank].append(box)
    order = {(box.path, box.offsets): at for at, (box, _) in enumerate(units)}
    return [sorted(boxes, key=lambda box: order[box.path, box.offsets]) for boxes in dealt]


def make_plan(
    flat: Flat, mine: Iterable[Box], shared: Mapping[Path, Sequence[Path]], steady: set[Path]
) -> Plan:
    """Lay this rank's boxes out: what may change soon comes first, so that it is copied first."""
    boxes = sorted(mine, key=lambda box: box.path in steady)
    pieces, size = place(boxes)
    writes, everything, hasty = [], list(pieces), 0
    for piece in pieces:
        path = piece.box.path
        writes.append(Write(piece=piece, path=path, row=_row(flat.tensors[path], piece.box)))
        everything += [replace(piece, box=replace(piece.box, path=other)) for other in shared.get(path, ())]
        if path not in steady:
            hasty = piece.at + piece.box.bytes
    return Plan(
        signature=signature(flat),
        writes=tuple(writes),
        pieces=tuple(everything),
        bytes=size,
        hasty_bytes=hasty,
        pieces_text=pieces_text(everything),
        shared=shared,
    )


def steady_paths(objects: Objects, flat: Flat) -> set[Path]:
    """Tensors that only an optimizer's step changes: parameters and the optimizers' own state. Buffers are
    not among them: a batch norm changes its own in the next forward."""
    steady: set[Path] = set()
    for name, thing in objects.items():
        if isinstance(thing, torch.nn.Module):
            steady.update((name, plain_name(key)) for key, _ in bare(thing).named_parameters())
        elif isinstance(thing, torch.optim.Optimizer):
            steady.update(path for path in flat.tensors if path[0] == name)
    return steady


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, and no more to be done to it: torch puts off conjugating."""
    here = tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
    return here.resolve_conj().resolve_neg() if here.is_conj() or here.is_neg() else here


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def box_of(path: Path, item: Any) -> Box:
    """The box that a write item of torch.distributed.checkpoint means."""
    data = item.tensor_data
    if data is None or data.properties.layout != torch.strided:
        raise UsageError(f"{path_name(path)} is not a dense tensor", hint="save its parts as dense tensors")
    return Box(
        path=path,
        dtype=dtype_name(data.properties.dtype),
        shape=tuple(data.size),
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(data.chunk.sizes),
    )


def _memory(tensor: torch.Tensor, path: Path) -> Any:
    """Equal for tensors over the same memory; the path itself for those that cannot be compared."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, DTensor) or not tensor.numel():
        return path
    here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not here.numel():
        return path
    put_off = here.is_conj(), here.is_neg()
    return here.device, here.data_ptr(), tensor.shape, here.shape, here.stride(), here.dtype, put_off


def _slabs(box: Box, ranks: int) -> list[Box]:
    """A box cut into slabs of rows, at most one for each rank."""
    count = min(ranks, -(-box.bytes // SLAB_BYTES), box.sizes[0] if box.sizes else 1)
    if count <= 1:
        return [box]
    bounds = [box.sizes[0] * at // count for at in range(count + 1)]
    return [
        replace(
            box,
            offsets=(box.offsets[0] + start, *box.offsets[1:]),
            sizes=(stop - start, *box.sizes[1:]),
        )
        for start, stop in pairwise(bounds)
    ]


def _row(tensor: torch.Tensor, box: Box) -> int:
    """The first row of a box in what this rank holds of its tensor."""
    if not box.sizes or isinstance(tensor, DTensor):
        return 0
    return box.offsets[0]


def _cut(tensor: torch.Tensor, write: Write) -> torch.Tensor:
    sizes = write.piece.box.sizes
    if not sizes or tensor.shape[0] == sizes[0]:
        return tensor
    return tensor.narrow(0, write.row, sizes[0])
