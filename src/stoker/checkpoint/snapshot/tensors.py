"""Resharding on load: what a checkpoint holds, by name, and how its tensors get where they belong.

Pieces are cut to this job's sharding by the load planner of torch.distributed.checkpoint.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from stoker.checkpoint.saved.apart import unmarked
from stoker.checkpoint.saved.layout import Box, Path, Piece, item_bytes, path_name
from stoker.checkpoint.saved.reader import Checkpoint, Stretch
from stoker.checkpoint.saved.values import decode
from stoker.checkpoint.snapshot.aliases import shared
from stoker.checkpoint.snapshot.plan import boxes_of, local
from stoker.checkpoint.snapshot.state import DTensor, Flat, Objects, nest
from stoker.errors import UsageError


class Match(Protocol):
    """Takes note of what ranks saved apart."""

    apart: list[str]


NameOf = Callable[[str], str | None]  # what a name of the checkpoint is called here; None: it is left out


class Saved:
    """What a checkpoint holds, by name, as one rank of a job of some size sees it: where ranks saved a tensor
    apart it sees its own, if there are as many ranks now."""

    def __init__(
        self, checkpoint: Checkpoint, *, rank: int, size: int = 0, rename: NameOf | None = None
    ) -> None:
        self.checkpoint = checkpoint
        self.pieces: dict[str, list[tuple[int, Piece]]] = {}
        self._raw = [dict(part.values) for part in checkpoint.parts]
        self._take_own(rank, is_same_size=size in (0, len(checkpoint.parts)))
        if rename is not None:
            self._rename(rename)
        self.values = _merged(self._raw, rank)
        mine = [part for part in checkpoint.parts if part.rank == rank]
        self.own = {path: decode(value) for part in mine for path, value in part.own}

    def _take_own(self, rank: int, *, is_same_size: bool) -> None:
        pieces: dict[Path, list[tuple[int, Piece]]] = {}
        versions: dict[Path, list[Path]] = {}
        for owner, piece in self.checkpoint.pieces():
            pieces.setdefault(piece.box.path, []).append((owner, piece))
        for path in [*pieces]:
            plain, ranks = unmarked(path)
            if ranks:
                versions.setdefault(plain, []).append(path)
                if rank in ranks and is_same_size:
                    pieces[plain] = _called(pieces.pop(path), plain)
        self.pieces = {path_name(path): some for path, some in pieces.items()}
        # what this rank has no version of → those that there are
        self.apart = {
            plain: ", ".join(map(path_name, some)) for plain, some in versions.items() if plain not in pieces
        }

    def _rename(self, rename: NameOf) -> None:
        keys = self._renamed_keys(rename)
        pieces = {}
        for name in self.pieces:
            path = _moved(self.box(name).path, rename, keys)
            if path is not None:
                pieces[path_name(path)] = _called(self.pieces[name], path)
        self.pieces = pieces
        self.apart = {
            to: said for path, said in self.apart.items() if (to := _moved(path, rename, keys)) is not None
        }
        self._raw = [
            {
                to: _moved_keys(to, value, keys)
                for path, value in values.items()
                if (to := _moved(path, rename, keys)) is not None
            }
            for values in self._raw
        ]

    def _renamed_keys(self, rename: NameOf) -> dict[str, str | None]:
        """What parameters are called in an optimizer's state, with their module's name or without → what they
        are to be called."""
        found: dict[str, str | None] = {}
        for path in (self.box(name).path for name in self.pieces):
            if len(path) == 2 and (new := rename(path_name(path))) != path_name(path):
                found[path_name(path)] = new
                found.setdefault(str(path[1]), new and new.partition(".")[2])
        return found

    def optimizer_values(self, name: str) -> dict[Path, Any]:
        """Those of an optimizer. Ranks may hold other parameters of one model each, and in a job of another
        size others than they did: what a rank did not save itself it finds with the others."""
        found = self.values_under(name)
        others = [values for at, values in enumerate(self._raw) if not at or values != self._raw[0]]
        for values in others:
            for path, value in values.items():
                if path[0] != name:
                    continue
                if path[1:2] + path[3:] == ("param_groups", "params"):
                    known = set(found.setdefault(path, []))
                    found[path] += [key for key in decode(value) if key not in known]
                elif path not in found:
                    found[path] = decode(value)
        return found

    def note_apart(self, path: Path, said: Match) -> bool:
        """Whether ranks saved this apart, and none of the versions is this rank's: that is noted."""
        if path in self.apart:
            said.apart.append(
                f"{path_name(path)} was not the same on all ranks when it was saved, and there were "
                f"{len(self.checkpoint.parts)} of them: the checkpoint has {self.apart[path]}"
            )
        return path in self.apart

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


def _called(pieces: Sequence[tuple[int, Piece]], path: Path) -> list[tuple[int, Piece]]:
    return [(owner, replace(piece, box=replace(piece.box, path=path))) for owner, piece in pieces]


