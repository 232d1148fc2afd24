"""A deep look: a window of a few steps under torch's profiler, begun and ended at the end of a step.

On a card only its activity is recorded: with that of the CPU the end of a window takes seconds. Where there
is no card, the CPU's operators are all there is to see. What was recorded is read in memory, and written by
the watching thread; the loop pays for the window, and the run says so. A profiler of the program's own comes
first: a look that is under way is ended for it, and none is begun while it runs.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.watch.inside.switch import Switch
from stoker.watch.runs.files import PRIVATE

if TYPE_CHECKING:
    from stoker.watch.inside.probe import Probe

VARIABLE = "STOKER_WATCH_LOOK"  # "once", or every so many steps
STEPS = 3  # of a window
FIRST = 20  # steps before the first: kernels are loaded, queues filled
_MOST = 200_000  # events of a window that are written
_PAIR = ("_prepare_profiler", "_enable_profiler")


class Look:
    """Counts steps and takes windows; `stepped` runs in the loop, `write` in the watching thread."""

    def __init__(self, probe: Probe, *, every: int) -> None:
        self._probe, self._every, self._due = probe, every, FIRST
        self._switch = Switch(probe, "look")
        self._steps, self._which, self._until = 0, 0, 0
        self._began = 0.0
        self._originals: dict[str, Any] = {}
        self._taken: list[tuple[list[dict[str, Any]], float, float, int]] = []  # its events
        self._number = 0

    @classmethod
    def from_environ(cls, probe: Probe) -> Look | None:
        told = os.environ.get(VARIABLE, "")
        return cls(probe, every=int(told) if told.isdigit() else 0) if told else None

    def stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped: of several the first one's steps count."""
        if not self._switch.on:
            return
        try:
            self._which = self._which or id(optimizer)
            if id(optimizer) == self._which:
                self._steps += 1
                if self._began and self._steps >= self._until:
                    self._end()
                elif not self._began and self._due and self._steps >= self._due and self._may():
                    self._begin()
        except Exception as error:
            self._restore()
            self._began = 0.0
            self._switch.fail(error)

    # --- the window ---------------------------------------------------------------------------------

    def _may(self) -> bool:
        torch = sys.modules["torch"]
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        # A profiler belongs to the thread that began it, and at its exit only the main one still can end it.
        main = threading.current_thread() is threading.main_thread()
        return main and not capturing and not torch.autograd._profiler_enabled()

    def _begin(self) -> None:
        profiler = sys.modules["torch.autograd.profiler"]
        self._due = self._steps + self._every if self._every else 0
        self._until = self._steps + STEPS
        on_card = sys.modules["torch"].cuda.is_initialized()
        asked = profiler.profile(use_cpu=not on_card, use_device="cuda" if on_card else None, use_kineto=True)
        # Its config() knows how this version of torch wants it; a trace id is for files.
        names = profiler.profile.config.__code__.co_varnames
        config = asked.config(create_trace_id=False) if "create_trace_id" in names else asked.config()
        self._began = time.monotonic()
        profiler._prepare_profiler(config, asked.kineto_activities)
        profiler._enable_profiler(config, asked.kineto_activities)
        self._give_way(profiler)

    def _end(self) -> None:
        self._restore()
        if sys.modules["torch"].cuda.is_initialized():
            sys.modules["torch"].cuda.synchronize()  # what the window queued belongs to it
        found = sys.modules["torch.autograd.profiler"]._disable_profiler()
        offset_ns = time.time_ns() - time.monotonic_ns()  # the profiler's clock is the time of day
        # Read here and now: the profiler's own objects are not safe in another thread.
        events = [_event(one, offset_ns) for one in found.events()[:_MOST]]
        self._taken.append((events, self._began, time.monotonic(), self._until - STEPS))
        self._began = 0.0

    def _give_way(self, profiler: Any) -> None:
        """While ours runs, a profiler that the program starts would fail: end ours first."""

        def instead(name: str, original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                self._restore()
                self._began = 0.0
                self._due = self._steps + FIRST
                profiler._disable_profiler()
                return original(*args, **kwargs)

            return call

        self._originals = {name: getattr(profiler, name) for name in _PAIR}
        for name, original in self._originals.items():
            setattr(profiler, name, instead(name, original))

    def _restore(self) -> None:
        for name, original in self._originals.items():
            setattr(sys.modules["torch.autograd.profiler"], name, original)
        self._originals = {}

    def close(self) -> None:
        """The program ends in a window: a process that exits under a profiler dies of it (SIGSEGV)."""
        if self._began:
            self._began = 0.0
            self._switch.on = False
            self._restore()
            sys.modules["torch.autograd.profiler"]._disable_profiler()

    # --- its file -----------------------------------------------------------------------------------

    def write(self, folder: Path, key: str) -> None:
        """Windows that have ended, each as a trace of its own: what reads traces reads them."""
        while self._taken:
            events, start, end, step = self._taken.pop(0)
            self._number += 1
            window = {"start": start, "end": end, "step": step, "steps": STEPS}
            text = json.dumps({"schemaVersion": 1, "window": window, "traceEvents": events})
            path = folder / f"look-{key}.{self._number}.json.gz"
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE)
            with os.fdopen(handle, "wb") as file:
                file.write(gzip.compress(text.encode("utf-8", "replace"), 1))
            self._probe.events.say("look", f"steps {step} to {step + STEPS}", seconds=end - start)


def _event(one: Any, offset_ns: int) -> dict[str, Any]:
    """As Kineto itself would have written it; microseconds of the monotonic clock."""
    on_card = "CPU" not in str(one.device_type())
    name = one.name()
    runtime = not on_card and name.startswith(("cuda", "hip", "cu"))
    annotated = not on_card and one.is_user_annotation()
    category = "runtime" if runtime else "user_annotation" if annotated else "cpu_op"
    if on_card:
        category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        category = "gpu_memset" if name.startswith("Memset") else category
    thread = one.device_resource_id() if on_card else one.start_thread_id()
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": one.device_index() if on_card else os.getpid(),
        "tid": thread,
        "ts": (one.start_ns() - offset_ns) / 1e3,
        "dur": one.duration_ns() / 1e3,
        "args": {
            "correlation": one.correlation_id(),
            "device": max(one.device_index(), 0),
            "bytes": _bytes(one),
        },
    }


def _bytes(one: Any) -> int:
    """Of a copy; older versions of torch do not say."""
    told = getattr(one, "nbytes", None)
    return int(told()) if told is not None else 0
