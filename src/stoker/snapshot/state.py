"""The state of a training loop, flattened: tensors by path, plain values by path; and put back again.

An object is a module, an optimizer, anything with `state_dict`, a dictionary, or a plain value. The names
in a checkpoint do not depend on wrappers: DDP's `module.` and torch.compile's `_orig_mod.` are left out,
and the state of an optimizer is named after its parameters, not numbered, wherever the module that owns
them is saved beside it.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stoker.errors import UsageError
from stoker.saved.layout import Path, path_name

try:
    from torch.distributed.tensor import DTensor as DTensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor as DTensor  # type: ignore[attr-defined]

Objects = Mapping[str, Any]  # what the user saves, by name; Any: modules, optimizers, dictionaries, values
_PLAIN = (torch.Tensor, torch.nn.Parameter)
ParameterPaths = Mapping[int, tuple[str, str]]  # a parameter's identity → its module's name, its own in there


@dataclass(kw_only=True, slots=True)
class Flat:
    """Tensors and plain values by path."""

    tensors: dict[Path, torch.Tensor] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)

    def check(self) -> None:
        """No two paths may have the same name, and tensors must have plain memory."""
        names: dict[str, Path] = {}
        for path in (*self.tensors, *self.values):
            other = names.setdefault(path_name(path), path)
            if other != path:
                raise UsageError(
                    f"{path} and {other} are both called {path_name(path)!r} in a checkpoint",
                    hint="rename one of the keys",
                )
        for path, tensor in self.tensors.items():
            check_memory(path, tensor)


def check_memory(path: Path, tensor: torch.Tensor) -> None:
    """A tensor must have plain memory of its own: its bytes are copied from where it says they are."""
    kind = _strange_kind(tensor)
    if kind:
        hint = "save its parts as dense tensors"
        if kind == "lazy":
            hint = "run the module once, so that its shapes are known"
        raise UsageError(f"{path_name(path)} is a {kind} tensor, which a checkpoint cannot hold", hint=hint)


def _strange_kind(tensor: torch.Tensor) -> str:
    """What a tensor without plain memory is; nothing for others, and for a DTensor, whose parts have it."""
    kinds = {
        "lazy": is_lazy(tensor),
        "nested": tensor.is_nested,
        "meta": tensor.is_meta,
        "quantized": tensor.is_quantized,
        str(tensor.layout): tensor.layout != torch.strided,
        type(tensor).__name__: isinstance(tensor, FakeTensor) or _wraps_others(tensor),
    }
    found = next((kind for kind, is_it in kinds.items() if is_it), "")
    if found or isinstance(tensor, DTensor) or not tensor.numel() or tensor.data_ptr():
        return found
    return "freed" if type(tensor) in _PLAIN else type(tensor).__name__


def _wraps_others(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, DTensor) and is_traceable_wrapper_subclass(tensor)


def flatten(objects: Objects) -> Flat:
    """Everything to be saved. The tensors are the live ones: nothing is copied."""
    flat = Flat()
    names = parameter_names(objects)
    for name, thing in objects.items():
        _add(flat, (name,), state_of(thing, names))
    return flat


def state_of(thing: Any, names: Mapping[int, str]) -> Any:
    """The state of one object: nested dictionaries with tensors and values."""
    if isinstance(thing, torch.optim.Optimizer):
        return _named_state(thing, names)
    if isinstance(thing, torch.nn.Module):
        state = bare(thing).state_dict()
        return {plain_name(key): value for key, value in state.items()}
    return thing.state_dict() if hasattr(thing, "state_dict") else thing


def bare(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside DDP and torch.compile."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), torch.nn.Module):
            module = inner
        else:
            return module


def plain_name(name: str) -> str:
    return name.replace("_orig_mod.", "")


def parameter_paths(objects: Objects) -> ParameterPaths:
    """The module of every parameter among these objects and its name in there, by its identity."""
    found: dict[int, tuple[str, str]] = {}
    for name, module in objects.items():
        if isinstance(module, torch.nn.Module):
            for key, parameter in bare(module).named_parameters():
                found.setdefault(id(parameter), (name, plain_name(key)))
    return found


def parameter_names(objects: Objects) -> dict[int, str]:
    """The name of every parameter of the modules among these objects, by its identity: with the name of its
    module where there are several."""
    several = sum(isinstance(one, torch.nn.Module) for one in objects.values()) > 1
    paths = parameter_paths(objects)
    return {one: ".".join(path) if several else path[1] for one, path in paths.items()}


def names_as_saved(
    optimizer: torch.optim.Optimizer, paths: ParameterPaths, saved: Collection[Any]
) -> dict[int, str]:
    """The names under which the parameters of an optimizer were saved: with their module's or without, since
    there may have been more or fewer modules beside it than now."""
    long = {one: ".".join(path) for one, path in paths.items()}
    short = {one: path[1] for one, path in paths.items()}
    for names in (long, short):
        keys = optimizer_keys(optimizer, names).values()
        if set(keys) == set(saved) and len(keys) == len(saved):
            return names
    return long if len({module for module, _ in paths.values()}) > 1 else short


def optimizer_keys(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[int, Any]:
    """The number of each parameter in the optimizer's own state_dict → its name, or its number again."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    return {number: names.get(id(one), number) for number, one in enumerate(parameters)}


