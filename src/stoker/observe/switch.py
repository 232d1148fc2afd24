"""A hook's switch: what goes wrong in a hook turns that hook off and is said in the run, nothing more."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.observe.probe import Probe

Function = Callable[..., Any]  # torch's own: any arguments, any result


class Switch:
    """On until its hook fails once."""

    def __init__(self, probe: Probe, name: str) -> None:
        self._probe, self.name, self.on = probe, name, True

    def fail(self, error: Exception) -> None:
        self.on = False
        with suppress(OSError):  # the run folder is gone or full: there is nobody left to tell
            self._probe.events.say("hook off", f"{self.name}: {error!r}", hook=self.name)


def timed(
    probe: Probe,
    switch: Switch,
    kind: str,
    original: Function,
    *,
    begin: Callable[[str], float] | None = None,
    size: Callable[..., int] | None = None,
) -> Function:
    """`original`, reported as a span of this kind. Nested ones of the same kind are one."""
    begin = begin or probe.begin

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not switch.on or probe.inside(kind):
            return original(*args, **kwargs)
        try:
            start = begin(kind)
        except Exception as error:
            switch.fail(error)
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            try:
                probe.end(kind, start, size(*args, **kwargs) if size is not None else 0)
            except Exception as error:
                switch.fail(error)

    return call
