"""A checkpoint for those who have torch and no stoker: as a DCP folder, or as a torch.save file.

Tensors are brought back and written one at a time; a torch.save file, which torch writes from whole
tensors, is filled through a scratch file that is mapped, so that memory is bounded there too.
"""

from __future__ import annotations

import io
import mmap
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from stoker.checkpoint.saved.export import Tensors, named
from stoker.checkpoint.saved.layout import Box, path_name
from stoker.checkpoint.saved.layout import Path as Steps
from stoker.checkpoint.saved.reader import Checkpoint
from stoker.checkpoint.saved.values import decode
from stoker.checkpoint.snapshot.state import nest
from stoker.checkpoint.snapshot.tensors import new_tensor, torch_dtype
from stoker.errors import UsageError
from stoker.storage import new_file

_LARGE = 1 << 20  # what is smaller stays in memory: a process may map some 65,000 places only


def export_dcp(checkpoint: Checkpoint, out: Path, *, prefix: str = "") -> list[Path]:
    """Write what begins with a prefix as torch.distributed.checkpoint does; plain `dcp.load` reads it."""
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty", hint="give a new folder")
    planner = _OneByOne(Tensors(checkpoint), _values(checkpoint), prefix)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
        save(planner.places(), storage_writer=FileSystemWriter(out), planner=planner, no_dist=True)
    return sorted(path for path in out.iterdir() if path.is_file())


class _OneByOne(DefaultSavePlanner):
    """Says what there is, and brings each thing when the writer asks for it."""

    def __init__(self, tensors: Tensors, values: Mapping[Steps, Any], prefix: str) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)
        self._tensors = tensors
        # all names, also of tensors that share memory: a reader asks for each
        known = tensors.all_names()
        self._names = {name.removeprefix(prefix): name for name in named(known, prefix, known=known)}
        kept = {path: value for path, value in values.items() if path_name(path).startswith(prefix)}
        self._plain = {path_name(path).removeprefix(prefix): value for path, value in kept.items()}
        paths = [*(tensors.box(name).path for name in self._names.values()), *kept]
        self._paths = {path_name(path).removeprefix(prefix): _dcp_path(path, prefix) for path in paths}

    def places(self) -> dict[str, Any]:
        return dict.fromkeys((*self._names, *self._plain))

    def create_local_plan(self) -> SavePlan:
        tensors = [self._tensor_item(short, self._tensors.box(name)) for short, name in self._names.items()]
        plain = [WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO) for name in self._plain]
        self.plan = SavePlan([*tensors, *plain], planner_data=self._paths)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            data = io.BytesIO()
            torch.save(decode(self._plain[name]), data)
            return data
        return _tensor(self._tensors, self._names[name])

    @staticmethod
    def _tensor_item(name: str, box: Box) -> WriteItem:
        origin, shape = torch.Size([0] * len(box.shape)), torch.Size(box.shape)
        properties = TensorProperties(dtype=torch_dtype(box.dtype))
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=origin, sizes=shape), properties=properties, size=shape
        )
        return WriteItem(index=MetadataIndex(name, origin), type=WriteItemType.TENSOR, tensor_data=data)


def _dcp_path(path: Steps, prefix: str) -> tuple[Any, ...]:
    """The path as DCP writes it: keys as text, places in lists as numbers."""
    steps = [str(step[1]) if isinstance(step, tuple) else step for step in path]
    while prefix and steps and prefix.startswith(f"{steps[0]}."):
        prefix = prefix.removeprefix(f"{steps.pop(0)}.")
    if prefix and steps:
        steps[0] = str(steps[0]).removeprefix(prefix)
    return tuple(steps)


# --- torch.save ---------------------------------------------------------------------------------------


def export_torch(checkpoint: Checkpoint, out: Path, *, prefix: str = "model.") -> list[Path]:
    """Write what begins with a prefix as one torch.save file: with a prefix a state_dict, without one nested
    dictionaries as they were given to save."""
    tensors = Tensors(checkpoint)
    names = named(tensors.all_names(), prefix, known=tensors.all_names())
    path = out if out.suffix else out / "model.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {steps: one for steps, one in _values(checkpoint).items() if path_name(steps).startswith(prefix)}
    with tempfile.TemporaryFile(dir=path.parent) as scratch, new_file(path) as file:
        state = dict(_filled(tensors, names, scratch.fileno()))
        state.update((steps, decode(value)) for steps, value in values.items())
        torch.save(
            {path_name(steps).removeprefix(prefix): one for steps, one in state.items()}
            if prefix
            else nest(iter(state.items())),
            file,
        )
    return [path]


def _filled(tensors: Tensors, names: list[str], scratch: int) -> Iterator[tuple[Steps, torch.Tensor]]:
    """The tensors, each in its place of a mapped file; those that shared memory share it again."""
    places: dict[Any, torch.Tensor] = {}
    for name in names:
        box, place = tensors.box(name), tensors.place(name) or name
        if place not in places:
            size, data = tensors.bytes(name), _tensor(tensors, name)
            places[place] = _mapped(box, size, scratch).copy_(data) if size >= _LARGE else data
        yield box.path, places[place]


def _mapped(box: Box, size: int, scratch: int) -> torch.Tensor:
    """A tensor over the end of a file; its storage is its own, since torch saves whole ones."""
    at = -(-os.fstat(scratch).st_size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
    os.ftruncate(scratch, at + size)
    room = mmap.mmap(scratch, size, offset=at)
    return torch.frombuffer(room, dtype=torch_dtype(box.dtype)).reshape(box.shape)


def _tensor(tensors: Tensors, name: str) -> torch.Tensor:
    box = tensors.box(name)
    if not tensors.bytes(name):
        return new_tensor(box)
    data = torch.from_numpy(tensors.read(name).reshape(-1))
    return data.view(torch_dtype(box.dtype)).reshape(box.shape)


def _values(checkpoint: Checkpoint) -> dict[Steps, Any]:
    """Plain values as the first rank has them, and what only others have."""
    found: dict[Steps, Any] = {}
    for part in checkpoint.parts:
        found = {**dict(part.values), **found}
    return found
