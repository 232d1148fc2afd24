"""A checkpoint back into live objects.

Every kind of object says which tensors it wants read, and where to; values are handed over only after every
tensor was read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stoker.checkpoint.agree import Rounds
from stoker.errors import BadCheckpointError, StokerError, UsageError
from stoker.saved.layout import Box, Path, path_name
from stoker.saved.reader import Checkpoint
from stoker.saved.tiers import FAR, Tiers
from stoker.saved.values import decode
from stoker.snapshot.state import (
    DTensor,
    Objects,
    ParameterPaths,
    bare,
    check_memory,
    flatten,
    names_as_saved,
    nest,
    numbered_state,
    optimizer_keys,
    parameter_paths,
    plain_name,
    set_random_state,
)
from stoker.snapshot.tensors import Saved, new_tensor, read_tensors, torch_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What came back. `step` is 0 and `name` empty when there was no checkpoint: a fresh start."""

    step: int = 0
    name: str = ""
    extras: dict[str, Any] = field(default_factory=dict)  # Any: the plain values that were saved
    skipped: tuple[str, ...] = ()  # newer checkpoints that could not be used, and why

    @property
    def fresh(self) -> bool:
        return not self.name


def restore_newest(tiers: Tiers, rounds: Rounds, objects: Objects, *, name: str, strict: bool) -> Restored:
    """Bring objects back to the newest checkpoint that all ranks can read, or to the one of this name; a
    fresh start when there is none at all."""
    skipped: list[str] = []
    candidates, tried = _Candidates(tiers, name, skipped), False
    while chosen := rounds.told(candidates.next):
        saved: Saved | None = None
        error: StokerError | None = None
        try:
            saved = Saved(candidates.opened(chosen), rank=rounds.world.rank)
            extras = restore_objects(saved, objects, strict=strict)
        except StokerError as bad:
            error = bad
        failure = rounds.all_well(error)
        if not failure and saved is not None:
            set_random_state(saved.own)
            extras.update(saved.extras(objects))
            found = saved.checkpoint
            return Restored(step=found.step, name=found.name, extras=extras, skipped=tuple(skipped))
        skipped.append(f"{chosen}: {failure}")
        tried = True
    if lost := rounds.told(candidates.lost):
        raise _none_usable(tiers, lost, tried=tried)
    if name:
        raise UsageError(f"{tiers.root} has no checkpoint {name}", hint="`stoker checkpoint ls` lists them")
    return Restored()


def _none_usable(tiers: Tiers, lost: str, *, tried: bool) -> BadCheckpointError:
    """Where there are checkpoints and all are unusable, a fresh start would hide what is lost."""
    cure = "copy a good one back, or name another folder; to begin anew, delete them"
    if tried:
        cure += ". The objects may hold parts of a damaged one: start again with new ones"
    return BadCheckpointError(f"no checkpoint in {tiers.root} could be restored: {lost}", hint=cure)


class _Candidates:
    """The copies that are whole, the best first. Only rank 0 looks for them; the others open what it says."""

    def __init__(self, tiers: Tiers, name: str, skipped: list[str]) -> None:
        self._tiers, self._name, self._skipped = tiers, name, skipped
        self._left: list[str] | None = None
        self._some = False
        self._last: tuple[str, Checkpoint | None] = ("", None)

    def next(self) -> str:
        """The next one, or nothing."""
        if self._left is None:
            copies = self._tiers.copies(said=self._skipped)
            self._left = [one for one in copies if self._name in ("", one.removesuffix(FAR))]
            self._some = bool(self._left)
        while self._left:
            chosen = self._left.pop(0)
            for found in self._tiers.whole([chosen], skipped=self._skipped):
                self._last = (chosen, found)
                return chosen
        return ""

    def lost(self) -> str:
        """Once none is left: why none could be used, or nothing if there never was one."""
        return "; ".join(self._skipped) if self._some else ""

    def opened(self, chosen: str) -> Checkpoint:
        """What was chosen; rank 0 has read its descriptions already, when it checked it."""
        name, found = self._last
        self._last = ("", None)
        return found if found is not None and name == chosen else self._tiers.checkpoint(chosen)


