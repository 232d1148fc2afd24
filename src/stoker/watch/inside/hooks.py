"""Monkey patches: where torch is hooked, after each module's import, the points in it that exist.

`HOOKS` is the whole list. An install function that finds its point missing, or fails, is switched off with an
event; a wrapped function that fails in our part is called plainly from then on (switch.py).
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from stoker.spans import RESTORE
from stoker.watch.inside.alone import hook_alone
from stoker.watch.inside.batches import batch_bytes, loader_facts, text_part
from stoker.watch.inside.boot import VARIABLE
from stoker.watch.inside.collectives import hook_collectives, showing_exposed
from stoker.watch.inside.device import hook_copies, hook_syncs
from stoker.watch.inside.exceptions import say_exception, say_exit
from stoker.watch.inside.forward import Roots
from stoker.watch.inside.guard import hook_guard, hook_guarded_safetensors
from stoker.watch.inside.knobs import hook_knobs, hook_loader_knobs, hook_losses
from stoker.watch.inside.look import Look
from stoker.watch.inside.loop import EVALUATED, EXHAUSTED, NO_TOKENS
from stoker.watch.inside.probe import Probe
from stoker.watch.inside.switch import Switch, ident, now, timed, unseen
from stoker.watch.inside.whatif import Cached

_BATCHES_BETWEEN_LOOKS = 256
_NESTED = 8


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
    put, takes_gradients = probe.marks.append, sys.modules["torch"]._C.is_grad_enabled
    due, moved_bytes, text, thread = 0, 0, None, 0  # as last looked at; due: batches until the next look

    def __next__(self: Any) -> Any:
        nonlocal due, thread
        if not switch.on:
            return original(self)
        kind, note = "data", NO_TOKENS
        try:
            if roots.fetched() is not self:
                roots.fetch(self)
                due, thread = 0, ident()
                _say_epoch(probe, self)
            mine = thread  # another thread may fetch while this one waits
            if not takes_gradients() or (not roots.trained and roots.in_evaluation()):
                note = EVALUATED
        except Exception as error:
            switch.fail(error)
            return original(self)
        start = now()
        try:
            batch = original(self) if cached is None or note == EVALUATED else cached.next(self, original)
        except BaseException as error:
            put((kind, start, now(), ident(), 0, _last(note, error)))
            _say_error_of_loader(probe, error, self)
            raise
        try:
            if not due:
                look(self, batch, evaluated=note == EVALUATED)
            due -= 1
        except Exception as error:
            switch.fail(error)
        if text is not None and note == NO_TOKENS:
            try:
                note = text(batch).numel()
            except Exception:  # a batch of another kind than the one looked at
                due = 0
        put((kind, start, now(), mine, moved_bytes, note))
        return batch

    def look(self: Any, batch: Any, *, evaluated: bool) -> None:
        nonlocal due, moved_bytes, text, thread
        due, thread = _BATCHES_BETWEEN_LOOKS, ident()
        moved_bytes, text = batch_bytes(batch), text_part(batch)
        if not evaluated:
            probe.tell(loader=loader_facts(self, batch_bytes=moved_bytes))

    iterator.__next__ = __next__


def hook_workers(probe: Probe, roots: Roots, module: Any) -> None:
    """Starting a loader's workers while steps go on is waiting for data; before that it is start-up."""
    iterator = module._MultiProcessingDataLoaderIter
    original, takes_gradients = iterator.__init__, sys.modules["torch"]._C.is_grad_enabled

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if not probe.loop.number:
            original(self, *args, **kwargs)
            return
        kind, start = "data", now()
        original(self, *args, **kwargs)
        with suppress(Exception):
            evaluates = not takes_gradients() or (not roots.trained and roots.in_evaluation())
            probe.marks.append((kind, start, now(), ident(), 0, EVALUATED if evaluates else NO_TOKENS))

    iterator.__init__ = __init__


