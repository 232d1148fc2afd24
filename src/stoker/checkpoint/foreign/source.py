"""A foreign checkpoint, read as one of ours: its tensors lie in a part that exists only in this description,
and are brought from their own files when they are asked for, a few at a time."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stoker.checkpoint.saved.cover import check_parts
from stoker.checkpoint.saved.layout import Box, Manifest, Part, PartRecord, Path, place
from stoker.checkpoint.saved.reader import Checkpoint, Stretch
from stoker.checkpoint.saved.values import encoded
from stoker.errors import BadCheckpointError

_KEPT = 4  # tensors in memory: as many as threads of an import are likely to be at
_COPY_BYTES = 8 << 20

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A tensor or a piece of one, and how to get it: on the CPU, perhaps a view into a mapped file."""

    box: Box
    load: Callable[[], torch.Tensor]


class Foreign(Checkpoint):
    """What others saved, behind the interface of a checkpoint of ours. Any thread may read."""

    def __init__(
        self, name: str, held: Sequence[Held], values: Mapping[Path, Any], *, step: int, kind: str
    ) -> None:
        self.name, self.kind, self._values = name, kind, values
        self.held = [one for one in held if one.box.bytes or 0 in one.box.shape]
        pieces, size = place([one.box for one in self.held])
        plain = encoded(values)
        part = Part(rank=0, save="", bytes=size, pieces=pieces, chunks=(), values=plain)
        check_parts([part], save="")
        records = (PartRecord(bytes=size, json_bytes=0, xxh3=""),)
        self.__dict__["parts"] = (
            part,
        )  # cached properties of Checkpoint, which has a folder to read them from
        self.__dict__["manifest"] = Manifest(name=name, step=step, save="", parts=records)
        self._starts = [piece.at for piece in pieces]
        self._loaded: OrderedDict[int, Bytes] = OrderedDict()
        self._lock = threading.Lock()

    def with_more(self, held: Sequence[Held]) -> Foreign:
        """The same with more tensors."""
        return Foreign(self.name, [*self.held, *held], self._values, step=self.step, kind=self.kind)

    def check(self) -> None:
        pass  # it was opened

    def read(self, stretches: Iterable[Stretch]) -> None:
        buffer = bytearray(_COPY_BYTES)
        for stretch in sorted(stretches, key=lambda one: one.start):
            for at in range(stretch.start, stretch.stop, _COPY_BYTES):
                size = min(_COPY_BYTES, stretch.stop - at)
                with memoryview(buffer) as whole, whole[:size] as view:
                    self.fill(view, at)
                    stretch.receive(at - stretch.start, view)

    def fill(self, room: memoryview, start: int) -> None:
        """The bytes of the part from `start` on."""
        into = np.frombuffer(room, np.uint8)
        into[:] = 0  # between two tensors
        stop = start + into.size
        for index in range(max(0, bisect_right(self._starts, start) - 1), len(self._starts)):
            at = self._starts[index]
            if at >= stop:
                break
            first, last = max(start, at), min(stop, at + self.held[index].box.bytes)
            if first < last:
                into[first - start : last - start] = self._bytes(index)[first - at : last - at]

    def _bytes(self, index: int) -> Bytes:
        with self._lock:
            if index not in self._loaded:
                self._loaded[index] = _as_bytes(self.held[index])
                while len(self._loaded) > _KEPT:
                    self._loaded.popitem(last=False)
            self._loaded.move_to_end(index)
            return self._loaded[index]


def _as_bytes(held: Held) -> Bytes:
    box, tensor = held.box, held.load()
    if tuple(tensor.shape) != box.sizes or str(tensor.dtype).removeprefix("torch.") != box.dtype:
        found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        raise BadCheckpointError(
            f"{box.name} is {found}, and was said to be {box.dtype} {list(box.sizes)}",
            hint="the file is damaged, or was changed since: get it again",
        )
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    data: Bytes = flat.numpy()
    return data


def whole(path: Path, tensor: torch.Tensor, *, load: Callable[[], torch.Tensor] | None = None) -> Held:
    """A tensor that lies somewhere in one piece."""
    shape = tuple(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    box = Box(path=path, dtype=dtype, shape=shape, offsets=(0,) * len(shape), sizes=shape)
    return Held(box=box, load=load or (lambda: tensor))
