"""state_dict, flattened: tensors by path, plain values by path; and put back again.

An object is a module, an optimizer, anything with `state_dict`, a dictionary, or a plain value. The names
in a checkpoint do not depend on wrappers: DDP's `module.` and torch.compile's `_orig_mod.` are left out,
and the state of an optimizer is named after its parameters, not numbered, wherever the module that owns
them is saved beside it.

One optimizer, `optimizer=opt`, its parameter `layer.weight` of `model=model`; where it is named how:

    optimizer.state_dict()         state → 0 → exp_avg              numbered, as torch has it
    in a Flat, a Plan and on disk  ("optimizer", "state", "layer.weight", "exp_avg")      `_named_state`
    two modules saved beside it    ("optimizer", "state", "model.layer.weight", "exp_avg")
    no module beside it            ("optimizer", "state", ("k", 0), "exp_avg")            numbers stay
    at a restore                   `names_as_saved` finds which of these it was, `numbered_state` goes back
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stoker.checkpoint.saved.apart import MARK
from stoker.checkpoint.saved.layout import Path, path_name
from stoker.checkpoint.saved.values import is_kept_mapping, unnested
from stoker.errors import UsageError

try:
    from torch.distributed.tensor import DTensor as DTensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor as DTensor  # type: ignore[attr-defined]

try:
    from torch.distributed.fsdp import FSDPModule
except ImportError:  # torch 2.4
    from torch.distributed._composable.fsdp import FSDPModule  # type: ignore[attr-defined]

Objects = Mapping[str, Any]  # what the user saves, by name; Any: modules, optimizers, dictionaries, values
RESERVED = frozenset(  # options of save and restore: what has such a name could not be given to both
    ("self", "final", "metric", "pin", "name", "source", "strict", "rename", "mismatched", "dtypes")
)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
ParameterPaths = Mapping[int, tuple[str, str]]  # a parameter's identity → its module's name, its own in there


@dataclass(kw_only=True, slots=True)
class Flat:
    """Tensors and plain values by path."""

    tensors: dict[Path, torch.Tensor] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)
    generation: int = -1  # the same for flats that hold the same tensors, but for
    fresh: frozenset[str] = frozenset()  # objects that are flattened anew each time

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


def flatten(objects: Objects, *, only: Collection[str] | None = None) -> Flat:
    """Everything to be saved, or these objects of it. The tensors are the live ones: nothing is copied."""
    flat = Flat()
    mine = {name: thing for name, thing in objects.items() if only is None or name in only}
    for name, thing in mine.items():
        check_object(name, thing)
    has_optimizer = any(isinstance(thing, torch.optim.Optimizer) for thing in mine.values())
    names = parameter_names(objects) if has_optimizer else {}
    for name, thing in mine.items():
        with unnested(name):
            add(flat, (name,), state_of(thing, names))
    return flat


def check_object(name: str, thing: Any) -> None:
    """Refuse by name what would be saved wrong."""
    if name in RESERVED:
        raise UsageError(
            f"{name!r} is a word of save() and restore(), and no object can be called so",
            hint="give the object another name"
            + (f"; save(step, {name}=...) takes a {name}" if name in ("metric", "pin") else ""),
        )
    if MARK in name:
        raise UsageError(f"{name!r} has a {MARK!r} in it", hint="that marks what ranks do not hold alike")
    if _is_fsdp1(thing):
        raise UsageError(
            f"{name} is wrapped in FullyShardedDataParallel (FSDP1), whose flat parameters have no names",
            hint="shard it with torch.distributed.fsdp.fully_shard (FSDP2), or give dictionaries of "
            "torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer) with "
            "StateDictOptions(full_state_dict=True)",
        )

    if isinstance(thing, torch.optim.Optimizer) and hasattr(thing, "consolidate_state_dict"):
        raise UsageError(
            f"{name} is a {type(thing).__name__}, of whose state each rank holds a part that nobody names",
            hint="shard the model with torch.distributed.fsdp.fully_shard (FSDP2), or call "
            "consolidate_state_dict(to=0) on all ranks and give its state_dict() on rank 0, {} elsewhere",
        )


def _is_fsdp1(thing: Any) -> bool:
    """Whether a module, or the parameters of an optimizer, belong to FSDP1."""
    if isinstance(thing, torch.nn.Module):
        return any(isinstance(one, FullyShardedDataParallel) for one in thing.modules())
    if isinstance(thing, torch.optim.Optimizer):
        parameters = (one for group in thing.param_groups for one in group["params"])
        return any(hasattr(one, "_is_flat_param") or hasattr(one, "_fsdp_flattened") for one in parameters)
    return False


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


def named_parameters(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters that an optimizer holds, by every name they have. FSDP2 has others in their place
    between a forward and its backward, and after an evaluation: it is made to put them back."""
    inner = bare(module)
    for one in inner.modules():
        if isinstance(one, FSDPModule):
            one.reshard()
    return list(inner.named_parameters(remove_duplicate=False))