def numbered_state(optimizer: torch.optim.Optimizer, state: Any, names: Mapping[int, str]) -> Any:
    """A named state back to what `optimizer.load_state_dict` takes."""
    numbers = {key: number for number, key in optimizer_keys(optimizer, names).items()}
    saved = [*state.get("state", {}), *(key for group in state["param_groups"] for key in group["params"])]
    missing = [key for key in saved if key not in numbers]
    if missing:
        raise UsageError(
            f"the checkpoint has optimizer state for {missing[0]!r}, which this optimizer does not hold",
            hint="give its module too, with the same parameters, or restore without it",
        )
    # torch matches by place, not by number: a model may register its parameters in another order now
    groups = [
        {**group, "params": sorted(numbers[key] for key in group["params"])}
        for group in state["param_groups"]
    ]
    _check_groups(optimizer, groups)
    return {
        **state,
        "state": {numbers[key]: one for key, one in state.get("state", {}).items()},
        "param_groups": groups,
    }


def _check_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Groups of as many parameters must be of the same ones; torch itself refuses other numbers of them."""
    first = 0
    for at, (mine, saved) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        here = range(first, first + len(mine["params"]))
        if len(here) == len(saved["params"]) and list(here) != saved["params"]:
            raise UsageError(
                f"group {at} of the optimizer has other parameters than the checkpoint's",
                hint="make the optimizer with the groups it was saved with, or restore without it",
            )
        first = here.stop


def _named_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Any:
    keys, state = optimizer_keys(optimizer, names), optimizer.state_dict()
    groups = [
        {**group, "params": [keys[number] for number in group["params"]]} for group in state["param_groups"]
    ]
    named = {keys[number]: one for number, one in state["state"].items()}
    return {**state, "state": named, "param_groups": groups}


def _add(flat: Flat, path: Path, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        if type(value) not in _PLAIN or value.is_nested:  # also where a plan is kept: it does not look again
            check_memory(path, value)
        flat.tensors[path] = value
    elif isinstance(value, Mapping) and value:
        for key, one in value.items():
            _add(flat, (*path, _step(path, key)), one)
    elif isinstance(value, (list, tuple)) and _is_nested(value):
        for at, one in enumerate(value):
            _add(flat, (*path, at), one)
    else:
        flat.values[path] = value


def _step(path: Path, key: Any) -> Any:
    """A key as a step of a path: it must come back from JSON as what it is."""
    if isinstance(key, str):
        return key if type(key) is str else str.__str__(key)
    if not _is_plain_key(key):
        raise UsageError(
            f"{path_name(path)} has the key {key!r}, a {type(key).__module__}.{type(key).__name__}, "
            "which a checkpoint cannot hold",
            hint="use text, numbers or tuples of them as keys",
        )
    return "k", key


def _is_plain_key(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(map(_is_plain_key, key))
    return key is None or isinstance(key, (str, int, float))


def _is_nested(value: list[Any] | tuple[Any, ...]) -> bool:
    """Lists are cut as torch.distributed.checkpoint cuts them, so that names are the same: where there is
    a tensor or a dictionary in them. A tuple only for its tensors: it comes back as a list."""
    inner = (torch.Tensor, Mapping) if isinstance(value, list) else torch.Tensor
    return any(
        isinstance(one, inner) or (isinstance(one, (list, tuple)) and _is_nested(one)) for one in value
    )


def nest(items: Iterator[tuple[Path, Any]]) -> Any:
    """Nested dictionaries and lists from values by path."""
    root: dict[Any, Any] = {}
    for path, value in items:
        here: Any = root
        for step, following in zip(path, (*path[1:], None), strict=True):
            key = step[1] if isinstance(step, tuple) else step
            if isinstance(here, list):
                here.extend([None] * (key + 1 - len(here)))
            if following is None:
                here[key] = value
                break
            inner = here[key] if isinstance(here, list) else here.get(key)
            if inner is None:
                inner = here[key] = [] if isinstance(following, int) else {}
            here = inner
    return root


# --- random generators --------------------------------------------------------------------------------


def random_state() -> dict[Path, Any]:
    """The state of every random generator of this process."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[Path, Any] = {
        ("python",): random.getstate(),
        ("numpy",): (kind, np.asarray(keys), position, has_gauss, gauss),
        ("torch",): torch.get_rng_state().numpy(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state[("cuda",)] = torch.cuda.get_rng_state().numpy()
    return state


def set_random_state(state: Mapping[Path, Any]) -> None:
    if ("python",) in state:
        version, keys, gauss = state[("python",)]
        random.setstate((version, tuple(keys), gauss))
    if ("numpy",) in state:
        np.random.set_state(state[("numpy",)])
    if ("torch",) in state:
        torch.set_rng_state(torch.from_numpy(state[("torch",)]))
    if ("cuda",) in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(state[("cuda",)]))
