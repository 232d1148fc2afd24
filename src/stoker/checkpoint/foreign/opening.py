"""From a path to a checkpoint that can be restored from, whoever made it.

What others save becomes objects with names as a Checkpointer has them: tensors without a name above them
are `model`; of a Lightning checkpoint `state_dict` is `model`, `optimizer_states` are `optimizer`.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stoker.checkpoint.foreign import kinds
from stoker.checkpoint.foreign.naming import renaming, under_model
from stoker.checkpoint.foreign.pickled import dcp_held, dcp_table, dcp_values, load_plain
from stoker.checkpoint.foreign.safetensors import check_index, model_files, safetensors_held
from stoker.checkpoint.foreign.source import Foreign, Held, whole
from stoker.checkpoint.saved.layout import Path as Steps
from stoker.checkpoint.saved.layout import path_name
from stoker.checkpoint.saved.reader import Checkpoint
from stoker.checkpoint.saved.tiers import LocalFolder, Tiers
from stoker.checkpoint.snapshot.state import flatten
from stoker.errors import BadCheckpointError, UsageError
from stoker.storage import is_local, local_path

_STEPS = ("step", "global_step", "iteration", "iter_num")  # under which a loop may have kept its count
_BESIDE = {"optimizer.pt": "optimizer", "scheduler.pt": "scheduler"}  # files of Hugging Face's Trainer

Found = tuple[list[Held], dict[Steps, Any]]  # tensors; plain values by path


def open_source(source: str | Path, *, rename: Mapping[str, str] | None = None) -> Checkpoint:
    """What lies at a path, to be restored from: a checkpoint of ours, or one that others made, whose names
    begin with other words where `rename` says so."""
    if not is_local(source):
        raise UsageError(f"{source} is not on this node", hint=f"`stoker stage {source}` brings it here")
    path = local_path(source).absolute()
    if not path.exists():
        raise UsageError(f"there is no {path}", hint="check the path given as source")
    if path.is_file():
        return _opened(path, kinds.kind_of_file(path.name) or kinds.TORCH, rename or {})
    found = kinds.recognise(kinds.names_in(path))
    if found is None:
        raise UsageError(
            f"{path} holds no checkpoint that stoker knows",
            hint="give a folder of DCP, of a Hugging Face model or of Megatron's torch_dist, or a file of "
            "torch.save, safetensors or Lightning",
        )
    return _opened(path / found.inside, found.kind, rename or {})


def _opened(path: Path, kind: str, rename: Mapping[str, str]) -> Checkpoint:
    if kind == kinds.OWN:
        return Checkpoint(LocalFolder(path))
    if kind == kinds.RUN:
        return _newest(path)
    if kind not in _READERS:
        raise UsageError(
            f"{path} is {kind}, which is not read here",
            hint="turn it into one file of torch.save or safetensors first, as its own tools do",
        )
    held, values = _READERS[kind](path)
    step = _step(path, values)
    held, values = _named(held, values, rename)
    return Foreign(str(path), held, values, step=step, kind=kind)


def _newest(root: Path) -> Checkpoint:
    skipped: list[str] = []
    found = Tiers(root=root).latest(skipped=skipped)
    if found is None:
        raise BadCheckpointError(
            f"{root} has no whole checkpoint: {'; '.join(skipped)}", hint="`stoker checkpoint ls` shows them"
        )
    return found


# --- one function for each kind -----------------------------------------------------------------------


def _dcp(folder: Path) -> Found:
    table = dcp_table(folder)
    return [*dcp_held(folder, table)], dcp_values(folder, table)


def _megatron(folder: Path) -> Found:
    """Its tensors as DCP has them; beside them what all ranks share, such as its arguments and iteration."""
    held, values = _dcp(folder)
    common = folder / "common.pt"
    if common.exists():
        more, plain = _nested(load_plain(common, name=str(common)))
        bare = [_moved(one, ("common", *one.box.path)) if len(one.box.path) == 1 else one for one in more]
        held, values = [*held, *bare], {**values, **plain}
    return held, values


def _safetensors(path: Path) -> Found:
    return [*safetensors_held(path)], {}


def _model(folder: Path) -> Found:
    files = model_files(folder)
    if not files:
        raise BadCheckpointError(f"{folder} has no weights", hint="get it again from where it came")
    held: list[Held] = []
    values: dict[Steps, Any] = {}
    for path in files:
        if path.suffix == ".safetensors":
            held += safetensors_held(path)
        else:
            more, plain = _nested({"model": load_plain(path, name=str(path))})
            held, values = held + more, {**values, **plain}
    check_index(folder, {path_name(one.box.path[1:]) for one in held})
    for name, thing in _BESIDE.items():
        if (folder / name).is_file():
            more, plain = _nested({thing: load_plain(folder / name, name=str(folder / name))})
            held, values = held + more, {**values, **plain}
    with suppress(OSError, ValueError, KeyError, TypeError):
        values["global_step",] = int(json.loads((folder / "trainer_state.json").read_bytes())["global_step"])
    return held, values


def _torch(path: Path) -> Found:
    if path.is_dir():
        return _torch(_only_file(path))
    loaded = load_plain(path, name=str(path))
    if isinstance(loaded, torch.Tensor):
        return [whole(("model", "tensor"), loaded)], {}
    if not isinstance(loaded, Mapping):
        raise BadCheckpointError(
            f"{path} holds a {type(loaded).__name__}, no dictionary", hint="save a state_dict"
        )
    return _nested(_lightning(loaded) if "pytorch-lightning_version" in loaded else loaded)


def _only_file(folder: Path) -> Path:
    """The file in a folder of them: the one of the largest step, or the only one."""
    files = [path for path in folder.iterdir() if kinds.kind_of_file(path.name)]
    newest = sorted(files, key=lambda one: (kinds.number_in(one.name), one.name))
    if len(files) > 1 and not kinds.number_in(newest[-1].name):
        names = ", ".join(path.name for path in newest[:5])
        raise UsageError(f"{folder} holds several files: {names}", hint="give the path of one of them")
    return newest[-1]


def _lightning(loaded: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {key: value for key, value in loaded.items() if key not in ("state_dict", "optimizer_states")}
    optimizers = loaded.get("optimizer_states", [])
    for at, one in enumerate(optimizers):
        renamed["optimizer" if len(optimizers) == 1 else f"optimizer_{at}"] = one
    return {"model": loaded.get("state_dict", {}), **renamed}


_READERS: dict[str, Callable[[Path], Found]] = {
    kinds.DCP: _dcp,
    kinds.MEGATRON: _megatron,
    kinds.SAFETENSORS: lambda path: _safetensors(_only_file(path) if path.is_dir() else path),
    kinds.MODEL: _model,
    kinds.TORCH: _torch,
    kinds.LIGHTNING: _torch,
}


# --- names --------------------------------------------------------------------------------------------


def _nested(loaded: Any) -> Found:
    """Tensors and values by path, as a Checkpointer would save them."""
    plain = {str(key): _plain(value) for key, value in loaded.items()}
    flat = flatten(plain)
    return [whole(path, tensor) for path, tensor in flat.tensors.items()], dict(flat.values)


def _plain(value: Any) -> Any:
    return vars(value) if isinstance(value, Namespace) else value


def _named(held: list[Held], values: Mapping[Steps, Any], rename: Mapping[str, str]) -> Found:
    bare, new = any(len(one.box.path) == 1 for one in held), renaming(rename)
    named = [_moved(one, new(under_model(one.box.path))) for one in held]
    # of plain values only those that belong to tensors beside them
    plain = {
        new(under_model(path) if bare and str(path[0]).endswith("_extra_state") else path): value
        for path, value in values.items()
    }
    return named, plain


def _moved(held: Held, path: Steps) -> Held:
    return held if path == held.box.path else replace(held, box=replace(held.box, path=path))


def _step(path: Path, values: Mapping[Steps, Any]) -> int:
    counts = (values.get((name,)) for name in _STEPS)
    found = next((one for one in counts if type(one) is int and one >= 0), None)
    return kinds.number_in(path.name) if found is None else found
