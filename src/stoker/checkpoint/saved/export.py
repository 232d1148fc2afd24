"""Export and diff: checkpoints as safetensors with the names that Hugging Face knows, and compared. No torch.

Tensors are brought back one at a time, verified, so that memory is bounded by the largest.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.checkpoint.saved.apart import unmarked
from stoker.checkpoint.saved.layout import Box, Piece, item_bytes, path_name
from stoker.checkpoint.saved.reader import Checkpoint, Stretch
from stoker.errors import UsageError
from stoker.storage import new_file

SHARD_BYTES = 5 * 10**9  # as Hugging Face cuts its own

SAFE_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32",
    "uint64": "U64", "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip

Bytes = npt.NDArray[np.uint8]


class Tensors:
    """The tensors of a checkpoint by name."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._pieces: dict[str, list[tuple[int, Piece]]] = {}
        for rank, piece in checkpoint.pieces():
            self._pieces.setdefault(piece.box.name, []).append((rank, piece))

    def names(self, prefix: str = "") -> list[str]:
        """Names that begin so; of tensors that share memory only the first."""
        seen: set[tuple[int, int]] = set()
        found = []
        for name in self._pieces:
            place = self.place(name)
            if name.startswith(prefix) and place not in seen:
                found.append(name)
                seen.update([place] if place else [])
        return found

    def all_names(self) -> list[str]:
        return list(self._pieces)

    def place(self, name: str) -> tuple[int, int] | None:
        """Where its first byte lies; an empty piece takes no room and has the place of what follows it."""
        pieces = ((rank, piece.at) for rank, piece in self._pieces[name] if piece.box.bytes)
        return next(pieces, None)

    def box(self, name: str) -> Box:
        return self._pieces[name][0][1].box

    def bytes(self, name: str) -> int:
        return math.prod(self.box(name).shape) * item_bytes(self.box(name).dtype)

    def read(self, name: str) -> Bytes:
        """A whole tensor as bytes, its last axis one element's."""
        box = self.box(name)
        whole = np.empty((*box.shape, item_bytes(box.dtype)), np.uint8)
        pieces = [
            (rank, piece, np.empty((*piece.box.sizes, whole.shape[-1]), np.uint8))
            for rank, piece in self._pieces[name]
        ]
        self._checkpoint.read(_stretch(rank, piece, room) for rank, piece, room in pieces)
        for _, piece, room in pieces:
            where = zip(piece.box.offsets, piece.box.sizes, strict=True)
            whole[tuple(slice(start, start + size) for start, size in where)] = room
        return whole


def _stretch(rank: int, piece: Piece, room: Bytes) -> Stretch:
    flat = room.reshape(-1)

    def receive(at: int, data: memoryview) -> None:
        flat[at : at + len(data)] = np.frombuffer(data, np.uint8)

    return Stretch(rank=rank, start=piece.at, stop=piece.at + room.size, receive=receive)


def named(names: Sequence[str], prefix: str, *, known: Sequence[str]) -> list[str]:
    """Those that begin with a prefix, of which there must be some. Where ranks saved different tensors under
    one name there is no one value to give under it; of a buffer the first rank's is the one."""
    found, there = [name for name in names if name.startswith(prefix)], set(known)
    for name in known if prefix else ():
        (first,), ranks = unmarked((name.partition(".")[0],))
        plain = f"{first}.{name.partition('.')[2]}"
        if ranks and plain.startswith(prefix) and plain not in there:
            raise UsageError(
                f"{plain} was not the same on all ranks when it was saved: the checkpoint has {name}",
                hint=f"choose whose with --prefix {name.partition('.')[0]}.",
            )
    if not found:
        raise UsageError(
            f"the checkpoint has no tensors whose names begin with {prefix!r}",
            hint="`stoker checkpoint ls --tensors` shows the names; choose with --prefix",
        )
    return found


# --- safetensors --------------------------------------------------------------------------------------


