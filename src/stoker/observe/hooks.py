"""Where torch is hooked: after each module's import, the points in it that exist.

`HOOKS` is the whole list. An install function that finds its point missing, or fails, is switched off with an
event; a wrapped function that fails in our part is called plainly from then on (switch.py).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from stoker.observe.batches import batch_bytes, loader_facts, tokens_of
from stoker.observe.boot import HANDLE, VARIABLE
from stoker.observe.device import hook_copies, hook_syncs
from stoker.observe.forward import Roots
from stoker.observe.probe import Probe
from stoker.observe.switch import Switch, timed
from stoker.observe.whatif import Cached

_COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object",
    "monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "send",
)  # fmt: skip
_BATCHES_BETWEEN_SIZES = 256
_EXPOSED_S = 0.0002  # a shorter wait for gradients is the engine's own bookkeeping


def after_import(module: ModuleType) -> None:
    """Hook a module that has just been imported."""
    probe, roots = here()
    for install in HOOKS.get(module.__name__, ()):
        name = install.__name__.removeprefix("hook_")
        try:
            install(probe, roots, module)
        except Exception as error:
            Switch(probe, name).fail(error)


@cache
def here() -> tuple[Probe, Roots]:
    """One probe a process, made with the first hook."""
    sys.modules[HANDLE] = sys.modules[__name__]
    probe = Probe(Path(os.environ[VARIABLE]))
    return probe, Roots(probe)


# --- loading --------------------------------------------------------------------------------------


def hook_loader(probe: Probe, roots: Roots, module: Any) -> None:
    """`__next__` of the loader's iterators; `DataLoader.__iter__` stays: frameworks override it."""
    iterator = module._BaseDataLoaderIter
    original, switch, cached = iterator.__next__, Switch(probe, "loader"), Cached.from_environ(probe)
    seen = [0, 0, 0]  # id of the last iterator, batches since its bytes were counted, those bytes

    def __next__(self: Any) -> Any:
        if not switch.on:
            return original(self)
        try:
            evaluating = roots.evaluating(self)
            start = probe.begin_data(evaluating=evaluating)
        except Exception as error:
            switch.fail(error)
            return original(self)
        try:
            batch = original(self) if cached is None or evaluating else cached.next(self, original)
        except BaseException as error:
            _loader_ended(probe, switch, start, error)
            raise
        try:
            if seen[0] != id(self) or seen[1] >= _BATCHES_BETWEEN_SIZES:
                seen[:] = [id(self), 0, batch_bytes(batch)]
                if not evaluating:
                    probe.tell(loader=loader_facts(self, batch_bytes=seen[2]))
            seen[1] += 1
            probe.end_data(start, tokens=tokens_of(batch), moved_bytes=seen[2])
        except Exception as error:
            switch.fail(error)
        return batch

    iterator.__next__ = __next__


def _loader_ended(probe: Probe, switch: Switch, start: float, error: BaseException) -> None:
    try:
        probe.end_data(start, last=isinstance(error, StopIteration))
        if not isinstance(error, (StopIteration, KeyboardInterrupt, GeneratorExit)):
            say_exception(probe, error)
    except Exception as failure:
        switch.fail(failure)


# --- computing ------------------------------------------------------------------------------------


def hook_backward(probe: Probe, roots: Roots, module: Any) -> None:
    """`torch.autograd.backward`, through which `Tensor.backward` goes."""
    original, switch = module.backward, Switch(probe, "backward")
    exposed_switch = Switch(probe, "exposed collectives")

    def begin(kind: str) -> float:
        roots.trains()
        return probe.begin_training(kind)

    timed_backward = timed(probe, switch, "backward", original, begin=begin)

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not exposed_switch.on or not _distributed():
            return timed_backward(tensors, *args, **kwargs)
        marks: list[float] = []
        handle = _mark_end_of_compute(exposed_switch, tensors, marks)
        try:
            return timed_backward(tensors, *args, **kwargs)
        finally:
            if handle is not None:
                handle.remove()
            if marks and probe.touched - marks[0] > _EXPOSED_S:
                probe.write("collective", marks[0], probe.touched)

    backward.__doc__, backward.__wrapped__ = original.__doc__, original  # type: ignore[attr-defined]
    module.backward = backward


def _mark_end_of_compute(switch: Switch, tensors: Any, marks: list[float]) -> Any:
    """Note when the engine has computed all gradients. Its callbacks run in the order they were queued and
    ours is queued first: what DistributedDataParallel waits for in its own comes after the mark."""
    import time

    torch = sys.modules["torch"]
    root = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
    if not isinstance(root, torch.Tensor) or not root.requires_grad:
        return None

    def begun(_: Any) -> None:
        try:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: marks.append(time.monotonic()))
        except Exception as error:
            switch.fail(error)

    try:
        return root.register_hook(begun)
    except Exception as error:
        switch.fail(error)
        return None


