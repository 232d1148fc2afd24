"""Flattening, cached: the flat state is kept between saves while the objects hold the same tensors.

To walk twenty thousand tensors by name takes a third of a second, to see that they are the same ones a small
part of that. Modules and optimizers that keep their state as torch's own do are looked at so; everything
else, and everything once a tensor was added, removed, replaced or moved, is flattened anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Any, Protocol

import torch
from torch.nn import Module
from torch.optim import Optimizer

from stoker.checkpoint.saved.layout import Path
from stoker.checkpoint.snapshot.plan import Plan, is_put_off
from stoker.checkpoint.snapshot.state import DTensor, Flat, Objects, add, bare, flatten

_SCALARS = (type(None), bool, int, float, str)
_LOOKS: tuple[tuple[Callable[[torch.Tensor], Any], Callable[[Any, Any], bool]], ...] = (
    (torch.Tensor.data_ptr, eq),
    (attrgetter("dtype"), is_),
    (attrgetter("shape"), eq),
    (torch.Tensor.stride, eq),
)  # what `_mark` is made of, and how it is compared


class Kept:
    """Flattens objects, and remembers."""

    def __init__(self) -> None:
        self._generation = 0  # of what is remembered: equal for flats that hold the same tensors
        self._forget()

    def _forget(self, *_: Any) -> None:
        """What was flattened is not held when its owner is gone."""
        self._watches: dict[str, _Watch] = {}
        self._owners: dict[str, Any] = {}
        self._live: tuple[Plan, int, list[torch.Tensor | None]] | None = None

    def flatten(self, objects: Objects) -> Flat:
        flat = self._again(objects)
        if flat is None:
            flat = flatten(objects)
            self._remember(objects, flat)
        flat.generation = self._generation
        flat.fresh = frozenset(name for name in objects if name not in self._watches)
        return flat

    def tensors(self, plan: Plan, flat: Flat) -> list[torch.Tensor]:
        """What to copy for each write of a plan."""
        live = self._live
        if live is None or live[0] is not plan or live[1] != flat.generation:
            found = plan.tensors(flat)
            paths = [write.path for write in plan.writes]
            kept = [
                None if path[0] in flat.fresh or is_put_off(flat.tensors[path]) else one
                for path, one in zip(paths, found, strict=True)
            ]
            self._live = plan, flat.generation, kept
            return found
        pairs = zip(live[2], plan.writes, strict=True)
        return [plan.tensor(flat, write) if one is None else one for one, write in pairs]

    def _again(self, objects: Objects) -> Flat | None:
        """The same tensors and the values of now, if nothing has changed but values."""
        if not self._watches or objects.keys() != self._owners.keys():
            return None
        flat = Flat()
        for name, watch in self._watches.items():
            if self._owners[name]() is not objects[name] or not watch.is_same() or not watch.add_to(flat):
                return None
        if len(self._watches) < len(objects):
            rest = flatten(objects, only=objects.keys() - self._watches.keys())
            flat.tensors.update(rest.tensors)
            flat.values.update(rest.values)
        return flat

    def _remember(self, objects: Objects, flat: Flat) -> None:
        self._forget()
        self._generation += 1
        for name, thing in objects.items():
            self._owners[name] = None
            watch = _watch(name, thing, flat)
            if watch is not None:
                self._watches[name] = watch
                self._owners[name] = weakref.ref(thing, self._forget)
        if any(isinstance(thing, Module) and name not in self._watches for name, thing in objects.items()):
            # the names in an optimizer's state are those of the modules: it cannot be known to be the same
            some = self._watches.items()
            self._watches = {name: one for name, one in some if isinstance(one, _WatchedModule)}


class _Watch(Protocol):
    def is_same(self) -> bool: ...
    def add_to(self, flat: Flat) -> bool: ...


def _watch(name: str, thing: Any, flat: Flat) -> _Watch | None:
    if isinstance(thing, Module) and all(map(_is_plain, bare(thing).modules())):
        watch = _WatchedModule(name, thing, flat)
        return watch if watch.holds_its_state else None
    if isinstance(thing, Optimizer) and _is_plain_optimizer(thing):
        return _WatchedOptimizer(name, thing, flat)
    return None


class _Memory:
    """Where tensors lie: `.data` and `set_` put other memory under the same tensor."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._plain = [one for one in tensors if not isinstance(one, DTensor)]
        # Few shapes make many tensors: equal marks are one object, or comparing would wait for memory.
        one_of: dict[Any, Any] = {}
        self._marks = [
            [one_of.setdefault(mark, mark) for mark in map(look, self._plain)] for look, _ in _LOOKS
        ]
        cut = [one for one in tensors if isinstance(one, DTensor)]
        self._cut = [(one, one._spec, *_mark(one._local_tensor)) for one in cut]

    def is_same(self) -> bool:
        # One by one: lists of what is only compared would keep the garbage collector busy. One thing of all
        # after the other: 20,000 tensors take 6 ms so, and 15 ms if all is asked of each.
        looks = zip(_LOOKS, self._marks, strict=True)
        return all(all(map(same, map(look, self._plain), marks)) for (look, same), marks in looks) and all(
            one._spec == spec and _mark(one._local_tensor) == (at, dtype, shape, stride)
            for one, spec, at, dtype, shape, stride in self._cut
        )