def restore_objects(saved: Saved, objects: Objects, *, strict: bool) -> dict[str, Any]:
    """Bring objects back to what they were; gives the state of those that cannot take it themselves."""
    paths = parameter_paths(objects)
    found = (_want(name, thing, saved, paths, strict=strict) for name, thing in objects.items())
    wanted = [want for want in found if want.tensors or want.values]  # the rest was not saved
    read_tensors(saved, {path: tensor for want in wanted for path, tensor in want.tensors.items()})
    given = {}
    for want in wanted:
        state = nest(iter({**want.tensors, **want.values}.items())).get(want.name, {})
        if want.apply is None:
            given[want.name] = state
        else:
            want.apply(state)
    return given


def load_state(saved: Saved, *, keys: Sequence[str] = ("",)) -> dict[str, Any]:
    """The saved state itself, in new tensors on the CPU; only what begins with one of these keys."""
    tensors = {
        saved.box(name).path: new_tensor(saved.box(name))
        for name in saved.pieces
        if name.startswith(tuple(keys))
    }
    read_tensors(saved, tensors)
    values = {
        path: decode(value) for path, value in saved.values.items() if path_name(path).startswith(tuple(keys))
    }
    found: dict[str, Any] = nest(iter({**tensors, **values}.items()))
    return found


# --- what an object wants -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Want:
    """Tensors to read into, values to hand over, and what to do with both in the end."""

    name: str
    tensors: dict[Path, torch.Tensor]
    values: dict[Path, Any]
    apply: Callable[[Any], None] | None


def _want(name: str, thing: Any, saved: Saved, paths: ParameterPaths, *, strict: bool) -> _Want:
    if isinstance(thing, torch.nn.Module):
        return _want_module(name, thing, saved, strict=strict)
    if isinstance(thing, torch.optim.Optimizer):
        return _want_optimizer(name, thing, saved, paths, strict=strict)
    live = flatten({name: thing}).tensors if hasattr(thing, "state_dict") or isinstance(thing, dict) else {}
    tensors = {path: _target(saved.box(path_name(path)), live.get(path)) for path in saved.tensor_paths(name)}
    values = saved.values_under(name)
    if strict and not tensors and not values:
        raise _missing([name], saved)
    apply: Callable[[Any], None] | None = None
    if hasattr(thing, "load_state_dict"):
        apply = thing.load_state_dict
    elif isinstance(thing, dict):
        apply = thing.update
    return _Want(name=name, tensors=tensors, values=values, apply=apply)


def _want_module(name: str, module: torch.nn.Module, saved: Saved, *, strict: bool) -> _Want:
    inner = bare(module)
    original = {plain_name(key): key for key in inner.state_dict()}
    live = {(name, plain_name(key)): value for key, value in inner.state_dict().items()}
    tensors = {path: one for path, one in live.items() if isinstance(one, torch.Tensor)}
    values, there = saved.values_under(name), saved.tensor_paths(name)
    # a module's extra state may be any dictionary with tensors in it
    inside = [path for path in there if path not in tensors and path[:2] in live]
    unknown = [path for path in (*there, *values) if path[1:] and path[:2] not in live]
    found = {path[:2] for path in (*there, *values)}
    missing = [path for path in live if path not in found]
    if strict and (missing or unknown):
        raise _missing([path_name(path) for path in missing], saved, unknown=unknown)
    tensors = {path: one for path, one in tensors.items() if path_name(path) in saved.pieces}
    for path, one in tensors.items():
        if not one.is_meta:  # that one is said where it is read into, with its cure
            check_memory(path, one)
    tensors.update((path, new_tensor(saved.box(path_name(path)))) for path in inside)
    values = {path: value for path, value in values.items() if path[:2] in live}
    owned = {
        one.data_ptr() for one in (*inner.parameters(), *inner.buffers()) if not isinstance(one, DTensor)
    }
    direct = all(isinstance(one, DTensor) or one.data_ptr() in owned for one in tensors.values())

    def apply(state: Any) -> None:
        if values or not direct:  # else the tensors read into are the module's own
            inner.load_state_dict({original[key]: value for key, value in state.items()}, strict=strict)

    return _Want(name=name, tensors=tensors, values=values, apply=apply)


def _target(box: Box, like: torch.Tensor | None) -> torch.Tensor:
    """Where a saved tensor goes: the live one, or a new one that is placed like it."""
    return _placed(box, like) if like is None or tuple(like.shape) != box.shape else like


