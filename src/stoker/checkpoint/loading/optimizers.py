"""Load targets of optimizers: their state follows their parameters, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stoker.checkpoint.loading.match import Loading, Match, stranger
from stoker.checkpoint.loading.wants import Want, placed, target
from stoker.checkpoint.saved.layout import Box, Path, path_name
from stoker.checkpoint.snapshot.state import ParameterPaths, names_as_saved, numbered_state, optimizer_keys
from stoker.checkpoint.snapshot.tensors import Saved, new_tensor, torch_dtype
from stoker.errors import UsageError


def want_optimizer(
    name: str,
    optimizer: torch.optim.Optimizer,
    saved: Saved,
    paths: ParameterPaths,
    policy: Loading,
    said: Match,
) -> Want:
    values = saved.optimizer_values(name)
    groups = [value for path, value in values.items() if path[1:2] + path[3:] == ("param_groups", "params")]
    if not groups:
        said.missing.append(f"{name}.param_groups")
        return Want(name=name, tensors={}, values={}, apply=None)
    saved_keys = [key for group in groups for key in group]
    names = names_as_saved(optimizer, paths, saved_keys)
    by_key = _by_key(optimizer, names)
    _match_keys(name, saved_keys, by_key, said)
    tensors, skipped = _tensors(name, optimizer, saved, by_key, paths, policy, said)
    values = {
        path: _held(path, value, by_key) for path, value in values.items() if _is_held(path, by_key, skipped)
    }
    said.names += map(path_name, (*tensors, *values))

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
        for number, parameter in enumerate(parameters_of(optimizer)):
            if number in given and _has_its_dtype(parameter, saved, paths):
                _undo_casts(optimizer.state.get(parameter), given[number])

    return Want(name=name, tensors=tensors, values=values, apply=apply)


def _by_key(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[Any, torch.Tensor]:
    keys = optimizer_keys(optimizer, names)
    return {keys[number]: parameter for number, parameter in enumerate(parameters_of(optimizer))}


def _match_keys(name: str, saved: Sequence[Any], by_key: Mapping[Any, torch.Tensor], said: Match) -> None:
    strangers = [key for key in saved if key not in by_key]
    said.strangers += map(str, strangers)
    known = set(saved)
    said.missing += [f"{name}.state.{key}" for key in by_key if key not in known]
    if strangers and not known & set(by_key):  # nothing of it is ours: a mistake, however lenient one is
        raise stranger(strangers[0])


def _key(path: Path) -> Any:
    return path[2][1] if isinstance(path[2], tuple) else path[2]


def _is_held(path: Path, by_key: Mapping[Any, Any], skipped: set[Any]) -> bool:
    return path[1] != "state" or len(path) < 3 or (_key(path) in by_key and _key(path) not in skipped)


def _held(path: Path, value: Any, by_key: Mapping[Any, Any]) -> Any:
    """Of the names in a group those that this optimizer holds."""
    if path[1:2] + path[3:] != ("param_groups", "params"):
        return value
    return [key for key in value if key in by_key]


def _tensors(
    name: str,
    optimizer: torch.optim.Optimizer,
    saved: Saved,
    by_key: Mapping[Any, torch.Tensor],
    paths: ParameterPaths,
    policy: Loading,
    said: Match,
) -> tuple[dict[Path, torch.Tensor], set[Any]]:
    """Where the tensors go: live ones, new ones like their parameter, or plain ones beside `state`; and the
    parameters whose state is left alone."""
    found: dict[Path, torch.Tensor] = {}
    skipped: set[Any] = set()
    for path in saved.tensor_paths(name):
        box = saved.box(path_name(path))
        if path[1] != "state" or len(path) < 4:
            found[path] = new_tensor(box)
            continue
        key = _key(path)
        if key not in by_key or key in skipped:
            continue
        parameter = by_key[key]
        live = optimizer.state.get(parameter, {}).get(path[3]) if len(path) == 4 else None
        was = _shape_saved(parameter, saved, paths)
        if not _fits(box, live, parameter, was, policy, said):
            skipped.add(key)
            found = {one: tensor for one, tensor in found.items() if one[1] != "state" or _key(one) != key}
        elif was is not None and was != tuple(parameter.shape) and box.shape == was:
            found[path] = torch.zeros_like(parameter, dtype=torch_dtype(box.dtype), requires_grad=False)
        else:
            found[path] = _state_target(box, live, parameter)
    for path in saved.apart:
        if path[0] == name:
            saved.note_apart(path, said)
    return found, skipped


def _shape_saved(parameter: torch.Tensor, saved: Saved, paths: ParameterPaths) -> tuple[int, ...] | None:
    """The shape that a parameter was saved with, if it was."""
    name = path_name(paths.get(id(parameter), ()))
    return saved.box(name).shape if name in saved.pieces else None


def _fits(
    box: Box,
    live: Any,
    parameter: torch.Tensor,
    was: tuple[int, ...] | None,
    policy: Loading,
    said: Match,
) -> bool:
    """Whether state belongs to a parameter of this shape. Where the parameter was saved too that says it;
    else the state that is there, or its shape: as long as the parameter, or one, in each direction (as in
    Adafactor), or of another number of them (a count, or blocks)."""
    if was is not None:
        return policy.fits(f"{box.name} (of a parameter)", here=parameter, shape=was, said=said)
    if isinstance(live, torch.Tensor):
        return policy.fits(box.name, here=live, shape=box.shape, said=said)
    pairs = zip(box.shape, parameter.shape, strict=False)
    if len(box.shape) != parameter.dim() or all(saved in (1, now) for saved, now in pairs):
        return True
    return policy.fits(f"{box.name} (of a parameter)", here=parameter, shape=box.shape, said=said)


def _state_target(box: Box, live: Any, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(live, torch.Tensor):
        return placed(box, parameter)
    return target(box, live) if live.dtype == torch_dtype(box.dtype) else placed(box, live)


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


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]
