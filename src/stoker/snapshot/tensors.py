"""What a checkpoint holds, by name, and how its tensors get where they belong.

Pieces are cut to this job's sharding by the load planner of torch.distributed.checkpoint.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from stoker.errors import UsageError
from stoker.saved.layout import Box, Path, Piece, item_bytes, path_name
from stoker.saved.reader import Checkpoint, Stretch
from stoker.saved.values import decode
from stoker.snapshot.state import DTensor, Objects, nest


class Saved:
    """What a checkpoint holds, by name, as one rank of some job sees it."""

    def __init__(self, checkpoint: Checkpoint, *, rank: int) -> None:
        self.checkpoint = checkpoint
        self.pieces: dict[str, list[tuple[int, Piece]]] = {}
        for owner, piece in checkpoint.pieces():
            self.pieces.setdefault(piece.box.name, []).append((owner, piece))
        self.values = _merged([dict(part.values) for part in checkpoint.parts], rank)
        mine = [part for part in checkpoint.parts if part.rank == rank]
        self.own = {path: decode(value) for part in mine for path, value in part.own}

    def box(self, name: str) -> Box:
        return self.pieces[name][0][1].box

    def tensor_paths(self, first: str) -> list[Path]:
        boxes = (self.box(name) for name in self.pieces)
        return [box.path for box in boxes if box.path[0] == first]

    def values_under(self, first: str) -> dict[Path, Any]:
        return {path: decode(value) for path, value in self.values.items() if path[0] == first}

    def extras(self, taken: Objects) -> dict[str, Any]:
        """The plain values that nobody asked for by name."""
        tensors = {self.box(name).path[0] for name in self.pieces}
        rest = {path[0] for path in self.values} - set(taken) - tensors
        found: dict[str, Any] = nest(
            (path, decode(value)) for path, value in self.values.items() if path[0] in rest
        )
        return found


def _merged(values: Sequence[dict[Path, Any]], rank: int) -> dict[Path, Any]:
    """Where ranks saved different values for an object, this rank wants its own back."""
    found: dict[Any, dict[Path, Any]] = {}
    for _, one in sorted(enumerate(values), key=lambda ranked: ranked[0] != rank):
        by_object: dict[Any, dict[Path, Any]] = {}
        for path, value in one.items():
            by_object.setdefault(path[0], {})[path] = value
        found = {**by_object, **found}
    return {path: value for one in found.values() for path, value in one.items()}


def new_tensor(box: Box, *, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.empty(box.shape, dtype=torch_dtype(box.dtype), device=device)


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


# --- reading ------------------------------------------------------------------------------------------


def read_tensors(saved: Saved, targets: Mapping[Path, torch.Tensor]) -> None:
    """Read every target from the checkpoint, into its own memory."""
    by_name = {path_name(path): tensor for path, tensor in targets.items()}
    whole = {name: one for name, one in by_name.items() if _is_whole(saved, name, one)}
    rest = {name: one for name, one in by_name.items() if name not in whole}
    reading = Reading(saved.checkpoint)
    for name, tensor in whole.items():
        rank, piece = saved.pieces[name][0]
        reading.want(rank, piece, offsets=(0,) * tensor.dim(), target=tensor.detach())
    for rank, piece, offsets, target in _planned(saved, rest):
        reading.want(rank, piece, offsets=offsets, target=target)
    reading.run()


def _is_whole(saved: Saved, name: str, tensor: torch.Tensor) -> bool:
    """A plain tensor that lies in the checkpoint in one piece: no need to plan."""
    pieces = saved.pieces[name]
    return (
        not isinstance(tensor, DTensor)
        and len(pieces) == 1
        and pieces[0][1].box.sizes == pieces[0][1].box.shape == tuple(tensor.shape)
    )


def _planned(
    saved: Saved, targets: dict[str, torch.Tensor]
) -> Iterator[tuple[int, Piece, tuple[int, ...], torch.Tensor]]:
    if not targets:
        return
    for name, tensor in targets.items():
        if tuple(tensor.shape) != saved.box(name).shape:
            raise UsageError(
                f"{name} is {tuple(tensor.shape)} here, in {saved.checkpoint.name} {saved.box(name).shape}",
                hint="build the model with the options it was saved with",
            )
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(targets), tensor_metadata(saved, targets), is_coordinator=False)
    for item in planner.create_local_plan().items:
        rank, piece = find_piece(saved, item.storage_index)
        yield rank, piece, tuple(item.storage_offsets), planner.resolve_tensor(item).detach()


def find_piece(saved: Saved, index: Any) -> tuple[int, Piece]:
    """The piece that an index of torch.distributed.checkpoint means."""
    offsets = tuple(index.offset or ())
    pieces: list[tuple[int, Piece]] = saved.pieces[index.fqn]
    return next(one for one in pieces if one[1].box.offsets == offsets)


def tensor_metadata(saved: Saved, names: Mapping[str, Any] | None = None) -> Metadata:
    """What torch.distributed.checkpoint wants to know of the tensors."""
    described: dict[str, Any] = {
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=torch_dtype(saved.box(name).dtype)),
            size=torch.Size(saved.box(name).shape),
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(p.box.offsets), sizes=torch.Size(p.box.sizes))
                for _, p in saved.pieces[name]
            ],
        )
        for name in (saved.pieces if names is None else names)
    }
    if names is None:
        described.update({path_name(path): BytesStorageMetadata() for path in saved.values})
    return Metadata(state_dict_metadata=described)


class Reading:
    """Collects what is wanted from a checkpoint, then reads it all."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._stretches: list[Stretch] = []
        self._afterwards: list[Callable[[], None]] = []
        self._on_device = False

    def want(self, rank: int, piece: Piece, *, offsets: tuple[int, ...], target: torch.Tensor) -> None:
        """Read the box at `offsets` of a piece that is as large as the target, into the target."""
        box = piece.box
        if target.is_meta:
            raise UsageError(
                f"{box.name} has no memory yet to be restored into: it is on the meta device",
                hint="call `module.to_empty(device=...)` first",
            )
        if not target.numel():
            return
        if not target.data_ptr():
            raise UsageError(
                f"{box.name} is a {type(target).__name__} without memory of its own to be restored into",
                hint="restore into plain tensors, and make what wraps them afterwards",
            )
        rows_only = tuple(target.shape[1:]) == box.sizes[1:]
        plain = target.is_contiguous() and not target.is_conj() and not target.is_neg()
        if rows_only and plain and target.dtype == torch_dtype(box.dtype):
            row_bytes = math.prod(box.sizes[1:]) * item_bytes(box.dtype)
            start = piece.at + (offsets[0] * row_bytes if offsets else 0)
            self._add(rank, start, target)
        else:
            whole = new_tensor(Box(path=box.path, dtype=box.dtype, shape=box.sizes, offsets=(), sizes=()))
            self._add(rank, piece.at, whole)
            self._afterwards.append(lambda: _copy_box(whole, offsets, target))

    def run(self) -> None:
        self._checkpoint.read(self._stretches)
        for copy in self._afterwards:
            copy()
        if self._on_device:
            torch.cuda.synchronize()  # threads copied on streams that the loop's own knows nothing of

    def _add(self, rank: int, start: int, target: torch.Tensor) -> None:
        self._on_device |= target.is_cuda
        receive = _into_device(target) if target.is_cuda else _into_memory(target)
        self._stretches.append(Stretch(rank=rank, start=start, stop=start + target.nbytes, receive=receive))


def _copy_box(whole: torch.Tensor, offsets: tuple[int, ...], target: torch.Tensor) -> None:
    for dim, (offset, size) in enumerate(zip(offsets, target.shape, strict=True)):
        whole = whole.narrow(dim, offset, size)
    target.copy_(whole)


def _into_memory(target: torch.Tensor) -> Callable[[int, memoryview], None]:
    def receive(at: int, data: memoryview) -> None:
        ctypes.memmove(target.data_ptr() + at, ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data))

    return receive


def _into_device(target: torch.Tensor) -> Callable[[int, memoryview], None]:
    room = target.reshape(-1).view(torch.uint8)

    def receive(at: int, data: memoryview) -> None:
        room[at : at + len(data)].copy_(torch.frombuffer(data, dtype=torch.uint8))

    return receive
