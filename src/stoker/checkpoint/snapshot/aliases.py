"""Aliasing: tensors to be restored that lie in the same memory, as tied weights do.

What was saved as one tensor is read once. Others in shared memory are read beside it, put in place, and
compared with what is there then: where two names of one memory were saved with different values, the last
one would win.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from stoker.checkpoint.snapshot.digest import digests
from stoker.checkpoint.snapshot.plan import local
from stoker.checkpoint.snapshot.state import DTensor
from stoker.errors import UsageError

Targets = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """Where to read to, and which of those places are beside the tensors that they are for."""

    targets: dict[str, torch.Tensor]
    beside: dict[str, torch.Tensor]  # the tensors themselves, by name

    def settle(self) -> None:
        """Put in place what was read beside, and see that all of it is there."""
        with torch.no_grad():
            for name, tensor in self.beside.items():
                tensor.copy_(self.targets[name])
        read = digests(local(self.targets[name]) for name in self.beside)
        there = digests(local(one) for one in self.beside.values())
        for name, one, other in zip(self.beside, read, there, strict=True):
            if one != other:
                raise UsageError(
                    f"{name} shares its memory here with another of {', '.join(self.beside)}, and the "
                    "checkpoint has other values for it",
                    hint="they were not tied when they were saved: untie them, or leave one out with "
                    "rename={'NAME': None} and strict=False",
                )


def shared(targets: Targets, *, same: Callable[[str, str], bool]) -> Sharing:
    """How to read into these; `same` says of two names whether they were saved as one tensor."""
    found, beside, firsts = dict(targets), dict[str, torch.Tensor](), dict[object, str]()
    for names in _crowds(targets):
        for name in names:
            first = firsts.setdefault(_place(targets[name]), name)
            if first != name and same(first, name):
                del found[name]
        mine = [name for name in names if name in found]
        if len(mine) > 1:
            beside.update({name: targets[name] for name in mine})
            # clones: of a tensor that has grown only a part is read
            found.update({name: targets[name].detach().clone() for name in mine})
    return Sharing(targets=found, beside=beside)


def _crowds(targets: Targets) -> list[list[str]]:
    """Names whose stretches of memory meet."""
    spans = sorted(
        (str(here.device), here.data_ptr(), here.data_ptr() + _span(name, here), name)
        for name, tensor in targets.items()
        if not tensor.is_meta and (here := _memory(tensor)).numel()
    )
    crowds, last_device, end = list[list[str]](), "", 0
    for device, start, stop, name in spans:
        if device == last_device and start < end:
            crowds[-1].append(name)
        else:
            crowds.append([name])
            end = stop
        last_device, end = device, max(end, stop)
    return [names for names in crowds if len(names) > 1]


def _span(name: str, tensor: torch.Tensor) -> int:
    """Bytes from its first element to behind its last."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise UsageError(
            f"{name} is expanded: several of its elements are one in memory, and cannot be restored apart",
            hint="give a tensor of its own: `tensor.clone()`",
        )
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    return (sum(stride * (size - 1) for stride, size in steps) + 1) * tensor.element_size()


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _place(tensor: torch.Tensor) -> object:
    here = _memory(tensor)
    put_off = here.is_conj(), here.is_neg()
    return here.device, here.data_ptr(), here.shape, here.stride(), here.dtype, put_off