def export(
    checkpoint: Checkpoint, out: Path, *, prefix: str = "model.", shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write the tensors under a prefix as safetensors, without it; one file, or several and an index."""
    tensors = Tensors(checkpoint)
    names = named(tensors.names(prefix), prefix, known=tensors.all_names())
    shards = list(_shards(names, tensors, shard_bytes))
    paths = [out / _shard_name(at, len(shards)) for at in range(len(shards))]
    for path, shard in zip(paths, shards, strict=True):
        _write_shard(path, shard, tensors, prefix)
    if len(shards) > 1:
        _write_index(out, paths, shards, tensors, prefix)
    return paths


def _shards(names: Sequence[str], tensors: Tensors, limit: int) -> Iterator[list[str]]:
    shard: list[str] = []
    size = 0
    for name in names:
        if shard and size + tensors.bytes(name) > limit:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += tensors.bytes(name)
    yield shard


def _shard_name(at: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{at + 1:05d}-of-{count:05d}.safetensors"


def _write_shard(path: Path, names: Sequence[str], tensors: Tensors, prefix: str) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        box, stop = tensors.box(name), at + tensors.bytes(name)
        header[name.removeprefix(prefix)] = {
            "dtype": _safe_dtype(box),
            "shape": list(box.shape),
            "data_offsets": [at, stop],
        }
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    with new_file(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            file.write(tensors.read(name).tobytes())


def _write_index(
    out: Path, paths: Sequence[Path], shards: Sequence[Sequence[str]], tensors: Tensors, prefix: str
) -> None:
    where = {name: path.name for path, shard in zip(paths, shards, strict=True) for name in shard}
    index = {
        "metadata": {"total_size": sum(map(tensors.bytes, where))},
        "weight_map": {name.removeprefix(prefix): file for name, file in where.items()},
    }
    with new_file(out / "model.safetensors.index.json") as file:
        file.write(json.dumps(index, indent=2).encode() + b"\n")


def _safe_dtype(box: Box) -> str:
    if box.dtype not in SAFE_DTYPES:
        raise UsageError(
            f"{box.name} is {box.dtype}, which safetensors has no word for", hint="choose with --prefix"
        )
    return SAFE_DTYPES[box.dtype]


# --- difference ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One name that is not the same in two checkpoints."""

    name: str
    what: str
    most: float | None = None  # the largest difference of two elements


def diff(one: Checkpoint, other: Checkpoint) -> list[Difference]:
    """What differs between two checkpoints: names, shapes, types, elements, plain values."""
    left, right = Tensors(one), Tensors(other)
    names, others = set(left.names()), set(right.names())
    found = [Difference(name=name, what=f"only in {one.name}") for name in sorted(names - others)]
    found += [Difference(name=name, what=f"only in {other.name}") for name in sorted(others - names)]
    for name in sorted(names & others):
        found += _tensor_difference(name, left, right)
    return found + _value_differences(one, other)


def _tensor_difference(name: str, left: Tensors, right: Tensors) -> list[Difference]:
    a, b = left.box(name), right.box(name)
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        said = f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
        return [Difference(name=name, what=said)]
    mine, theirs = left.read(name), right.read(name)
    changed = np.any(mine != theirs, axis=-1)
    if not changed.any():
        return []
    said = f"{int(changed.sum()):,} of {changed.size:,} elements differ"
    return [Difference(name=name, what=said, most=_largest(mine[changed], theirs[changed], a.dtype))]


def _largest(mine: Bytes, theirs: Bytes, dtype: str) -> float | None:
    """The largest difference; None where there is none to be had, as between a number and NaN."""
    one, two = _numbers(mine, dtype), _numbers(theirs, dtype)
    if one is None or two is None:
        return None
    if one.dtype.kind in "iu":
        # unsigned arithmetic wraps around to the true distance, which float64 has no room for
        far = np.maximum(one, two).astype(np.uint64) - np.minimum(one, two).astype(np.uint64)
        return float(far.max())
    with np.errstate(all="ignore"):
        apart = np.abs(one - two)
    known = apart[~np.isnan(apart)]
    return float(known.max()) if known.size else None


def _numbers(data: Bytes, dtype: str) -> npt.NDArray[Any] | None:
    """The elements as numbers that numpy knows."""
    flat = np.ascontiguousarray(data).reshape(-1)
    if dtype == "bfloat16":
        return (flat.view("<u2").astype(np.uint32) << 16).view(np.float32)
    try:
        kind = np.dtype(dtype)
    except TypeError:
        return None
    if kind.kind in "iu":
        return flat.view(kind)
    return flat.view(kind).astype(np.complex128 if kind.kind == "c" else np.float64)


def _value_differences(one: Checkpoint, other: Checkpoint) -> list[Difference]:
    left, right = _values(one), _values(other)
    found = []
    for name in sorted({*left, *right}):
        if name not in right:
            found.append(Difference(name=name, what=f"only in {one.name}"))
        elif name not in left:
            found.append(Difference(name=name, what=f"only in {other.name}"))
        elif left[name] != right[name]:
            said = f"{_short(left[name])} against {_short(right[name])}"
            found.append(Difference(name=name, what=said))
    return found


def _values(checkpoint: Checkpoint) -> dict[str, str]:
    """Plain values as text: NaN is equal to itself there."""
    return {
        path_name(path): json.dumps(value, sort_keys=True)
        for part in checkpoint.parts
        for path, value in part.values
    }


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
