"""Where torch is hooked: after each module's import, the points in it that exist.

`HOOKS` is the whole list. An install function that finds its point missing, or fails, is switched off with an
event; a wrapped function that fails in our part is called plainly from then on (switch.py).
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from stoker.inside.batches import batch_bytes, loader_facts, tokens_of
from stoker.inside.boot import VARIABLE
from stoker.inside.device import hook_copies, hook_syncs
from stoker.inside.forward import Roots
from stoker.inside.probe import Probe
from stoker.inside.switch import Function, Switch, ident, now, timed, unseen
from stoker.inside.whatif import Cached

_COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object",
    "monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "send",
)  # fmt: skip
_BATCHES_BETWEEN_LOOKS = 256
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
    probe = Probe(Path(os.environ[VARIABLE]))
    return probe, Roots(probe)


# --- loading --------------------------------------------------------------------------------------


def hook_loader(probe: Probe, roots: Roots, module: Any) -> None:
    """`__next__` of the loader's iterators; `DataLoader.__iter__` stays: frameworks override it."""
    iterator = module._BaseDataLoaderIter
    original, switch, cached = iterator.__next__, Switch(probe, "loader"), Cached.from_environ(probe)
    begin, end = probe.loop.begin_data, probe.loop.end_data
    batches = _Batches(probe)

    def __next__(self: Any) -> Any:
        if not switch.on:
            return original(self)
        try:
            evaluating = roots.evaluating(self)
        except Exception as error:
            switch.fail(error)
            return original(self)
        start, thread = now(), ident()
        probe.put((begin, start, thread, evaluating))
        try:
            batch = original(self) if cached is None or evaluating else cached.next(self, original)
        except BaseException as error:
            probe.put((end, now(), thread, start, -1, 0, isinstance(error, StopIteration)))
            _say_error_of_loader(probe, error)
            raise
        tokens = -1
        try:
            if not batches.due or batches.of != id(self):
                batches.look(self, batch, evaluating=evaluating)
            batches.due -= 1
            if batches.are_text:
                tokens = tokens_of(batch)
        except Exception as error:
            switch.fail(error)
        probe.put((end, now(), thread, start, tokens, batches.bytes))
        return batch

    iterator.__next__ = __next__