def _mark(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _at(tensor: torch.Tensor) -> tuple[Any, ...]:
    return _mark(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)


def _are(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether these are the same things; equal ones would not do."""
    return len(now) == len(before) and all(map(is_, now, before))


# --- modules ------------------------------------------------------------------------------------------


class _WatchedModule:
    """A module whose state is its parameters and buffers, and those of the modules in it."""

    def __init__(self, name: str, module: Module, flat: Flat) -> None:
        self._modules = [weakref.ref(one) for one in bare(module).modules()]
        self._tensors = {path: one for path, one in flat.tensors.items() if path[0] == name}
        self._values = {path: one for path, one in flat.values.items() if path[0] == name}
        self._things, self._names = self._look()
        # of the parameters themselves: those in a state_dict are aliases, which `.data` leaves behind
        self._memory = _Memory([one for one in self._things if one is not None])

    @property
    def holds_its_state(self) -> bool:
        """Whether its state is the memory of its tensors, by whatever ways it was made: no copies of them."""
        own = {_at(one) for one in self._things if one is not None}
        return all(_at(one) in own for one in self._tensors.values())

    def is_same(self) -> bool:
        things, names = self._look()
        return names == self._names and _are(things, self._things) and self._memory.is_same()

    def add_to(self, flat: Flat) -> bool:
        flat.tensors.update(self._tensors)
        flat.values.update(self._values)
        return True

    def _look(self) -> tuple[list[Any], list[Any]]:
        # by identity: a module may have a length, as a compiled one that cannot say it, or one of none
        modules = [found for one in self._modules if (found := one()) is not None]
        if len(modules) < len(self._modules):
            return [], []
        mine: list[Any] = [some for one in modules for some in (one._parameters, one._buffers)]
        inner: list[Any] = [one._modules for one in modules]
        hooks = [len(one._state_dict_hooks) + len(one._state_dict_pre_hooks) for one in modules]
        hidden = [set(some) if (some := one._non_persistent_buffers_set) else None for one in modules]
        names = [*chain.from_iterable(mine), *map(len, mine), *chain.from_iterable(inner), *map(len, inner)]
        # children by their numbers: only their owner may hold them
        children = map(id, chain.from_iterable(one.values() for one in inner))
        things = [*chain.from_iterable(one.values() for one in mine)]
        return things, [*names, *children, *hooks, *hidden]


def _is_plain(module: Module) -> bool:
    kind = type(module)
    return (
        kind.state_dict is Module.state_dict
        and kind._save_to_state_dict is Module._save_to_state_dict
        and kind.get_extra_state is Module.get_extra_state
        and "state_dict" not in vars(module)
        and not module._state_dict_hooks
        # FSDP2's puts its parameters back, which are others while they are away
        and all(_home(hook).startswith("torch.distributed") for hook in module._state_dict_pre_hooks.values())
    )


def _home(hook: Callable[..., Any]) -> str:
    return str(getattr(hook, "__module__", ""))


# --- optimizers ---------------------------------------------------------------------------------------


class _WatchedOptimizer:
    """An optimizer whose state is, for each parameter, a dictionary of tensors and numbers."""

    def __init__(self, name: str, optimizer: Optimizer, flat: Flat) -> None:
        self._optimizer = weakref.ref(optimizer)
        mine = [path for path in flat.tensors if path[0] == name]
        self._groups_path: Path = (name, "param_groups")
        self._tensors = {path: flat.tensors[path] for path in mine}
        self._in_groups = [path for path in mine if path[1] != "state"]  # a learning rate may be a tensor
        self._keys = [
            flat.values.get((*self._groups_path, at, "params"), [])
            for at in range(len(optimizer.param_groups))
        ]
        self._values = {
            path: one for path, one in flat.values.items() if path[0] == name and path[1] == "state"
        }
        self._numbers = _numbers(optimizer, [path for path, one in self._values.items() if one != {}])
        self._things, self._names = self._look()
        self._memory = _Memory([*self._tensors.values()])

    def is_same(self) -> bool:
        things, names = self._look()
        return names == self._names and _are(things, self._things) and self._memory.is_same()

    def add_to(self, flat: Flat) -> bool:
        """Its groups are read again: learning rates change."""
        optimizer = self._optimizer()
        if optimizer is None:
            return False
        flat.tensors.update(self._tensors)
        flat.values.update(self._values)
        flat.values.update((path, slots[slot]) for path, (slots, slot) in self._numbers.items())
        groups = Flat()
        for at, (group, keys) in enumerate(zip(optimizer.param_groups, self._keys, strict=True)):
            path: Path = (*self._groups_path, at, "params")
            groups.values[path] = keys
            rest = {key: one for key, one in group.items() if key != "params"}
            add(groups, (*self._groups_path, at), rest)
        flat.values.update(groups.values)
        kept = [self._tensors[path] for path in self._in_groups]
        return [*groups.tensors] == self._in_groups and _are([*groups.tensors.values()], kept)

    def _look(self) -> tuple[list[Any], list[Any]]:
        optimizer = self._optimizer()
        if optimizer is None or not _is_plain_optimizer(optimizer, deep=False):
            return [], []
        slots = [*optimizer.state.values()]
        things = [*chain.from_iterable(one.values() for one in slots)]
        things = [one if isinstance(one, torch.Tensor) else type(one) for one in things]
        groups = [group["params"] for group in optimizer.param_groups]
        names = [*chain.from_iterable(slots), *map(len, slots), *map(len, groups)]
        return [*things, *slots, *optimizer.state, *chain.from_iterable(groups)], names


def _numbers(optimizer: Optimizer, paths: Sequence[Path]) -> dict[Path, tuple[dict[str, Any], str]]:
    """Where the numbers in the state stand: they change without anything being replaced."""
    if not paths:
        return {}
    wanted: dict[Any, list[Path]] = {}
    for path in paths:
        wanted.setdefault(path[3], []).append(path)
    found: dict[Path, tuple[dict[str, Any], str]] = {}
    for slot, some in wanted.items():
        holders = [
            slots for slots in optimizer.state.values() if slot in slots and isinstance(slots[slot], _SCALARS)
        ]
        found.update((path, (slots, slot)) for path, slots in zip(some, holders, strict=True))
    return found


def _is_plain_optimizer(optimizer: Optimizer, *, deep: bool = True) -> bool:
    if type(optimizer).state_dict is not Optimizer.state_dict or "state_dict" in vars(optimizer):
        return False  # a wrapper's, such as accelerate's, may not even have the fields of an optimizer
    if optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks:
        return False
    return not deep or all(
        isinstance(slots, dict)
        and all(isinstance(one, (torch.Tensor, *_SCALARS)) for one in slots.values())
        and all(type(key) is str for key in slots)
        for slots in optimizer.state.values()
    )
