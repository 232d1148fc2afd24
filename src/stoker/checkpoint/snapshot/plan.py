"""Save plan, deduplicated: which tensors there are, in which boxes, and which of them this rank writes.

The boxes come from the planners of torch.distributed.checkpoint, which know every kind of sharded tensor;
`claims.deal` says, from those of all ranks, who writes what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from stoker.checkpoint.saved.layout import Box, Path, Piece, path_name, pieces_text, place
from stoker.checkpoint.snapshot.claims import Claim, Deal, slab
from stoker.checkpoint.snapshot.digest import digests
from stoker.checkpoint.snapshot.state import DTensor, Flat, Objects, is_hooked, named_parameters, plain_name
from stoker.errors import UsageError

_LOOSE_BYTES = 64 << 10  # of a generator's state and the like


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """A piece of the file, the tensor of the state that it is of, and its first row in what this rank holds
    of that."""

    piece: Piece
    path: Path
    row: int = 0


class Move(NamedTuple):
    """Bytes of what a write is of, from `skip` on, to the stretch of the file that starts at `at`."""

    write: int
    at: int
    bytes: int
    skip: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What this rank writes, in the order of its file."""

    signature: Mapping[Path, Any]  # of the tensors it was made for
    writes: tuple[Write, ...]
    pieces: tuple[Piece, ...]  # of the writes, and of tensors that share their memory
    bytes: int
    hasty_bytes: int  # the first so many bytes may change before the optimizer's next step
    pieces_text: str = ""  # the pieces as they stand in the part's description
    shared: Mapping[Path, Sequence[Path]] = field(default_factory=dict)  # a tensor → those in its memory
    loose: tuple[Path, ...] = ()  # held alike by others when it was made, and likely to change
    alike: tuple[Path, ...] = ()  # the same by all ranks, and likely to stay so
    apart: tuple[str, ...] = ()  # parameters and their state that ranks do not hold alike
    generation: int = field(default=-1, compare=False)
    checked: bool = False  # the ranks have compared what they hold alike
    compared: Mapping[Path, int] = field(
        default_factory=dict, compare=False
    )  # what is one only by its values
    _groups: dict[int, tuple[list[list[Move]], set[int]]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @cached_property
    def hasty(self) -> int:
        """So many of the first writes are of those bytes."""
        return sum(write.piece.at < self.hasty_bytes for write in self.writes)

    def fits(self, flat: Flat) -> bool:
        """Whether a state is still as planned; tensors that shared their memory may have parted since."""
        tensors, planned = flat.tensors, len(self.signature)
        if self.generation == flat.generation >= 0:  # then only what is flattened anew can be another
            fresh = flat.fresh
            tensors = {path: one for path, one in tensors.items() if path[0] in fresh} if fresh else {}
            planned = sum(path[0] in fresh for path in self.signature) if fresh else 0
        if len(tensors) != planned:
            return False
        return all(self.signature.get(path) == signature(one) for path, one in tensors.items()) and all(
            _memory(flat.tensors[first], first) == _memory(flat.tensors[other], other)
            for first, others in self.shared.items()
            for other in others
        )

    def tensors(self, flat: Flat) -> list[torch.Tensor]:
        """What to copy for each write: this rank's part of the live tensors."""
        return [self.tensor(flat, write) for write in self.writes]

    def tensor(self, flat: Flat, write: Write) -> torch.Tensor:
        return _cut(local(flat.tensors[write.path]), write)

    def groups(self, cut: int) -> tuple[list[list[Move]], set[int]]:
        """Neighbouring moves that are made at once: none crosses a multiple of `cut`, or holds both what is
        copied at once and what is copied behind. And the writes that take several moves. Kept: with many
        tensors it takes longer than all else."""
        if cut not in self._groups:
            moves = list(_moves(self.writes, cut))
            found = [
                list(some) for _, some in groupby(moves, lambda m: (m.at >= self.hasty_bytes, m.at // cut))
            ]
            self._groups[cut] = found, {move.write for move in moves if move.skip}
        return self._groups[cut]


def signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a plan depends on."""
    placed = (tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else None
    return tensor.shape, tensor.dtype, placed


def claims_of(flat: Flat, objects: Objects, *, ranks: int = 1, check: bool = False) -> list[Claim]:
    """What this rank holds. With `check`, with a digest of each box that another rank may hold too."""
    firsts: dict[Any, int] = {}
    found: list[Claim] = []
    free = _buffers(objects, flat)
    for box in boxes_of(flat):
        tensor = flat.tensors[box.path]
        alias = firsts.setdefault(_memory(tensor, box.path), len(found))
        found.append(
            Claim(
                box=box,
                mesh=_mesh(tensor),
                alias=alias if alias < len(found) else -1,
                free=box.path in free,
            )
        )
    if not check or ranks == 1:
        return found
    asked = [at for at, claim in enumerate(found) if _may_be_shared(flat.tensors[claim.box.path], ranks)]
    taken = digests(local(flat.tensors[found[at].box.path]) for at in asked)
    for at, digest in zip(asked, taken, strict=True):
        found[at] = replace(found[at], digest=digest)
    return found


def boxes_of(flat: Flat) -> list[Box]:
    """The boxes of its tensors that this rank holds."""
    for path, tensor in flat.tensors.items():
        _check_sums(path, tensor)
    paths = {path_name(path): path for path in flat.tensors}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(
        {path_name(path): tensor for path, tensor in flat.tensors.items()}, is_coordinator=True
    )
    items = planner.create_local_plan().items
    boxes = [box_of(paths[item.index.fqn], item) for item in items]
    for box in boxes:
        _check_box(box, flat.tensors[box.path])
    return [box for box in boxes if box.bytes or not box.shape or 0 in box.shape]


def _check_sums(path: Path, tensor: torch.Tensor) -> None:
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        raise UsageError(
            f"{path_name(path)} is a DTensor of partial sums ({tensor.placements}): no rank holds its values",
            hint="call `.redistribute(placements=[Replicate(), ...])` on it before saving",
        )


def _check_box(box: Box, tensor: torch.Tensor) -> None:
    """What a DTensor's placements say must be what it has."""
    if isinstance(tensor, DTensor) and tuple(tensor.to_local().shape) != box.sizes:
        raise UsageError(
            f"{box.name} has {tuple(tensor.to_local().shape)} here, its placements {tensor.placements} say "
            f"{box.sizes}",
            hint="make it with distribute_tensor, or give DTensor.from_local the whole shape and stride",
        )


def _mesh(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.device_mesh.mesh.flatten().tolist()) if isinstance(tensor, DTensor) else ()


def _may_be_shared(tensor: torch.Tensor, ranks: int) -> bool:
    """All but a DTensor that is cut over every rank of the job."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.size() != ranks:
        return True
    sizes = tensor.device_mesh.shape
    return any(not one.is_shard() and size > 1 for one, size in zip(tensor.placements, sizes, strict=True))


def make_plan(
    flat: Flat,
    claims: Sequence[Claim],
    deals: Sequence[Deal],
    steady: set[Path],
    *,
    checked: bool,
    loose: Sequence[Path] = (),
    alike: Sequence[Path] = (),
    apart: Sequence[str] = (),
    compared: Mapping[Path, int] | None = None,
) -> Plan:
    """Lay this rank's boxes out: what may change soon comes first, so that it is copied first."""
    mine = [(slab(claims[one.claim], one), one) for one in deals if one.rows]
    mine.sort(key=lambda pair: claims[pair[1].claim].box.path in steady)
    pieces, size = place([box for box, _ in mine])
    aliases: dict[int, list[Path]] = {}
    for one in deals:
        if not one.rows:
            aliases.setdefault(claims[one.claim].alias, []).append(one.path)
    writes, everything, hasty_bytes = [], list(pieces), 0
    for piece, (_, one) in zip(pieces, mine, strict=True):
        path = claims[one.claim].box.path
        writes.append(Write(piece=piece, path=path, row=one.row))
        others = aliases.get(one.claim, ())
        everything += [replace(piece, box=replace(piece.box, path=other)) for other in others]
        if path not in steady:
            hasty_bytes = piece.at + piece.box.bytes
    return Plan(
        signature={path: signature(one) for path, one in flat.tensors.items()},
        generation=flat.generation,
        writes=tuple(writes),
        pieces=tuple(everything),
        bytes=size,
        hasty_bytes=hasty_bytes,
        pieces_text=pieces_text(everything),
        shared=_shared(claims),
        loose=tuple(loose),
        alike=tuple(alike),
        apart=tuple(apart),
        checked=checked,
        compared=compared or {},
    )


def _shared(claims: Sequence[Claim]) -> dict[Path, list[Path]]:
    shared: dict[Path, list[Path]] = {}
    for claim in claims:
        if claim.alias >= 0:
            shared.setdefault(claims[claim.alias].box.path, []).append(claim.box.path)
    return shared


def steady_paths(objects: Objects, flat: Flat) -> set[Path]:
    """Tensors that only the step of an optimizer changes which waits for us: its parameters and its own
    state. Not among them: buffers (a batch norm changes its own in the next forward), and parameters of
    which nobody says who steps them."""
    steady: set[Path] = set()
    stepped: set[int] = set()
    for name, thing in objects.items():
        if isinstance(thing, torch.optim.Optimizer) and is_hooked(thing):
            stepped.update(id(one) for group in thing.param_groups for one in group["params"])
            steady.update(path for path in flat.tensors if path[0] == name)
    for name, thing in objects.items():
        if isinstance(thing, torch.nn.Module):
            mine = named_parameters(thing)
            steady.update((name, plain_name(key)) for key, one in mine if id(one) in stepped)
    return steady


def loose_paths(objects: Objects, flat: Flat) -> set[Path]:
    """Small tensors of a process's own making, as a generator's state: alike at one save, they may differ at
    the next."""
    kinds = (torch.nn.Module, torch.optim.Optimizer)
    return {
        path
        for path, tensor in flat.tensors.items()
        if not isinstance(objects.get(path[0]), kinds)
        and tensor.device.type == "cpu"
        and not isinstance(tensor, DTensor)
        and tensor.nbytes <= _LOOSE_BYTES
    }


def _buffers(objects: Objects, flat: Flat) -> set[Path]:
    modules = {name: one for name, one in objects.items() if isinstance(one, torch.nn.Module)}
    own = {(name, plain_name(key)) for name, one in modules.items() for key, _ in named_parameters(one)}
    return {path for path in flat.tensors if path[0] in modules and path not in own}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, and no more to be done to it: torch puts off conjugating."""
    here = tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
    return here.resolve_conj().resolve_neg() if is_put_off(here) else here


def is_put_off(tensor: torch.Tensor) -> bool:
    """Whether its values are still to be conjugated or negated: then `local` is a copy, of one moment."""
    return bool(tensor.is_conj() or tensor.is_neg())


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


def _moves(writes: Sequence[Write], cut: int) -> Iterator[Move]:
    for number, write in enumerate(writes):
        at, skip, size = write.piece.at, 0, write.piece.box.bytes
        while skip < size:
            step = min(size - skip, cut - (at + skip) % cut)
            yield Move(number, at + skip, step, skip)
            skip += step


def _cut(tensor: torch.Tensor, write: Write) -> torch.Tensor:
    sizes = write.piece.box.sizes
    if not sizes or tensor.shape[0] == sizes[0]:
        return tensor
    return tensor.narrow(0, write.row, sizes[0])
