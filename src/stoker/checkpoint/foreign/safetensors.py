"""safetensors files and folders of Hugging Face models, mapped: nothing is read before it is wanted.

The header is believed only as far as the file bears it out: sizes, places, types.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from stoker.checkpoint.foreign.source import Held
from stoker.checkpoint.saved.export import SAFE_DTYPES
from stoker.checkpoint.saved.layout import Box, item_bytes
from stoker.errors import BadCheckpointError
from stoker.storage import named_errors

_MOST_HEADER = 100 << 20  # as the format itself allows
_DTYPES = {word: name for name, word in SAFE_DTYPES.items()}
_INDICES = (".safetensors.index.json", ".bin.index.json")


def safetensors_held(path: Path, *, under: str = "model") -> Iterator[Held]:
    """The tensors of a file, as those of one object."""
    with named_errors("read", path), path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER):
            raise _bad(path, f"its header would be {length:,} of {size:,} bytes")
        header = _parsed(path, file.read(length))
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants memory it could write to
    end = 0
    for name, start, stop, dtype, shape in sorted(_checked(path, header, size - 8 - length), key=_place):
        if start != end:  # the format has neither gaps nor tensors that share bytes
            raise _bad(path, f"{name} begins at byte {start:,}, and what comes before it ends at {end:,}")
        end = stop
        box = Box(path=(under, name), dtype=dtype, shape=shape, offsets=(0,) * len(shape), sizes=shape)
        yield Held(box=box, load=_view(mapped, box, at=8 + length + start))
    if end != size - 8 - length:
        raise _bad(path, f"its header speaks of {end:,} bytes, and {size - 8 - length:,} follow")


def _place(entry: tuple[str, int, int, str, tuple[int, ...]]) -> tuple[int, int]:
    return entry[1:3]


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise _bad(path, "its header is no table of tensors")
    header.pop("__metadata__", None)
    return header


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table in which no name stands twice: JSON would take the last and lose the others."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is in it twice")
    return found


def _checked(
    path: Path, header: dict[str, Any], size: int
) -> Iterator[tuple[str, int, int, str, tuple[int, ...]]]:
    for name, entry in header.items():
        try:
            (start, stop), shape = entry["data_offsets"], tuple(entry["shape"])
            dtype = _DTYPES[entry["dtype"]]
            whole = all(type(one) is int and one >= 0 for one in (start, stop, *shape))
            if not whole or stop > size or stop - start != math.prod(shape) * item_bytes(dtype):
                raise ValueError(f"{dtype} {list(shape)} at bytes {start} to {stop} of {size}")
        except (KeyError, TypeError, ValueError) as error:
            raise _bad(path, f"{name} cannot be: {error}") from error
        yield name, start, stop, dtype, shape


def _view(mapped: mmap.mmap, box: Box, *, at: int) -> Callable[[], torch.Tensor]:
    def load() -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, box.dtype)
        if not box.bytes:
            return torch.empty(box.shape, dtype=dtype)
        data = torch.frombuffer(mapped, dtype=torch.uint8, count=box.bytes, offset=at)
        # a header may have any length: what is not aligned is copied
        return (data if at % item_bytes(box.dtype) == 0 else data.clone()).view(dtype).reshape(box.shape)

    return load


def model_files(folder: Path) -> list[Path]:
    """The weights of a Hugging Face model: of its index where there is one, else what is called so."""
    if index := _index_of(folder):
        return _indexed(folder, index)
    names = _names_in(folder)
    for ending in (".safetensors", ".bin"):
        if found := [name for name in names if name.endswith(ending) and name != "training_args.bin"]:
            return [folder / name for name in found]
    return []


def check_index(folder: Path, names: Collection[str]) -> None:
    """Is every tensor there that an index names? Its files may be of another download."""
    index = _index_of(folder)
    lost = [name for name in indexed_names(folder / index) if name not in names] if index else []
    if lost:
        raise _bad(folder / index, f"it names {lost[0]}, which is in none of its files ({len(lost)} such)")


def _index_of(folder: Path) -> str:
    names = _names_in(folder)
    return next((name for ending in _INDICES for name in names if name.endswith(ending)), "")


def _names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def _indexed(folder: Path, index: str) -> list[Path]:
    """The files that an index names: they lie beside it, or it is refused."""
    try:
        names = sorted(set(indexed_names(folder / index).values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _bad(folder / index, f"it is no index of files: {error}") from error
    for name in names:
        if not isinstance(name, str) or name != Path(name).name or name in ("", ".", ".."):
            raise _bad(folder / index, f"it names {name!r}, which is not beside it")
        if not (folder / name).is_file():
            raise _bad(folder / index, f"it names {name}, which is missing")
    return [folder / name for name in names]


def indexed_names(index: Path) -> dict[str, str]:
    """The file of each tensor, as an index has it."""
    return dict(json.loads(index.read_bytes())["weight_map"])


def _bad(path: Path, why: str) -> BadCheckpointError:
    return BadCheckpointError(f"{path} cannot be used: {why}", hint="get it again from where it came")
