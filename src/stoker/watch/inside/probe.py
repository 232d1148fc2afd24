"""Probe: takes the marks of the hooks inside a training process, and has them read and written.

A hook only puts a mark, when what it watches has ended. Between two operations of torch each Python function
called costs a microsecond and each object touched a part of one, most likely in cold caches: books kept
inside the hooks took some 80 us of a step, marks of begins and ends 24, marks of ends alone 12. The watching
thread reads them four times a second, at first more often; a process that is killed loses those not yet read.

One Probe a process. It opens its files when the process first does something a trainer does, so launchers and
loader workers leave no trace; a forked child forgets its parent's files at once.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

from stoker import spans
from stoker.spans import Recorder, Ring
from stoker.watch.inside import process
from stoker.watch.inside.look import Look
from stoker.watch.inside.loop import Loop, Mark
from stoker.watch.inside.signals import Told
from stoker.watch.inside.stalls import Stalls
from stoker.watch.inside.switch import Switch
from stoker.watch.runs.files import Events, node_name, process_key, write_meta

STEPS = 1 << 17
_MARKS = 1 << 14  # that are kept unread: where nobody reads them they must not fill the memory


class Probe:
    """Where marks are put, and the files of this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.marks: deque[Mark] = deque(maxlen=_MARKS)  # appended to from any thread
        self.optimizing: CodeType | None = (
            None  # what runs while an optimizer steps: its hooks leave no frame
        )
        self.loop = Loop(threading.get_ident(), now=time.monotonic())
        self.told = Told()
        self.look: Look | None = None  # deep looks, where they were asked for
        self._forget()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.close)

    def _forget(self) -> None:
        """A process anew: nothing is open, and spans go nowhere until it trains."""
        spans.record_to(None)
        self.recorder: Recorder | None = None
        self.meta: dict[str, Any] = {}  # plain JSON values
        self.card: int | None = None  # the device its loop computes on, as torch numbers it
        self._stalls: Stalls | None = None
        self._opening, self._telling = threading.Lock(), threading.Lock()
        self._reading = threading.RLock()  # a signal may end the process while it reads
        self.marks.clear()
        self.loop.reset(threading.get_ident(), now=time.monotonic())
        self.events = Events(self._folder / f"events-{process_key(node_name(), os.getpid())}.jsonl")
        self.begun = False
        self.told.last, self._told_said = (0.0, 0), 0.0

    # --- marks ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """This process does what a trainer does: open its files, once. Where that fails, nothing is recorded
        of it. To be called before the first mark is put."""
        if self.begun:
            return
        with self._opening:
            if self.begun:
                return
            self.begun = True
            try:
                if not process.is_loader_worker():
                    self._open()
            except Exception as error:
                self._give_up(error)

    def read_marks(self) -> None:
        """Read what was put since the last time; never raises."""
        with self._reading:
            try:
                marks = self.marks
                self.loop.read([marks.popleft() for _ in range(len(marks))])
            except Exception as error:
                self._give_up(error)

    def write_looks(self) -> None:
        """Of deep looks that have ended; what raises is the caller's."""
        if self.look is not None and self.recorder is not None:
            self.look.write(self._folder, self.meta["key"])

    def say_signal(self) -> None:
        """Of a signal that the program's own handler took; what raises is the caller's."""
        at, number = self.told.last
        if at and at != self._told_said and self.recorder is not None:
            self._told_said = at
            self.events.say("signal", signal.Signals(number).name, number=number, at=at)

    def _give_up(self, error: Exception) -> None:
        self.loop.reset(self.loop.thread, now=time.monotonic())  # what is read from now on goes nowhere
        Switch(self, "recording").fail(error)

    # --- files ------------------------------------------------------------------------------------

    def tell(self, **facts: Any) -> None:
        """Facts of this process, for its meta file."""
        with self._telling:
            self.meta |= facts
            if self.recorder is not None:
                write_meta(self._folder / f"proc-{self.meta['key']}.json", self.meta)

    def _open(self) -> None:
        world, key = process.world(), process.own_key(self._folder)
        self.events = Events(self._folder / f"events-{key}.jsonl")
        recorder = Recorder(Ring(self._folder / f"spans-{key}.ring", rank=world.rank))
        steps = Ring(self._folder / f"steps-{key}.ring", capacity=STEPS, rank=world.rank)
        self.loop.reset(threading.get_ident(), now=time.monotonic())
        self.loop.record(recorder, steps)
        self.recorder = recorder
        self.tell(**process.identity(world, key))
        spans.record_to(recorder)
        self._stalls = Stalls(self, self._folder / f"memory-{key}.rows")
        self._stalls.start()

    def close(self) -> None:
        """At the end of the process; safe twice. Nothing that still runs may open its files again."""
        self.begun = True
        if self.look is not None and threading.current_thread() is threading.main_thread():
            with suppress(Exception):  # whatever the profiler makes of it, the program is over
                self.look.close()
        if self.recorder is None:
            return
        with suppress(OSError):  # the run folder is gone or full
            self.say_signal()
            self.write_looks()
            self.events.say("leaving", "the program is over")
        if self._stalls is not None:
            self._stalls.stop()
        self.read_marks()
        self.loop.finish(time.monotonic())
        with suppress(OSError):  # the run folder is gone: that is no reason to print a traceback at exit
            self.tell(closed=True)
        self.recorder = None
        spans.record_to(None)  # the ring stays mapped: a thread may be in the midst of a write