def _placed(box: Box, like: torch.Tensor | None) -> torch.Tensor:
    """A new tensor that is sharded and placed like another, if that has its shape."""
    if like is None or tuple(like.shape) != box.shape:
        device = like.device if like is not None and box.shape else torch.device("cpu")
        return new_tensor(box, device=device)
    return torch.empty_like(like, dtype=torch_dtype(box.dtype), requires_grad=False)


def _missing(names: Sequence[str], saved: Saved, *, unknown: Sequence[Path] = ()) -> UsageError:
    parts = []
    if names:
        parts.append(f"lacks {len(names)} of what is to be restored, {names[0]!r} first")
    if unknown:
        parts.append(
            f"has {len(unknown)} tensors or values that have no place here, {path_name(unknown[0])!r} first"
        )
    return UsageError(
        f"{saved.checkpoint.name} {' and '.join(parts)}",
        hint="give the objects that were saved, under the same names, or strict=False",
    )


# --- optimizers ---------------------------------------------------------------------------------------


def _want_optimizer(
    name: str, optimizer: torch.optim.Optimizer, saved: Saved, paths: ParameterPaths, *, strict: bool
) -> _Want:
    values = saved.values_under(name)
    groups = [value for path, value in values.items() if path[1:2] + path[3:] == ("param_groups", "params")]
    if not groups and (strict or values):
        raise _missing([f"{name}.param_groups"], saved)
    names = names_as_saved(optimizer, paths, [key for group in groups for key in group])

    def apply(state: Any) -> None:
        numbered = numbered_state(optimizer, state, names)
        given = numbered["state"]
        try:
            optimizer.load_state_dict(numbered)
        except ValueError as error:
            raise UsageError(
                f"{name} does not take what {saved.checkpoint.name} holds: {error}",
                hint="make the optimizer with the groups it was saved with, or restore without it",
            ) from error
        for number, parameter in enumerate(_parameters(optimizer)):
            if number in given and _has_its_dtype(parameter, saved, paths):
                _undo_casts(optimizer.state.get(parameter), given[number])

    tensors = _optimizer_tensors(name, optimizer, saved, names)
    return _Want(name=name, tensors=tensors, values=values, apply=apply)


def _optimizer_tensors(
    name: str, optimizer: torch.optim.Optimizer, saved: Saved, names: Mapping[int, str]
) -> dict[Path, torch.Tensor]:
    """Where the tensors go: live ones, new ones like their parameter, or plain ones beside `state`."""
    keys, parameters = optimizer_keys(optimizer, names), _parameters(optimizer)
    by_key = {keys[number]: parameter for number, parameter in enumerate(parameters)}
    found: dict[Path, torch.Tensor] = {}
    for path in saved.tensor_paths(name):
        box = saved.box(path_name(path))
        if path[1] != "state" or len(path) < 4:
            found[path] = new_tensor(box)
            continue
        key = path[2][1] if isinstance(path[2], tuple) else path[2]
        if key in by_key:
            live = optimizer.state.get(by_key[key], {}).get(path[3]) if len(path) == 4 else None
            found[path] = _state_target(box, live, by_key[key])
    return found


def _state_target(box: Box, live: Any, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(live, torch.Tensor):
        return _placed(box, parameter)
    return _target(box, live) if live.dtype == torch_dtype(box.dtype) else _placed(box, live)


def _has_its_dtype(parameter: torch.Tensor, saved: Saved, paths: ParameterPaths) -> bool:
    """Whether a parameter still has the dtype that it was saved with, as far as that is known."""
    name = path_name(paths.get(id(parameter), ()))
    return name not in saved.pieces or torch_dtype(saved.box(name).dtype) == parameter.dtype


def _undo_casts(loaded: Any, given: Any) -> Any:
    """What was loaded, with tensors as they were saved: `load_state_dict` casts them to the dtype of their
    parameter, which rounds the float32 copies that some optimizers keep of bfloat16 weights."""
    if isinstance(loaded, torch.Tensor) and isinstance(given, torch.Tensor):
        return given.to(loaded.device) if loaded.dtype != given.dtype else loaded
    if isinstance(loaded, dict) and isinstance(given, dict):
        loaded.update({key: _undo_casts(loaded[key], given[key]) for key in loaded.keys() & given.keys()})
    elif isinstance(loaded, list) and isinstance(given, list) and len(loaded) == len(given):
        loaded[:] = [_undo_casts(*pair) for pair in zip(loaded, given, strict=True)]
    return loaded


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]