class _Batches:
    """What the batches of an iterator are like, looked at now and then."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self.of = 0  # the id of their iterator
        self.due = 0  # batches until the next look
        self.bytes = 0
        self.are_text = False

    def look(self, iterator: Any, batch: Any, *, evaluating: bool) -> None:
        self.of, self.due = id(iterator), _BATCHES_BETWEEN_LOOKS
        self.bytes, self.are_text = batch_bytes(batch), tokens_of(batch) >= 0
        if not evaluating:
            self._probe.tell(loader=loader_facts(iterator, batch_bytes=self.bytes))


def _say_error_of_loader(probe: Probe, error: BaseException) -> None:
    if not isinstance(error, (StopIteration, KeyboardInterrupt, GeneratorExit)):
        with suppress(OSError):  # the run folder is gone or full: the error itself goes on
            say_exception(probe, error)


# --- computing ------------------------------------------------------------------------------------


def hook_backward(probe: Probe, roots: Roots, module: Any) -> None:
    """`torch.autograd.backward`, through which `Tensor.backward` goes."""
    original = module.backward
    shared = _showing_exposed(probe, Switch(probe, "exposed collectives"), original)
    begin, end = probe.loop.begin_backward, probe.loop.end

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not roots.trained:
            roots.trains()
        start, thread = now(), ident()
        probe.put((begin, start, thread, "backward"))
        try:
            if probe.ranks > 1:
                return shared(tensors, *args, **kwargs)
            return original(tensors, *args, **kwargs)
        finally:
            probe.put((end, now(), thread, "backward", start))

    backward.__doc__, backward.__wrapped__ = original.__doc__, original  # type: ignore[attr-defined]
    module.backward = unseen(backward)


def _showing_exposed(probe: Probe, switch: Switch, original: Function) -> Function:
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
                probe.put((probe.loop.span, ended, ident(), "collective", marks[0]))

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


def hook_optimizer(probe: Probe, roots: Roots, module: Any) -> None:
    """Hooks common to all optimizers, before and after their step."""
    switch = Switch(probe, "forward")
    begin, end = probe.loop.begin_optimizer, probe.loop.end_optimizer

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        probe.put((begin, now(), ident(), id(optimizer)))

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        probe.put((end, now(), ident(), id(optimizer)))
        if roots.settled != id(optimizer) and switch.on:
            try:
                roots.stepped(optimizer)
            except Exception as error:
                switch.fail(error)

    module.register_optimizer_step_pre_hook(before)
    module.register_optimizer_step_post_hook(after)


# --- everything else that stops a loop ------------------------------------------------------------


def hook_collectives(probe: Probe, roots: Roots, module: Any) -> None:
    """The functions of c10d on the host, and waiting for an asynchronous one."""
    for name in _COLLECTIVES:
        if hasattr(module, name):
            setattr(module, name, _collective(probe, name, getattr(module, name)))
    for name in ("init_process_group", "destroy_process_group"):
        if hasattr(module, name):
            setattr(module, name, _grouping(probe, module, getattr(module, name)))
    work = getattr(module, "Work", None)
    if work is not None and hasattr(work, "wait"):
        work.wait = timed(probe, "collective", work.wait)


def _grouping(probe: Probe, module: Any, original: Function) -> Function:
    """A function after which there is a process group, or none any more."""
    spanned = timed(probe, "collective", original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return spanned(*args, **kwargs)
        finally:
            with suppress(Exception):  # a group that failed to form: its own error goes on
                probe.ranks = module.get_world_size() if module.is_initialized() else 1

    return call


def _collective(probe: Probe, name: str, original: Function) -> Function:
    begin, end = probe.loop.begin, probe.loop.end

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        start, thread = now(), ident()
        probe.put((begin, start, thread, "collective", name))
        try:
            return original(*args, **kwargs)
        finally:
            probe.put((end, now(), thread, "collective", start, _first_bytes(args, kwargs)))

    return unseen(call)


def _first_bytes(args: Any, kwargs: Any) -> int:
    with suppress(Exception):  # of a tensor-like thing that has no say on its size
        return int(getattr(args[0] if args else kwargs.get("tensor"), "nbytes", 0))
    return 0


def hook_saves(probe: Probe, roots: Roots, module: Any) -> None:
    """`torch.save`, where `torch` itself and `torch.serialization` offer it."""
    module.save = timed(probe, "checkpoint", module.save)
    module.serialization.save = module.save


def hook_sharded_saves(probe: Probe, roots: Roots, module: Any) -> None:
    """Saves of torch.distributed.checkpoint; of an asynchronous one, what the loop waits for."""
    for name in ("save", "async_save", "save_state_dict"):
        if hasattr(module, name):
            setattr(module, name, timed(probe, "checkpoint", getattr(module, name)))


def hook_safetensors(probe: Probe, roots: Roots, module: Any) -> None:
    for name in ("save_file", "save_model"):
        setattr(module, name, timed(probe, "checkpoint", getattr(module, name)))


def hook_exit(probe: Probe, roots: Roots, module: Any) -> None:
    """`os._exit`, with which forked children end: what they marked last is read before."""
    original = os._exit

    @functools.wraps(original)
    def _exit(status: int) -> Any:
        probe.read_marks()
        original(status)

    os._exit = _exit


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
    "torch": (hook_saves, hook_copies, hook_syncs, hook_exceptions, hook_exit),
    "torch.autograd": (hook_backward,),
    "torch.distributed.checkpoint.state_dict_saver": (hook_sharded_saves,),
    "torch.distributed.distributed_c10d": (hook_collectives,),
    "torch.optim.optimizer": (hook_optimizer,),
    "torch.utils.data.dataloader": (hook_loader,),
    "safetensors.torch": (hook_safetensors,),
}
