"""A checkpoint back into live objects: every wanted chunk verified, read by threads into place.

Pieces are cut to this job's sharding by the load planner of torch.distributed.checkpoint, so that another
number of ranks gets what it needs. Values are handed to the objects only after every tensor was read.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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

from stoker.checkpoint.layout import Box, Path, Piece, item_bytes, path_name
from stoker.checkpoint.reader import Checkpoint, Stretch
from stoker.checkpoint.state import (
    DTensor,
    Objects,
    bare,
    flatten,
    nest,
    numbered_state,
    optimizer_keys,
    parameter_names,
    plain_name,
)
from stoker.checkpoint.values import decode
from stoker.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What came back. `step` is 0 and `name` empty when there was no checkpoint: a fresh start."""

    step: int = 0
    name: str = ""
    extras: dict[str, Any] = field(default_factory=dict)  # Any: the plain values that were saved
    skipped: tuple[str, ...] = ()  # newer checkpoints that could not be used, and why

    @property
    def fresh(self) -> bool:
        return not self.name


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


def restore_objects(saved: Saved, objects: Objects, *, strict: bool) -> dict[str, Any]:
    """Bring objects back to what they were; gives the state of those that cannot take it themselves."""
    names = parameter_names(objects)
    wanted = [_want(name, thing, saved, names, strict=strict) for name, thing in objects.items()]
    read_tensors(saved, {path: tensor for want in wanted for path, tensor in want.tensors.items()})
    given = {}
    for want in wanted:
        state = nest(iter({**want.tensors, **want.values}.items())).get(want.name, {})
        if want.apply is None:
            given[want.name] = state
        else:
            want.apply(state)
    return given


def load_state(saved: Saved, *, keys: Sequence[str] = ("",)) -> dict[str, Any]:
    """The saved state itself, in new tensors on the CPU; only what begins with one of these keys."""
    tensors = {
        saved.box(name).path: _new_tensor(saved.box(name))
        for name in saved.pieces
        if name.startswith(tuple(keys))
    }
    read_tensors(saved, tensors)
    values = {
        path: decode(value) for path, value in saved.values.items() if path_name(path).startswith(tuple(keys))
    }
    found: dict[str, Any] = nest(iter({**tensors, **values}.items()))
    return found


# --- what an object wants -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Want:
    """Tensors to read into, values to hand over, and what to do with both in the end."""

    name: str
    tensors: dict[Path, torch.Tensor]
    values: dict[Path, Any]
    apply: Callable[[Any], None] | None


def _want(name: str, thing: Any, saved: Saved, names: Mapping[int, str], *, strict: bool) -> _Want:
    if isinstance(thing, torch.nn.Module):
        return _want_module(name, thing, saved, strict=strict)
    if isinstance(thing, torch.optim.Optimizer):
        return _want_optimizer(name, thing, saved, names)
    live = flatten({name: thing}).tensors if hasattr(thing, "state_dict") or isinstance(thing, dict) else {}
    tensors = {path: _target(saved.box(path_name(path)), live.get(path)) for path in saved.tensor_paths(name)}
    values = saved.values_under(name)
    if strict and not tensors and not values:
        raise _missing([name], saved)
    apply: Callable[[Any], None] | None = None
    if hasattr(thing, "load_state_dict"):
        apply = thing.load_state_dict
    elif isinstance(thing, dict):
        apply = thing.update
    return _Want(name=name, tensors=tensors, values=values, apply=apply)


def _want_module(name: str, module: torch.nn.Module, saved: Saved, *, strict: bool) -> _Want:
    inner = bare(module)
    live = {(name, plain_name(key)): value for key, value in inner.state_dict().items()}
    tensors = {path: one for path, one in live.items() if isinstance(one, torch.Tensor)}
    missing = [path for path in tensors if path_name(path) not in saved.pieces]
    unknown = [path for path in saved.tensor_paths(name) if path not in tensors]
    if strict and (missing or unknown):
        raise _missing([path_name(path) for path in missing], saved, unknown=unknown)
    tensors = {path: one for path, one in tensors.items() if path not in missing}
    values = saved.values_under(name)
    original = {plain_name(key): key for key in inner.state_dict()}
    owned = {
        one.data_ptr() for one in (*inner.parameters(), *inner.buffers()) if not isinstance(one, DTensor)
    }
    direct = all(isinstance(one, DTensor) or one.data_ptr() in owned for one in tensors.values())

    def apply(state: Any) -> None:
        if values or not direct:  # else the tensors read into are the module's own
            inner.load_state_dict({original[key]: value for key, value in state.items()}, strict=strict)

    return _Want(name=name, tensors=tensors, values=values, apply=apply)


def _want_optimizer(
    name: str, optimizer: torch.optim.Optimizer, saved: Saved, names: Mapping[int, str]
) -> _Want:
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    keys = optimizer_keys(optimizer, names)
    by_key = {keys[number]: parameter for number, parameter in enumerate(parameters)}
    now = {
        (name, "state", key if isinstance(key, str) else ("k", key), slot): value
        for key, parameter in by_key.items()
        for slot, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }
    tensors: dict[Path, torch.Tensor] = {}
    for path in saved.tensor_paths(name):
        key = path[2][1] if isinstance(path[2], tuple) else path[2]
        if path[1] != "state" or key in by_key:
            like = now.get(path, by_key.get(key))
            tensors[path] = _target(saved.box(path_name(path)), like)
    values = saved.values_under(name)
    if not values:
        raise _missing([name], saved)

    def apply(state: Any) -> None:
        optimizer.load_state_dict(numbered_state(optimizer, state, names))

    return _Want(name=name, tensors=tensors, values=values, apply=apply)


def _target(box: Box, like: torch.Tensor | None) -> torch.Tensor:
    """Where a saved tensor goes: the live one, or a new one that is sharded and placed like `like`."""
    if like is None or tuple(like.shape) != box.shape:
        device = like.device if like is not None and box.shape else torch.device("cpu")
        return _new_tensor(box, device=device)
    if isinstance(like, torch.nn.Parameter):
        return torch.zeros_like(like, dtype=_dtype(box.dtype), requires_grad=False)
    return like


def _new_tensor(box: Box, *, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.empty(box.shape, dtype=_dtype(box.dtype), device=device)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _missing(names: Sequence[str], saved: Saved, *, unknown: Sequence[Path] = ()) -> UsageError:
    parts = []
    if names:
        parts.append(f"lacks {len(names)} of what is to be restored, {names[0]!r} first")
    if unknown:
        parts.append(f"has {len(unknown)} tensors that have no place here, {path_name(unknown[0])!r} first")
    return UsageError(
        f"{saved.checkpoint.name} {' and '.join(parts)}",
        hint="give the objects that were saved, under the same names, or strict=False",
    )


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
            properties=TensorProperties(dtype=_dtype(saved.box(name).dtype)),
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
        if not target.numel():
            return
        rows_only = tuple(target.shape[1:]) == box.sizes[1:]
        if rows_only and target.is_contiguous() and target.dtype == _dtype(box.dtype):
            row_bytes = math.prod(box.sizes[1:]) * item_bytes(box.dtype)
            start = piece.at + (offsets[0] * row_bytes if offsets else 0)
            self._add(rank, start, target)
        else:
            whole = _new_tensor(Box(path=box.path, dtype=box.dtype, shape=box.sizes, offsets=(), sizes=()))
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