def _moved(path: Path, rename: NameOf, keys: Mapping[str, str | None]) -> Path | None:
    """A path under its new name; None if that is left out."""
    if path[1:2] == ("state",) and len(path) > 2 and path[2] in keys:
        key = keys[path[2]]
        return None if key is None else (*path[:2], key, *path[3:])
    name = path_name(path)
    new = rename(name)
    if new is None or new == name:
        return None if new is None else path
    if len(path) <= 2:
        return tuple(new.split(".", 1))
    for at in range(1, len(path)):  # a step may have dots in it: as many as can be stay as they are
        head = new.removesuffix(f".{path_name(path[at:])}")
        if head != new:
            return (*head.split("."), *path[at:])
    return tuple(new.split("."))


def _moved_keys(path: Path, value: Any, keys: Mapping[str, str | None]) -> Any:
    if not keys or path[1:2] + path[3:] != ("param_groups", "params"):
        return value
    return [new for key in value if (new := keys.get(key, key) if isinstance(key, str) else key) is not None]


def _merged(values: Sequence[dict[Path, Any]], rank: int) -> dict[Path, Any]:
    """Where ranks saved different values for an object, this rank wants its own back; if it had none, as who
    gives an empty dictionary, those of the first that had some."""
    found: dict[Any, dict[Path, Any]] = {}
    empty: dict[Any, dict[Path, Any]] = {}
    for _, one in sorted(enumerate(values), key=lambda ranked: ranked[0] != rank):
        by_object: dict[Any, dict[Path, Any]] = {}
        for path, value in one.items():
            by_object.setdefault(path[0], {})[path] = value
        none = {name: some for name, some in by_object.items() if _is_nothing(name, some)}
        empty = {**none, **empty}
        found = {**{name: some for name, some in by_object.items() if name not in none}, **found}
    return {path: value for one in {**empty, **found}.values() for path, value in one.items()}


def _is_nothing(name: Any, values: dict[Path, Any]) -> bool:
    """Whether an object was saved as an empty dictionary."""
    if len(values) > 1 or (name,) not in values:
        return False
    value = decode(values[(name,)])
    return isinstance(value, dict) and not value


def new_tensor(box: Box, *, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.empty(box.shape, dtype=torch_dtype(box.dtype), device=device)


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


# --- reading ------------------------------------------------------------------------------------------


def read_tensors(saved: Saved, targets: Mapping[Path, torch.Tensor]) -> None:
    """Read every target from the checkpoint, into its own memory."""
    by_name = {path_name(path): tensor for path, tensor in targets.items()}
    sharing = shared(by_name, same=lambda one, other: _saved_as_one(saved, one, other))
    _read(saved, sharing.targets)
    sharing.settle()


def _saved_as_one(saved: Saved, one: str, other: str) -> bool:
    places = (
        [(rank, p.at, p.box.offsets, p.box.sizes) for rank, p in saved.pieces[name]] for name in (one, other)
    )
    first, second = places
    return first == second


def _read(saved: Saved, by_name: dict[str, torch.Tensor]) -> None:
    whole = {name: one for name, one in by_name.items() if _is_whole(saved, name, one)}
    grown = {name: one for name, one in by_name.items() if tuple(one.shape) != saved.box(name).shape}
    rest = {name: one for name, one in by_name.items() if name not in whole and name not in grown}
    reading = Reading(saved.checkpoint)
    for name, tensor in whole.items():
        rank, piece = saved.pieces[name][0]
        reading.want(rank, piece, offsets=(0,) * tensor.dim(), target=tensor.detach())
    corners = (one for name, tensor in grown.items() for one in _corner(saved, name, tensor))
    for rank, piece, offsets, target in (*_planned(saved, rest), *corners):
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
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(targets), tensor_metadata(saved, targets), is_coordinator=False)
    for item in planner.create_local_plan().items:
        rank, piece = find_piece(saved, item.storage_index)
        yield rank, piece, tuple(item.storage_offsets), planner.resolve_tensor(item).detach()


def _corner(
    saved: Saved, name: str, tensor: torch.Tensor
) -> Iterator[tuple[int, Piece, tuple[int, ...], torch.Tensor]]:
    """What a tensor that is larger than it was gets: its part of the saved one, from the first element on."""
    for box in boxes_of(Flat(tensors={(name,): tensor})):
        here = local(tensor)
        for rank, piece in saved.pieces[name]:
            starts = tuple(map(max, box.offsets, piece.box.offsets))
            ends = zip(box.offsets, box.sizes, piece.box.offsets, piece.box.sizes, strict=True)
            stops = tuple(min(a + m, b + n) for a, m, b, n in ends)
            if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
                continue
            cut = zip(starts, stops, box.offsets, strict=True)
            target = here[tuple(slice(start - offset, stop - offset) for start, stop, offset in cut)]
            yield rank, piece, tuple(a - b for a, b in zip(starts, piece.box.offsets, strict=True)), target


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
