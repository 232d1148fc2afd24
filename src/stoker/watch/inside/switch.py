"""Circuit breaker: what goes wrong in a hook turns that hook off and is said in the run, nothing more."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.watch.inside.probe import Probe

now = time.monotonic
ident = threading.get_ident
Function = Callable[..., Any]  # torch's own: any arguments, any result


class Switch:
    """On until its hook fails once."""

    def __init__(self, probe: Probe, name: str) -> None:
        self._probe, self.name, self.on = probe, name, True

    def fail(self, error: Exception) -> None:
        self.on = False
        with suppress(OSError):  # the run folder is gone or full: there is nobody left to tell
            self._probe.events.say("hook off", f"{self.name}: {error!r}", hook=self.name)


def unseen(function: Function) -> Function:
    """Left alone by torch.compile: after a graph break it would try to compile our wrapper by itself."""
    core: Any = getattr(getattr(sys.modules.get("torch._C"), "_dynamo", None), "eval_frame", None)
    with suppress(AttributeError, TypeError):  # of a torch that calls it something else yet
        if hasattr(core, "skip_code"):  # up to torch 2.6
            core.skip_code(function.__code__)
        else:
            skip = core._FrameExecStrategy(core._FrameAction.SKIP, core._FrameAction.DEFAULT)
            core.set_code_exec_strategy(function.__code__, skip)
    return function


def timed(probe: Probe, kind: str, original: Function, *, begins: bool = True) -> Function:
    """`original`, reported as a span of this kind. Putting marks never raises: it needs no switch.

    A process that calls it is a trainer, which has 27 MB of files; not if it `begins` nothing: then the span
    is read once the process trains, if it ever does."""
    put = probe.marks.append

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if begins and not probe.begun:
            probe.begin()
        start = now()
        try:
            return original(*args, **kwargs)
        finally:
            put((kind, start, now(), ident(), 0, ""))

    return unseen(call)
