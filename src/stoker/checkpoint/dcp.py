"""torch.distributed.checkpoint (DCP): our files behind its StorageWriter, StorageReader and stager.

    dcp.save(state, storage_writer=Writer(ROOT, step=500))
    dcp.async_save(state, storage_writer=Writer(ROOT, step=500), async_stager=Stager())
    dcp.load(state, storage_reader=Reader(ROOT))          # the newest whole one, or name=

For loops that call it already: planners, metadata and collectives stay torch's, the bytes are written,
verified and committed as `Checkpointer` does. Checkpoints of either can be read by the other.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from stoker.checkpoint.saved.commit import Saving, begin, commit, discard, join, make_manifest, put_part
from stoker.checkpoint.saved.layout import (
    CHUNK_BYTES,
    Box,
    Part,
    part_from_json,
    part_name,
    path_name,
    place,
    sequence_of,
)
from stoker.checkpoint.saved.reader import Checkpoint
from stoker.checkpoint.saved.retention import collect
from stoker.checkpoint.saved.tiers import Tiers, local_names
from stoker.checkpoint.saved.values import decode, encode
from stoker.checkpoint.saved.writer import write_part
from stoker.checkpoint.snapshot.arena import Arena
from stoker.checkpoint.snapshot.copy import Snapshot
from stoker.checkpoint.snapshot.plan import Plan, Write, box_of, dtype_name, local
from stoker.checkpoint.snapshot.state import DTensor
from stoker.checkpoint.snapshot.tensors import Reading, Saved, find_piece, tensor_metadata
from stoker.errors import BadCheckpointError
from stoker.storage import open_store


class Writer(StorageWriter):
    """Writes one checkpoint for `dcp.save` or `dcp.async_save`. All ranks must see the folder."""

    def __init__(self, root: str | Path, *, step: int = 0) -> None:
        super().__init__()
        self._root, self._step = Path(root), step
        self._arena = Arena()
        self._is_coordinator = False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._root = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with suppress(OSError):  # another save may be ending there just now: what is left goes with the next
            collect(self._root)
        known = (sequence_of(name) or 0 for name in local_names(self._root))
        saving = begin(self._root, step=self._step, sequence=1 + max(known, default=0))
        note = saving.to_json()
        return [replace(plan, storage_data=(rank, note)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        rank, note = plan.storage_data
        saving = join(self._root, note)
        try:
            text = self._write(plan, planner, rank, saving)
        except BaseException:
            discard(self._root, saving, rank=rank)
            raise
        results = [
            WriteResult(index=item.index, size_in_bytes=_bytes_of(item), storage_data=(rank, note, text))
            for item in plan.items[:1]
        ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results or [_empty_result(rank, note, text)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        texts = {found.storage_data[0]: found.storage_data[2] for some in results for found in some}
        saving = join(self._root, results[0][0].storage_data[1])
        in_order = [texts[rank] for rank in sorted(texts)]
        parts = [part_from_json(text) for text in in_order]
        try:
            commit(self._root, saving, make_manifest(saving, parts, in_order), in_order, rank=0)
        except BaseException:
            for rank in sorted(texts):
                discard(self._root, saving, rank=rank)
            raise

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in str(checkpoint_id)

    def _write(self, plan: SavePlan, planner: SavePlanner, rank: int, saving: Saving) -> bytes:
        paths: dict[str, Any] = plan.planner_data or {}
        boxes, tensors, values = [], [], []
        for item in plan.items:
            path = tuple(paths.get(item.index.fqn, (item.index.fqn,)))
            data: Any = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                value = torch.load(io.BytesIO(data.getbuffer()), weights_only=False)  # torch's, just pickled
                values.append((path, encode(value, name=path_name(path))))
            else:
                boxes.append(box_of(path, item))
                tensors.append(data.detach())
        pieces, size = place(boxes)
        self._arena.ensure(size, pinned=any(tensor.is_cuda for tensor in tensors))
        writes = tuple(Write(piece=piece, path=piece.box.path) for piece in pieces)
        ours = Plan(signature={}, writes=writes, pieces=pieces, bytes=size, hasty_bytes=size)
        snapshot = Snapshot(self._arena, ours, tensors, chunk_bytes=CHUNK_BYTES)
        snapshot.copy()
        chunks = write_part(
            saving.folder(self._root) / part_name(rank, "bin"), snapshot, chunk_bytes=CHUNK_BYTES
        )
        part = Part(
            rank=rank, save=saving.save, bytes=size, pieces=pieces, chunks=chunks, values=tuple(values)
        )
        return put_part(self._root, saving, part)


class Reader(StorageReader):
    """Reads a checkpoint for `dcp.load`, verifying every chunk: the newest whole one, or `name`."""

    def __init__(self, root: str | Path, *, remote: str = "", name: str = "") -> None:
        super().__init__()
        self._remote, self._name = remote, name
        self._set_root(root)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._set_root(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._saved = Saved(self._find(), rank=0)
        metadata = tensor_metadata(self._saved)
        boxes = (self._saved.box(name) for name in self._saved.pieces)
        paths = [*(box.path for box in boxes), *self._saved.values]
        metadata.planner_data = {path_name(path): _dcp_path(path) for path in paths}
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        reading = Reading(self._saved.checkpoint)
        values = {path_name(path): value for path, value in self._saved.values.items()}
        targets = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _pickled(decode(values[item.storage_index.fqn])))
                continue
            rank, piece = find_piece(self._saved, item.storage_index)
            target = planner.resolve_tensor(item).detach()
            reading.want(rank, piece, offsets=tuple(item.storage_offsets), target=target)
            targets.append((item, target))
        reading.run()
        for item, target in targets:
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in str(checkpoint_id)

    def _set_root(self, root: str | os.PathLike[str]) -> None:
        store = open_store(self._remote) if self._remote else None
        self._tiers = Tiers(root=Path(root), remote=store)

    def _find(self) -> Checkpoint:
        if self._name:
            return self._tiers.checkpoint(self._name)
        skipped: list[str] = []
        found = next(iter(self._tiers.whole(self._tiers.names(), skipped=skipped)), None)
        if found is None:
            raise BadCheckpointError(
                f"no whole checkpoint in {self._tiers.root}: {'; '.join(skipped) or 'none at all'}",
                hint="check the folder; `stoker checkpoint ls` shows what is there",
            )
        return found


class Stager:
    """A stager for `dcp.async_save`: one reused, pinned copy of the state instead of a new one each time.
    torch 2.11 closes it after every save, newer ones do not: there the memory is reused."""

    should_synchronize_after_execute = False
    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._arena = Arena()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state, its tensors in the arena: good until the next call."""
        found = list(_tensors(state_dict))
        boxes = [_whole_box(at, local(tensor)) for at, tensor in enumerate(found)]
        pieces, size = place(boxes)
        self._arena.ensure(size, pinned=any(tensor.is_cuda for tensor in found))
        writes = tuple(Write(piece=piece, path=piece.box.path) for piece in pieces)
        plan = Plan(signature={}, writes=writes, pieces=pieces, bytes=size, hasty_bytes=size)
        Snapshot(self._arena, plan, [local(one) for one in found], chunk_bytes=CHUNK_BYTES).copy()
        copies = iter(pieces)
        staged: dict[str, Any] = _copied(state_dict, lambda tensor: self._staged(tensor, next(copies).at))
        return staged

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        self._arena.close()

    def _staged(self, tensor: torch.Tensor, at: int) -> torch.Tensor:
        here = local(tensor)
        flat = self._arena.tensor[at : at + here.nbytes]
        copy = flat.view(here.dtype).view(here.shape)
        if isinstance(tensor, DTensor):
            return DTensor.from_local(
                copy, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
            )
        return copy


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a nested state, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one)


def _copied(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nested state with every tensor changed, and everything else copied: an array may be written
    to before it is saved."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _copied(one, change) for key, one in value.items()}
    if not isinstance(value, (list, tuple)):
        return deepcopy(value)
    inner = [_copied(one, change) for one in value]
    return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)  # a namedtuple, or not


def _whole_box(at: int, tensor: torch.Tensor) -> Box:
    shape = tuple(tensor.shape)
    return Box(
        path=(at,), dtype=dtype_name(tensor.dtype), shape=shape, offsets=(0,) * len(shape), sizes=shape
    )


def _bytes_of(item: Any) -> int:
    return int(item.tensor_storage_size() or 0)


def _empty_result(rank: int, note: bytes, text: bytes) -> WriteResult:
    return WriteResult(index=MetadataIndex(""), size_in_bytes=0, storage_data=(rank, note, text))


def _pickled(value: Any) -> io.BytesIO:
    """What a load planner expects of a plain value."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


def _dcp_path(path: Any) -> tuple[Any, ...]:
    return tuple(str(step[1]) if isinstance(step, tuple) else step for step in path)


__all__ = ["Reader", "Stager", "Writer"]
