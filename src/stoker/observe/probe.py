"""Inside a training process: turns begin and end of what torch does into spans and steps.

One Probe a process. It opens its files when the process first does something a trainer does, so launchers and
loader workers leave no trace; a forked child forgets its parent's files at once. Hooks call it from any
thread; steps, evaluation and gaps are those of one thread, the loop.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from stoker import spans
from stoker.observe.stalls import Stalls
from stoker.runs.files import Clock, Events, node_name, process_key, write_meta
from stoker.spans import NO_STEP, Recorder, Ring
from stoker.world import World

STEPS = 1 << 17
_now = time.monotonic
_ident = threading.get_ident


class Probe:
    """What is open, which step this is, and where it is written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self.broken = False
        self._forget()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.close)

    def _forget(self) -> None:
        """A process anew: nothing is open, and spans go nowhere until it trains."""
        spans.record_to(None)
        self.recorder: Recorder | None = None
        self._mute = False  # a loader worker: what it does is not the loop's
        self.loop = _ident()
        self.open: list[tuple[str, float]] = []  # what the loop is in, outermost first
        self.touched = _now()  # when the loop last ended a span
        self.number = 0
        self.meta: dict[str, Any] = {}  # plain JSON values
        self.collective_seq, self.collective_op = 0, ""
        self._steps: Ring | None = None
        self._stalls: Stalls | None = None
        self._lock = threading.Lock()
        self._step_start = 0.0  # 0: no step has begun
        self._stepped_at = 0.0  # when the last optimizer step since the boundary ended; 0: none has
        self._steppers: set[int] = set()
        self._tokens = -1
        self._evaluation_start = self._evaluation_end = 0.0
        self._exhausted = False  # the loader evaluated on has come to its end
        key = process_key(node_name(), os.getpid())
        self.events = Events(self._folder / f"events-{key}.jsonl")

    # --- spans ------------------------------------------------------------------------------------

    def begin(self, kind: str) -> float:
        """Something begins in this thread; gives the moment, to be handed to `end`."""
        if self.recorder is None and not self._mute:
            self._start()
        now = _now()
        if _ident() == self.loop:
            self.open.append((kind, now))
        return now

    def end(self, kind: str, start: float, moved_bytes: int = 0) -> float:
        now = _now()
        if _ident() == self.loop:
            self._leave(kind)
            self.touched = now
            if self._evaluation_start and kind == "forward":
                self._evaluation_end = now
        recorder = self.recorder
        if recorder is not None and start:
            recorder.write(kind, start, now, self.number if self._step_start else NO_STEP, moved_bytes)
        return now

    def write(self, kind: str, start: float, end: float, moved_bytes: int = 0) -> None:
        """A span known only afterwards."""
        if self.recorder is not None:
            step = self.number if self._step_start else NO_STEP
            self.recorder.write(kind, start, end, step, moved_bytes)

    def _leave(self, kind: str) -> None:
        while self.open and self.open.pop()[0] != kind:
            pass  # an optimizer step that raised was never ended

    def inside(self, kind: str) -> bool:
        for name, _ in self.open:  # noqa: SIM110 - a generator costs more than all of this
            if name == kind:
                return True
        return False

    # --- steps ------------------------------------------------------------------------------------

    def begin_data(self, *, evaluating: bool) -> float:
        """The loop asks for a batch: the step before is over, if its optimizer has stepped."""
        if _ident() == self.loop:
            if self.inside("optimizer"):
                self.open.clear()
            if not self.open:
                self._turn(_now(), evaluating=evaluating)
        return self.begin("data")

    def end_data(self, start: float, *, tokens: int = -1, moved_bytes: int = 0, last: bool = False) -> None:
        now = self.end("data", start, moved_bytes)
        if _ident() != self.loop:
            return
        if last and self._evaluation_start:
            self._evaluation_end, self._exhausted = now, True
        elif tokens >= 0 and not self._evaluation_start and not self.inside("data"):
            self._tokens = max(self._tokens, 0) + tokens

    def begin_training(self, kind: str) -> float:
        """A backward or an optimizer step: whatever evaluation was open is over."""
        if _ident() == self.loop and not self.open:
            self._turn(_now(), evaluating=False, fetched=False)
        return self.begin(kind)

    def begin_optimizer(self, optimizer: int) -> float:
        if not self.inside("optimizer"):
            self.loop = _ident()
            if optimizer in self._steppers:
                self._finish_step()  # the same optimizer again with no batch seen in between
        return self.begin_training("optimizer")

    def end_optimizer(self, optimizer: int, start: float) -> None:
        now = self.end("optimizer", start)
        if not self.inside("optimizer"):
            self._stepped_at = now
            self._steppers.add(optimizer)

    def _turn(self, now: float, *, evaluating: bool, fetched: bool = True) -> None:
        if not self._step_start:
            if self.recorder is None and not self._mute:
                self._start()
            self.write("startup", process_start(), now)
            self._step_start = now
        if fetched:
            self._finish_step()
        if evaluating and not self._evaluation_start:
            self._evaluation_start = now
        elif not evaluating and self._evaluation_start:
            self.write("evaluation", self._evaluation_start, self._evaluation_end or now)
            self._evaluation_start = self._evaluation_end = 0.0
        self._exhausted = False

    def _finish_step(self) -> None:
        if self._stepped_at and self._steps is not None and self.recorder is not None:
            thread = self.recorder.thread()
            self._steps.write("step", self._step_start, self._stepped_at, self.number, self._tokens, thread)
            self._step_start, self._stepped_at = self._stepped_at, 0.0
            self.number += 1
            self._steppers.clear()
            self._tokens = -1

    def forget_evaluation(self) -> None:
        """It was none: the model trains in its evaluation mode."""
        self._evaluation_start = self._evaluation_end = 0.0

    @property
    def evaluating(self) -> bool:
        """Is a batch taken for evaluation the last one seen?"""
        return self._evaluation_start > 0.0 and not self._exhausted

    # --- files ------------------------------------------------------------------------------------

    def tell(self, **facts: Any) -> None:
        """Facts of this process, for its meta file."""
        self.meta |= facts
        if self.recorder is not None:
            write_meta(self._folder / f"proc-{self.meta['key']}.json", self.meta)

    def _start(self) -> None:
        """Open this process's files; where that fails, its hooks are switched off by what they raise."""
        with self._lock:
            self._mute = _is_loader_worker()
            if self.recorder is not None or self._mute:
                return
            if self.broken:
                raise RuntimeError("the run folder cannot be written")
            self.broken = True
            world, key = _world(), process_key(node_name(), os.getpid())
            ring = Ring(self._folder / f"spans-{key}.ring", rank=world.rank)
            self._steps = Ring(self._folder / f"steps-{key}.ring", capacity=STEPS, rank=world.rank)
            self.loop = _ident()
            self.meta |= _identity(world, key)
            self.recorder, self.touched = Recorder(ring), _now()
            self.broken = False
        self.tell()
        spans.record_to(self.recorder)
        self._stalls = Stalls(self, self._folder / f"memory-{key}.rows")
        self._stalls.start()

    def close(self) -> None:
        """At the end of the process; safe twice."""
        recorder, self.recorder = self.recorder, None
        if recorder is None:
            return
        if self._stalls is not None:
            self._stalls.stop()
        self.recorder = recorder
        if self._evaluation_start:
            self.write("evaluation", self._evaluation_start, self._evaluation_end or _now())
        self._finish_step()
        self.tell(closed=True)
        self.recorder = None
        self.broken = True  # nothing that still runs at exit may open it again


def process_start() -> float:
    """When this process began, on the monotonic clock."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    # Counted from boot; the monotonic clock leaves out the time the machine was suspended.
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return _now() - max(0.0, age)


def _is_loader_worker() -> bool:
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return getattr(worker, "_worker_info", None) is not None


def _world() -> World:
    try:
        return World.from_environ()
    except Exception:  # a launcher's odd variables are not ours to judge here
        return World()


def _identity(world: World, key: str) -> dict[str, Any]:
    return {
        "key": key,
        "pid": os.getpid(),
        "node": node_name(),
        "rank": world.rank,
        "world": world.size,
        "began": time.time(),
        "clock": Clock.here().as_dict(),
        "python": sys.version.split()[0],
        "argv": sys.argv[:50],
        "nccl_env": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
    }