def _distributed() -> bool:
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return c10d is not None and c10d.is_initialized() and c10d.get_world_size() > 1


def hook_optimizer(probe: Probe, roots: Roots, module: Any) -> None:
    """Hooks common to all optimizers, before and after their step."""
    switch = Switch(probe, "optimizer")
    starts: list[float] = []

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if switch.on:
            try:
                del starts[:-8]  # steps that raised never ended
                starts.append(probe.begin_optimizer(id(optimizer)))
            except Exception as error:
                switch.fail(error)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if switch.on and starts:
            try:
                probe.end_optimizer(id(optimizer), starts.pop())
                roots.stepped(optimizer)
            except Exception as error:
                switch.fail(error)

    module.register_optimizer_step_pre_hook(before)
    module.register_optimizer_step_post_hook(after)


# --- everything else that stops a loop ------------------------------------------------------------


def hook_collectives(probe: Probe, roots: Roots, module: Any) -> None:
    """The functions of c10d on the host, and waiting for an asynchronous one."""
    switch = Switch(probe, "collectives")
    for name in _COLLECTIVES:
        if hasattr(module, name):
            setattr(module, name, _collective(probe, switch, name, getattr(module, name)))
    for name in ("init_process_group", "destroy_process_group"):
        if hasattr(module, name):
            setattr(module, name, timed(probe, switch, "collective", getattr(module, name)))
    work = getattr(module, "Work", None)
    if work is not None and hasattr(work, "wait"):
        work.wait = timed(probe, switch, "collective", work.wait)


def _collective(probe: Probe, switch: Switch, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def begin(kind: str) -> float:
        probe.collective_seq += 1
        probe.collective_op = name
        return probe.begin(kind)

    return timed(probe, switch, "collective", original, begin=begin, size=_first_bytes)


def _first_bytes(*args: Any, **kwargs: Any) -> int:
    first = args[0] if args else kwargs.get("tensor")
    return int(getattr(first, "nbytes", 0) or 0)


def hook_saves(probe: Probe, roots: Roots, module: Any) -> None:
    """`torch.save`, where `torch` itself and `torch.serialization` offer it."""
    switch = Switch(probe, "torch.save")
    module.save = timed(probe, switch, "checkpoint", module.save)
    module.serialization.save = module.save


def hook_sharded_saves(probe: Probe, roots: Roots, module: Any) -> None:
    """Saves of torch.distributed.checkpoint; of an asynchronous one, what the loop waits for."""
    switch = Switch(probe, "sharded saves")
    for name in ("save", "async_save", "save_state_dict"):
        if hasattr(module, name):
            setattr(module, name, timed(probe, switch, "checkpoint", getattr(module, name)))


def hook_safetensors(probe: Probe, roots: Roots, module: Any) -> None:
    switch = Switch(probe, "safetensors")
    for name in ("save_file", "save_model"):
        setattr(module, name, timed(probe, switch, "checkpoint", getattr(module, name)))


def hook_exceptions(probe: Probe, roots: Roots, module: Any) -> None:
    """What ends the process is part of the story; it is shown as it would have been."""
    before = sys.excepthook

    def excepthook(kind: Any, error: Any, trace: Any) -> None:
        if not isinstance(error, KeyboardInterrupt):
            with suppress(Exception):  # the program is dying of something else: show that
                say_exception(probe, error)
        before(kind, error, trace)

    sys.excepthook = excepthook
    probe.meta["torch"] = str(getattr(module, "__version__", ""))


def say_exception(probe: Probe, error: BaseException) -> None:
    text = f"{type(error).__name__}: {error}"
    found = re.search(r"killed by signal: ([A-Za-z ]+)|(SIG[A-Z]+)|exitcode\s*:\s*-(\d+)", text)
    facts = {"signal": next(filter(None, found.groups())).strip()} if found else {}
    probe.events.say("exception", text[:2000], **facts)


Install = Callable[[Probe, Roots, Any], None]
HOOKS: dict[str, tuple[Install, ...]] = {
    "torch": (hook_saves, hook_copies, hook_syncs, hook_exceptions),
    "torch.autograd": (hook_backward,),
    "torch.distributed.checkpoint.state_dict_saver": (hook_sharded_saves,),
    "torch.distributed.distributed_c10d": (hook_collectives,),
    "torch.optim.optimizer": (hook_optimizer,),
    "torch.utils.data.dataloader": (hook_loader,),
    "safetensors.torch": (hook_safetensors,),
}
