"""Load targets: what each object wants read, and where to. Nothing is read or changed here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from stoker.checkpoint.loading.match import Loading, Match
from stoker.checkpoint.saved.layout import Box, Path, path_name
from stoker.checkpoint.snapshot.state import DTensor, bare, check_memory, flatten, plain_name
from stoker.checkpoint.snapshot.tensors import Saved, new_tensor, torch_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Want:
    """Tensors to read into, values to hand over, and what to do with both in the end."""

    name: str
    tensors: dict[Path, torch.Tensor]
    values: dict[Path, Any]
    apply: Callable[[Any], None] | None


def want_module(name: str, module: torch.nn.Module, saved: Saved, policy: Loading, said: Match) -> Want:
    inner = bare(module)
    state = inner.state_dict()
    original = {plain_name(key): key for key in state}
    live = {(name, plain_name(key)): value for key, value in state.items()}
    tensors = {path: one for path, one in live.items() if isinstance(one, torch.Tensor)}
    values, there = saved.values_under(name), saved.tensor_paths(name)
    # a module's extra state may be any dictionary with tensors in it
    inside = [path for path in there if path not in tensors and path[:2] in live]
    unknown = [path for path in (*there, *values) if path[1:] and path[:2] not in live]
    found = {path[:2] for path in (*there, *values)}
    said.unexpected += map(path_name, unknown)
    said.missing += [
        path_name(path) for path in live if path not in found and not saved.note_apart(path, said)
    ]
    tensors = {path: one for path, one in tensors.items() if path_name(path) in saved.pieces}
    for path, one in tensors.items():
        if not one.is_meta:  # that one is said where it is read into, with its cure
            check_memory(path, one)
    tensors = {path: one for path, one in tensors.items() if _fits(path, one, saved, policy, said)}
    tensors.update((path, new_tensor(saved.box(path_name(path)))) for path in inside)
    values = {path: value for path, value in values.items() if path[:2] in live}
    said.names += map(path_name, (*tensors, *values))
    owned = {
        one.data_ptr() for one in (*inner.parameters(), *inner.buffers()) if not isinstance(one, DTensor)
    }
    direct = all(isinstance(one, DTensor) or one.data_ptr() in owned for one in tensors.values())
    partial = len({path[:2] for path in (*tensors, *values)}) < len(live)

    def apply(given: Any) -> None:
        if values or not direct:  # else the tensors read into are the module's own
            inner.load_state_dict({original[key]: one for key, one in given.items()}, strict=not partial)

    return Want(name=name, tensors=tensors, values=values, apply=apply)


def _fits(path: Path, live: torch.Tensor, saved: Saved, policy: Loading, said: Match) -> bool:
    name = path_name(path)
    box = saved.box(name)
    if not policy.fits(name, here=live, shape=box.shape, said=said):
        return False
    policy.casts(name, here=live.dtype, saved=torch_dtype(box.dtype), said=said)
    return True


def want_other(name: str, thing: Any, saved: Saved, policy: Loading, said: Match) -> Want:
    """A dictionary, or anything with `state_dict`: it takes whatever was saved."""
    live = flatten({name: thing}).tensors if hasattr(thing, "state_dict") or isinstance(thing, dict) else {}
    tensors = {path: target(saved.box(path_name(path)), live.get(path)) for path in saved.tensor_paths(name)}
    for path, one in tensors.items():
        policy.casts(
            path_name(path), here=one.dtype, saved=torch_dtype(saved.box(path_name(path)).dtype), said=said
        )
    values = saved.values_under(name)
    apart = [path for path in saved.apart if path[0] == name and saved.note_apart(path, said)]
    if not tensors and not values and not apart:
        said.missing.append(name)
    elif isinstance(thing, dict):  # what has `load_state_dict` says itself what it lacks
        said.missing += [path_name(path) for path in live if path not in tensors and path not in apart]
    said.names += map(path_name, (*tensors, *values))
    apply: Callable[[Any], None] | None = None
    if hasattr(thing, "load_state_dict"):
        apply = thing.load_state_dict
    elif isinstance(thing, dict):
        apply = thing.update
    return Want(name=name, tensors=tensors, values=values, apply=apply)


def target(box: Box, like: torch.Tensor | None) -> torch.Tensor:
    """Where a saved tensor goes: the live one, or a new one that is placed like it."""
    return placed(box, like) if like is None or tuple(like.shape) != box.shape else like


def placed(box: Box, like: torch.Tensor | None) -> torch.Tensor:
    """A new tensor that is sharded and placed like another, if that has its shape."""
    if like is None or tuple(like.shape) != box.shape:
        device = like.device if like is not None and box.shape else torch.device("cpu")
        return new_tensor(box, device=device)
    return torch.empty_like(like, dtype=torch_dtype(box.dtype), requires_grad=False)