def is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step calls the hooks that torch has for all optimizers."""
    return bool(getattr(type(optimizer).step, "hooked", False))


def parameter_paths(objects: Objects) -> ParameterPaths:
    """The module of every parameter among these objects and its name in there, by its identity."""
    found: dict[int, tuple[str, str]] = {}
    for name, module in objects.items():
        if isinstance(module, torch.nn.Module):
            for key, parameter in named_parameters(module):
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
    for names in (long, short, {}):  # and numbers: as it is without its module, or as others save it
        keys = optimizer_keys(optimizer, names).values()
        if set(keys) == set(saved) and len(keys) == len(saved):
            return names
    return long if len({module for module, _ in paths.values()}) > 1 else short


def optimizer_keys(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[int, Any]:
    """The number of each parameter in the optimizer's own state_dict → its name, or its number again."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    return {number: names.get(id(one), number) for number, one in enumerate(parameters)}


def numbered_state(optimizer: torch.optim.Optimizer, state: Any, names: Mapping[int, str]) -> Any:
    """A named state, all of whose names this optimizer knows, back to what `load_state_dict` takes."""
    numbers = {key: number for number, key in optimizer_keys(optimizer, names).items()}
    # torch matches by place, not by number: a model may register its parameters in another order now
    groups = [
        {**group, "params": sorted(numbers[key] for key in group["params"])}
        for group in state["param_groups"]
    ]
    return {
        **state,
        "state": {numbers[key]: one for key, one in state.get("state", {}).items()},
        "param_groups": _whole_groups(optimizer, groups),
    }


def _whole_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Groups with all parameters of the optimizer's own: some may not have been saved. Those that were must
    be in the same group now; other numbers of groups torch refuses itself."""
    first, found = 0, []
    for at, saved in enumerate(groups):
        mine = optimizer.param_groups[at]["params"] if at < len(optimizer.param_groups) else []
        here = range(first, first + len(mine))
        if len(groups) == len(optimizer.param_groups) and not set(saved["params"]) <= set(here):
            raise UsageError(
                f"group {at} of the optimizer has other parameters than the checkpoint's",
                hint="make the optimizer with the groups it was saved with, or restore without it",
            )
        found.append({**saved, "params": list(here)})
        first = here.stop
    return found


def _named_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Any:
    keys, state = optimizer_keys(optimizer, names), optimizer.state_dict()
    groups = [
        {**group, "params": [keys[number] for number in group["params"]]} for group in state["param_groups"]
    ]
    named = {keys[number]: one for number, one in state["state"].items()}
    return {**state, "state": named, "param_groups": groups}


def add(flat: Flat, path: Path, value: Any) -> None:
    """What stands at a path, and all that is in it."""
    if isinstance(value, torch.Tensor):
        if type(value) not in _PLAIN or value.is_nested:  # also where a plan is kept: it does not look again
            check_memory(path, value)
        flat.tensors[path] = value
    elif isinstance(value, Mapping) and value and not (is_kept_mapping(value) and _holds_none(value)):
        for key, one in value.items():
            add(flat, (*path, _step(path, key)), one)
    elif isinstance(value, (list, tuple)) and _is_nested(value):
        for at, one in enumerate(value):
            add(flat, (*path, at), one)
    else:
        flat.values[path] = value


def _holds_none(value: Any) -> bool:
    """Whether no tensor stands anywhere in it."""
    if isinstance(value, Mapping):
        return all(map(_holds_none, value.values()))
    return all(map(_holds_none, value)) if isinstance(value, (list, tuple)) else not torch.is_tensor(value)


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
    """Nested dictionaries and lists from values by path. What one rank saved as empty hides nothing that
    another saved in it."""
    root: dict[Any, Any] = {}
    for path, value in items:
        here: Any = root
        for step, following in zip(path, (*path[1:], None), strict=True):
            key = step[1] if isinstance(step, tuple) else step
            if isinstance(here, list):
                here.extend([None] * (key + 1 - len(here)))
            inner = here[key] if isinstance(here, list) else here.get(key)
            if following is None:
                if inner is None or not (isinstance(value, (dict, list)) and not value):
                    here[key] = value
                break
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