def _say_epoch(probe: Probe, iterator: Any) -> None:
    """A loader's iterator gives its first batch: its workers have just been started."""
    yielded, workers = (getattr(iterator, f"_num_{name}", None) for name in ("yielded", "workers"))
    if yielded == 0 and workers:
        probe.events.say("workers started", "", workers=workers)


def _last(note: int, error: BaseException) -> int:
    return EXHAUSTED if note == EVALUATED and isinstance(error, StopIteration) else note


def _say_error_of_loader(probe: Probe, error: BaseException, iterator: Any) -> None:
    if not isinstance(error, (StopIteration, KeyboardInterrupt, GeneratorExit)):
        with suppress(Exception):  # the run folder is full, the error has no text: it goes on as it is
            try:
                say_exception(probe, error, workers=getattr(iterator, "_workers", ()))
            except RuntimeError as told:  # by torch's handler of SIGCHLD: which worker has died
                say_exception(probe, told)


# --- computing ------------------------------------------------------------------------------------


def hook_backward(probe: Probe, roots: Roots, module: Any) -> None:
    """`torch.autograd.backward`, through which `Tensor.backward` goes."""
    original = module.backward
    shared = showing_exposed(probe, Switch(probe, "exposed collectives"), original)
    put = probe.marks.append

    def backward(*args: Any, **kwargs: Any) -> Any:
        kind, call = "backward", original
        if not roots.plain:
            call = shared if roots.ranks > 1 else original
            roots.trains()
        start = now()
        try:
            return call(*args, **kwargs)
        finally:
            put((kind, start, now(), None, 0, ""))

    backward.__doc__, backward.__wrapped__ = original.__doc__, original  # type: ignore[attr-defined]
    module.backward = unseen(backward)


def hook_gradient(probe: Probe, roots: Roots, module: Any) -> None:
    """`torch.autograd.grad`: where no optimizer of torch's steps it may be the loop's backward. One that will
    be gone backwards through again, as a penalty is, is a part of the loss."""
    original, put = module.grad, probe.marks.append

    @functools.wraps(original)
    def grad(*args: Any, **kwargs: Any) -> Any:
        if roots.steps() or kwargs.get("create_graph"):
            return original(*args, **kwargs)
        kind = "backward"
        roots.trains()
        start = now()
        try:
            return original(*args, **kwargs)
        finally:
            put((kind, start, now(), None, 0, ""))

    module.grad = unseen(grad)


def hook_optimizer(probe: Probe, roots: Roots, module: Any) -> None:
    """Hooks common to all optimizers, before and after their step."""
    switch, put, which = Switch(probe, "forward"), probe.marks.append, 0
    starts: list[float] = []  # of steps that have not ended: one may call its parent class's
    probe.optimizing = _code_around(module)

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if len(starts) > _NESTED:  # of steps that raised
            starts.clear()
        starts.append(now())

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal which
        end, known = now(), roots.settled() is optimizer
        if not known:
            which = id(optimizer)
        put(("optimizer", starts.pop() if starts else end, end, None, 0, which))
        if not known and switch.on:
            try:
                roots.stepped(optimizer)
            except Exception as error:
                switch.fail(error)

    module.register_optimizer_step_pre_hook(before)
    module.register_optimizer_step_post_hook(after)


def _code_around(module: Any) -> CodeType | None:
    """The code in whose frame torch calls the hooks of a step and the step itself."""
    consts = module.Optimizer.profile_hook_step.__code__.co_consts
    return next((const for const in consts if isinstance(const, CodeType)), None)


# --- everything else that stops a loop ------------------------------------------------------------


def hook_saves(probe: Probe, roots: Roots, module: Any) -> None:
    """`torch.save`, where `torch` itself and `torch.serialization` offer it."""
    module.save = _saving(probe, module.save)
    module.serialization.save = module.save


def hook_sharded_saves(probe: Probe, roots: Roots, module: Any) -> None:
    """Saves of torch.distributed.checkpoint; of an asynchronous one, what the loop waits for."""
    for name in ("save", "async_save", "save_state_dict"):
        if hasattr(module, name):
            setattr(module, name, _saving(probe, getattr(module, name)))


