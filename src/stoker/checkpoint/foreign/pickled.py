"""torch.save files, Lightning's among them, and folders of torch.distributed.checkpoint: pickles, of which
nothing runs. Files go through torch's `weights_only`, DCP's own table through a list of names that are data.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import io
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from stoker.checkpoint.foreign.source import Held
from stoker.checkpoint.saved.layout import Box
from stoker.checkpoint.saved.layout import Path as Steps
from stoker.errors import BadCheckpointError
from stoker.storage import named_errors

_METADATA = "torch.distributed.checkpoint.metadata"
# All that DCP, and Megatron with it, writes into its table: classes that run nothing when they are made.
_TABLE = {
    _METADATA: {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
    },
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}  # fmt: skip


def load_plain(source: Path | BinaryIO, *, name: str) -> Any:
    """What torch saved, as far as it is data; mapped where it can be."""
    mapped = isinstance(source, Path) and zipfile.is_zipfile(source)
    try:
        with _trusting(argparse.Namespace):  # Megatron's arguments: names and values
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped or None)
    except pickle.UnpicklingError as error:
        raise BadCheckpointError(
            f"{name} holds Python objects that only running its code could bring back: {_first_line(error)}",
            hint="load it where you trust it, and save what you need of it as a state_dict",
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, OSError, AttributeError, TypeError) as error:
        raise BadCheckpointError(
            f"{name} cannot be read by torch: {_first_line(error)}",
            hint="it is truncated or damaged, or no file of torch.save: get it again",
        ) from error


def _trusting(kind: type) -> AbstractContextManager[Any]:
    safe_globals = getattr(torch.serialization, "safe_globals", None)  # torch 2.4 has none
    return safe_globals([kind]) if safe_globals else nullcontext()


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


# --- torch.distributed.checkpoint ---------------------------------------------------------------------


class _TableUnpickler(pickle.Unpickler):
    """Reads DCP's table of contents; a name that does not belong into one is an error before it is used."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member  # so Python 3.11.0 to 3.11.3 write a member of an Enum; others write its value
        allowed = name in _TABLE.get(module, ())
        if allowed or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(importlib.import_module(module), name)
        raise pickle.UnpicklingError(f"it would use {module}.{name}")


def _member(kind: Any, name: str) -> Any:
    """What getattr is asked for in a table: a member of one of its enumerations, and nothing else."""
    if isinstance(kind, enum.EnumMeta) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"it would use {name!r} of {kind!r}")


def dcp_table(folder: Path) -> Metadata:
    """What a DCP folder says it holds."""
    path = folder / ".metadata"
    with named_errors("read", path):
        text = path.read_bytes()
    try:
        table = _TableUnpickler(io.BytesIO(text)).load()
        if not isinstance(table, Metadata) or not isinstance(table.storage_data, dict):
            raise pickle.UnpicklingError("it is no table of contents")
    except Exception as error:  # a damaged pickle may raise anything
        raise BadCheckpointError(
            f"{path} cannot be used: {_first_line(error)}",
            hint="it is damaged, or not what DCP writes: get it again",
        ) from error
    return table


def dcp_held(folder: Path, table: Metadata) -> Iterator[Held]:
    """Every piece of every tensor, to be read from its place in its file."""
    files = {(index.fqn, _offsets(index)): info for index, info in table.storage_data.items()}
    for name, entry in table.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        for chunk in entry.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            box = Box(
                path=dcp_path(table, name), dtype=dtype, shape=tuple(entry.size), offsets=offsets, sizes=sizes
            )
            if box.bytes or 0 in box.shape:
                info = files.get((name, offsets))
                if info is None:
                    raise _lost(folder, box.name)
                yield Held(box=box, load=_entry(folder, info, box.name))


def dcp_values(folder: Path, table: Metadata) -> dict[Steps, Any]:
    """What is no tensor."""
    files = {index.fqn: info for index, info in table.storage_data.items()}
    found = {}
    for name, entry in table.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            if name not in files:
                raise _lost(folder, name)
            found[dcp_path(table, name)] = _entry(folder, files[name], name)()
    return found


def dcp_path(table: Metadata, name: str) -> Steps:
    """The path of a name. DCP writes every key as text: an optimizer's numbers become numbers again."""
    planned = table.planner_data.get(name) if isinstance(table.planner_data, Mapping) else None
    steps = tuple(planned) if isinstance(planned, (tuple, list)) and planned else (name,)
    return tuple(
        ("k", int(step))
        if at >= 2 and steps[at - 1] == "state" and isinstance(step, str) and step.isdecimal()
        else step
        for at, step in enumerate(steps)
    )


def _entry(folder: Path, info: Any, name: str) -> Callable[[], Any]:
    """One entry of a file, which is a torch.save file of its own."""
    where = str(info.relative_path)
    if where != Path(where).name or where in (".", ".."):
        raise BadCheckpointError(
            f"{folder} says that {name} lies in {where!r}, which is not beside it", hint="do not trust it"
        )

    def load() -> Any:
        with named_errors("read", folder / where), (folder / where).open("rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
        if len(data) != info.length:
            raise BadCheckpointError(
                f"{folder / where} ends before {name} does", hint="it is truncated: get it again"
            )
        return load_plain(io.BytesIO(data), name=f"{name} in {folder / where}")

    return load


def _offsets(index: Any) -> tuple[int, ...] | None:
    return tuple(index.offset) if index.offset is not None else None


def _lost(folder: Path, name: str) -> BadCheckpointError:
    return BadCheckpointError(f"{folder} does not say where {name} lies", hint="it is damaged: get it again")
