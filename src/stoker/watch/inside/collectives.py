"""Collective communication as the host sees it: c10d's functions, and the wait for gradients."""

from __future__ import annotations

import functools
import sys
from contextlib import suppress
from typing import Any

from stoker.watch.inside.forward import Roots
from stoker.watch.inside.probe import Probe
from stoker.watch.inside.switch import Function, Switch, ident, now, timed, unseen

_COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object",
    "monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "send",
)  # fmt: skip
_EXPOSED_S = 0.0002  # a shorter wait for gradients is the engine's own bookkeeping


def hook_collectives(probe: Probe, roots: Roots, module: Any) -> None:
    """The functions of c10d on the host, and waiting for an asynchronous one."""
    for name in _COLLECTIVES:
        if hasattr(module, name):
            setattr(module, name, _collective(probe, name, getattr(module, name)))
    for name in ("init_process_group", "destroy_process_group"):
        if hasattr(module, name):
            setattr(module, name, _grouping(probe, roots, module, getattr(module, name)))
    work = getattr(module, "Work", None)
    if work is not None and hasattr(work, "wait"):
        work.wait = timed(probe, "collective", work.wait)


def _grouping(probe: Probe, roots: Roots, module: Any, original: Function) -> Function:
    """A function after which there is a process group, or none any more."""
    spanned = timed(probe, "collective", original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return spanned(*args, **kwargs)
        finally:
            with suppress(Exception):  # a group that failed to form: its own error goes on
                _tell_group(probe, roots, module)

    return call


def _tell_group(probe: Probe, roots: Roots, module: Any) -> None:
    """Where a program starts its ranks itself (mp.spawn), the environment says nothing of them."""
    if not module.is_initialized():
        roots.join(1)
        return
    roots.join(module.get_world_size())
    probe.tell(rank=module.get_rank(), world=module.get_world_size())


def _collective(probe: Probe, collective: str, original: Function) -> Function:
    kind, put = "collective", probe.marks.append

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not probe.begun:
            probe.begin()
        start = now()
        try:
            return original(*args, **kwargs)
        finally:
            put((kind, start, now(), ident(), _first_bytes(args, kwargs), collective))

    return unseen(call)


def _first_bytes(args: Any, kwargs: Any) -> int:
    with suppress(Exception):  # of a tensor-like thing that has no say on its size
        return int(getattr(args[0] if args else kwargs.get("tensor"), "nbytes", 0))
    return 0


def showing_exposed(probe: Probe, switch: Switch, original: Function) -> Function:
    """A backward among several ranks: the wait for gradients that no compute hides is a collective."""

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        marks: list[float] = []
        handle = _mark_end_of_compute(switch, tensors, marks) if switch.on else None
        try:
            return original(tensors, *args, **kwargs)
        finally:
            ended = now()
            if handle is not None:
                handle.remove()
            if marks and ended - marks[0] > _EXPOSED_S:
                probe.marks.append(("collective", marks[0], ended, ident(), 0, ""))

    return unseen(backward)


def _mark_end_of_compute(switch: Switch, tensors: Any, marks: list[float]) -> Any:
    """Note when the engine has computed all gradients. Its callbacks run in the order they were queued and
    ours is queued first: what DistributedDataParallel waits for in its own comes after the mark."""
    torch = sys.modules["torch"]
    root = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
    if not isinstance(root, torch.Tensor) or not root.requires_grad:
        return None

    def begun(_: Any) -> None:
        try:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: marks.append(now()))
        except Exception as error:
            switch.fail(error)

    try:
        return root.register_hook(begun)
    except Exception as error:
        switch.fail(error)
        return None