def hook_safetensors(probe: Probe, roots: Roots, module: Any) -> None:
    for name in ("save_file", "save_model"):
        setattr(module, name, _saving(probe, getattr(module, name)))


def _saving(probe: Probe, original: Any) -> Any:
    """Helpers that prepare data save too, thousands in a job: a save makes no trainer of a process."""
    return timed(probe, "checkpoint", original, begins=False)


def hook_loads(probe: Probe, roots: Roots, module: Any) -> None:
    """`torch.load`: before the first step it brings a checkpoint back (`stoker history goodput`)."""
    module.load = timed(probe, RESTORE, module.load, begins=False)
    module.serialization.load = module.load


def hook_sharded_loads(probe: Probe, roots: Roots, module: Any) -> None:
    for name in ("load", "load_state_dict"):
        if hasattr(module, name):
            setattr(module, name, timed(probe, RESTORE, getattr(module, name), begins=False))


def hook_exit(probe: Probe, roots: Roots, module: Any) -> None:
    """`os._exit`, with which forked children end: what they marked last is read before. And `sys.exit`, which
    many call where they have caught an exception, or with the reason as a text."""
    at_once, exits = os._exit, sys.exit

    @functools.wraps(at_once)
    def _exit(status: int) -> Any:
        probe.read_marks()
        at_once(status)

    @functools.wraps(exits)
    def exit(status: Any = None, /) -> Any:
        if status and probe.recorder is not None:
            with suppress(Exception):  # the program is ending: it ends as it would have
                say_exit(probe, status)
        exits(status)

    os._exit, sys.exit = _exit, exit


def hook_exceptions(probe: Probe, roots: Roots, module: Any) -> None:
    """What ends the process, or the thread of its loop, is part of the story; it is shown as it would have
    been."""
    before = sys.excepthook

    def excepthook(kind: Any, error: Any, trace: Any) -> None:
        with suppress(Exception):  # the program is dying of something else: show that
            say_exception(probe, error)
        before(kind, error, trace)

    def thread_excepthook(args: Any, /) -> None:
        error, looping = args.exc_value, probe.recorder is not None and ident() == probe.loop.thread
        if looping and error is not None and not isinstance(error, SystemExit):
            with suppress(Exception):  # as above
                say_exception(probe, error, in_thread=True)
        in_threads(args)

    in_threads, threading.excepthook = threading.excepthook, thread_excepthook
    sys.excepthook = excepthook
    probe.meta["torch"] = str(getattr(module, "__version__", ""))


def hook_look(probe: Probe, roots: Roots, module: Any) -> None:
    """Deep looks, where they were asked for: they begin and end with an optimizer's step."""
    probe.look = Look.from_environ(probe)
    if probe.look is not None:
        module.register_optimizer_step_post_hook(probe.look.stepped)


def hook_signals(probe: Probe, roots: Roots, module: Any) -> None:
    """SIGTERM, where the program has a handler of its own for it."""
    probe.told.hook()


Install = Callable[[Probe, Roots, Any], None]
HOOKS: dict[str, tuple[Install, ...]] = {
    "torch": (
        hook_saves, hook_loads, hook_copies, hook_syncs, hook_exceptions, hook_exit, hook_signals,
        hook_knobs, hook_guard,
    ),
    "torch.autograd": (hook_backward, hook_gradient, hook_losses),
    "torch.distributed.checkpoint.state_dict_loader": (hook_sharded_loads,),
    "torch.distributed.checkpoint.state_dict_saver": (hook_sharded_saves,),
    "torch.distributed.distributed_c10d": (hook_collectives,),
    "torch.optim.optimizer": (hook_optimizer, hook_look),
    "torch.utils.data.dataloader": (hook_loader_knobs, hook_alone, hook_loader, hook_workers),
    "safetensors.torch": (hook_safetensors, hook_guarded_safetensors),
}  # fmt: skip
