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
from stoker.inside.collectives import hook_collectives, showing_exposed
from stoker.inside.device import hook_copies, hook_syncs
from stoker.inside.forward import Roots
from stoker.inside.probe import Probe
from stoker.inside.switch import Switch, ident, now, timed, unseen
from stoker.inside.whatif import Cached

_BATCHES_BETWEEN_LOOKS = 256


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
    shared = showing_exposed(probe, Switch(probe, "exposed collectives"), original)
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
