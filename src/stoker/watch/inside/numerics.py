"""Knobs that change results in their last digits: only where `stoker tune --allow-numerics` was given."""

from __future__ import annotations

import functools
import inspect
from contextlib import suppress
from typing import Any

from stoker.watch.inside.forward import roots_of


def set_numerics(values: dict[str, Any], torch: Any) -> None:
    """As the knobs say; of models after their optimizer's first step: before, nobody knows which they are."""
    if values.get("tf32"):
        torch.set_float32_matmul_precision("high")
    if values.get("fused_optimizer"):
        for name in ("Adam", "AdamW", "SGD", "Adagrad"):
            _fuse(getattr(torch.optim, name))
    if values.get("channels_last") or values.get("compile"):
        _once_stepped(torch, compile=bool(values.get("compile")), last=bool(values.get("channels_last")))


def _fuse(optimizer: Any) -> None:
    """`fused=True` where the program has not said how its optimizer is to compute."""
    original = optimizer.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        if given.get("foreach") is None and given.get("fused") is None and not given.get("differentiable"):
            kwargs["fused"] = True
        original(self, *args, **kwargs)

    if "fused" in signature.parameters:
        optimizer.__init__ = __init__


def _once_stepped(torch: Any, *, compile: bool, last: bool) -> None:
    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        handle.remove()
        known = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for root in roots_of(lambda parameter: id(parameter) in known):
            if last:
                root.to(memory_format=torch.channels_last)
            if compile:
                with suppress(RuntimeError):  # a module that is compiled already
                    root.compile()

    from torch.optim.optimizer import register_optimizer_step_post_hook

    handle = register_optimizer_step_post_hook(stepped)
