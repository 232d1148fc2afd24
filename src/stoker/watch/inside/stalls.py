"""Watchdog thread for what no hook can see: gaps, hangs, the allocator's counters.

It wakes four times a second, at first more often, reads the marks that the hooks have put, and mostly finds
that the loop has just ended a span. Only when that was longer than GAP_S ago does it look at the loop's
frames, which say what it is in; when it was HANG_S ago, at everybody's.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from stoker.watch.inside.frames import (
    Inside,
    frame_of,
    lines_of,
    places_of,
    spans_around,
    top_user_frame,
)  # fmt: skip
from stoker.watch.inside.leaving import Leaving
from stoker.watch.inside.stacks import Lateness, Stacks
from stoker.watch.inside.switch import Switch
from stoker.watch.runs.files import Rows

if TYPE_CHECKING:
    from stoker.watch.inside.probe import Probe

TICK_S = 0.25  # to wake takes some 170 us, as much as to read the marks of 30 steps
FIRST_TICK_S = 0.05  # for FIRST_S: a job of a few steps has gaps too
FIRST_S = 5.0
GAP_S = 0.05
HANG_S = 10.0
SAY_AGAIN_S = 30.0
SAY_AGAIN = 0.1  # of the time it lasts: a job may hang over a weekend, and every stack of it is some 30 KB
MEMORY_S = 1.0
_STACKS = 500  # events of one process: a gap in every step of a long run says nothing new
_JITTER = 0.2  # of a tick: looks that keep step with the loop would always see the same line
_LEFT_S = 0.3  # without a span, after which it is asked whether the loop was left


class Stalls:
    """Watches one probe; `start` and `stop` are the probe's, the rest runs in the thread."""

    def __init__(self, probe: Probe, memory: Path) -> None:
        self._probe, self._memory = probe, Rows(memory)
        self._stacks = Stacks(
            probe, memory.with_name(memory.name.replace("memory-", "stacks-")).with_suffix(".json")
        )
        self._leaving, self._left_told = Leaving(self._stacks.reader), 0.0
        self._late_s = 0.0
        self._uneven = random.Random()  # of our own: the program's own numbers must stay what they are
        self._over = False
        self._thread = threading.Thread(target=self._run, name="stoker-watch", daemon=True)
        self._stacks_left = _STACKS
        self._gap_began = self._gap_told = self._hang_told = self._hang_began = 0.0
        self._memory_due = 0.0

    def start(self) -> None:
        self._stacks.start()
        self._thread.start()

    def stop(self) -> None:
        self._over = True
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2)
        self._memory.close()
        with suppress(OSError):  # the run folder is gone or full
            self._stacks.close()

    def _run(self) -> None:
        looks = [self._stack, self._signal, self._deep, self._gap, self._leave, self._hang, self._allocator]
        settled = time.monotonic() + FIRST_S
        lateness = Lateness()
        while not self._over:
            tick_s = TICK_S if time.monotonic() > settled else FIRST_TICK_S
            due = time.monotonic() + tick_s * self._uneven.uniform(1 - _JITTER, 1 + _JITTER)
            time.sleep(max(0.0, due - time.monotonic()))
            self._late_s = lateness.since(due, time.monotonic())
            self._probe.read_marks()
            now = time.monotonic()
            for look in list(looks):
                try:
                    look(now)
                except Exception as error:
                    looks.remove(look)
                    Switch(self._probe, look.__name__.strip("_")).fail(error)
        lateness.close()

    def _stack(self, now: float) -> None:
        """Look at the loop: what it does, and, inside a span, where it is."""
        loop = self._probe.loop
        self._stacks.look(now, late_s=self._late_s)
        frame = frame_of(loop.thread)
        if loop.number and frame is not None and spans_around(frame, optimizing=self._probe.optimizing):
            self._leaving.trains(places_of(frame), loop.thread)

    def _signal(self, now: float) -> None:
        self._probe.say_signal()

    def _deep(self, now: float) -> None:
        self._probe.write_looks()

    def _leave(self, now: float) -> None:
        """The loop has been silent: say so once if it was left, and why. If it steps again, it was not."""
        loop = self._probe.loop
        if not loop.number or now - loop.touched < _LEFT_S or self._left_told == loop.touched:
            return
        why = self._why_left()
        if why:
            self._left_told = loop.touched
            frame = frame_of(loop.thread)
            where = top_user_frame(lines_of(frame)) if frame is not None else ""
            self._probe.events.say("leaving", why, where=where, since=now - loop.touched)

    def _why_left(self) -> str:
        thread = self._probe.loop.thread
        frame = frame_of(thread)
        if frame is None:
            return "its thread has ended"
        if spans_around(frame, optimizing=self._probe.optimizing):
            return ""
        return self._leaving.why(places_of(frame), thread)

    def _gap(self, now: float) -> None:
        """The loop is in no span: name the frame it is in, once a gap and again while it doubles."""
        probe, loop = self._probe, self._probe.loop
        gap_s = now - loop.touched
        if loop.touched != self._gap_began:  # another gap, whether or not we looked in between
            self._gap_began, self._gap_told = loop.touched, 0.0
        if not loop.number or gap_s < GAP_S or not self._stacks_left:
            return
        if gap_s < 2 * self._gap_told:
            return
        frame = frame_of(loop.thread)
        if frame is None or spans_around(frame, optimizing=probe.optimizing):
            return
        frames = lines_of(frame)
        probe.read_marks()
        if now - loop.touched >= GAP_S:  # it may have gone on meanwhile
            self._gap_told = gap_s
            self._stacks_left -= 1
            probe.events.say("stack", top_user_frame(frames), seconds=gap_s, frames=frames)

    def _hang(self, now: float) -> None:
        probe, loop = self._probe, self._probe.loop
        silent_s = now - loop.touched
        if silent_s < HANG_S:
            if self._hang_told:
                probe.events.say("hang over", "", seconds=loop.touched - self._hang_began)
            self._hang_told = 0.0
        elif not self._hang_told or now - self._hang_told > max(SAY_AGAIN_S, SAY_AGAIN * silent_s):
            self._hang_told, self._hang_began = now, loop.touched
            frame = frame_of(loop.thread)
            inside = spans_around(frame, optimizing=probe.optimizing)
            left = self._why_left()
            if not left:
                probe.events.say("hang", _hang_text(frame, inside), **self._hang_facts(silent_s, inside))

    def _hang_facts(self, silent_s: float, inside: list[Inside]) -> dict[str, Any]:
        loop = self._probe.loop
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        mine = threading.get_ident()
        stacks = {
            names.get(ident, str(ident)): lines_of(frame)
            for ident, frame in sys._current_frames().items()
            if ident != mine
        }
        collectives = [one.name for one in inside if one.name]
        return {
            "seconds": silent_s,
            "inside": inside[-1].kind if inside else "",
            "stacks": stacks,
            "collective_seq": loop.collectives + len(collectives),
            "collective_op": collectives[0] if collectives else loop.collective,
            "in_collective": any(one.kind == "collective" for one in inside),
            "flight": flight(),
        }

    def _allocator(self, now: float) -> None:
        torch = sys.modules.get("torch")
        if now < self._memory_due or torch is None or not torch.cuda.is_initialized():
            return
        self._memory_due = now + MEMORY_S
        stats = torch.cuda.memory_stats(self._probe.card if self._probe.card is not None else _fullest(torch))
        readings = {
            "allocated": stats.get("allocated_bytes.all.current", 0),
            "reserved": stats.get("reserved_bytes.all.current", 0),
            "retries": stats.get("num_alloc_retries", 0),
            "ooms": stats.get("num_ooms", 0),
        }
        self._memory.add(now, readings)


def _fullest(torch: Any) -> int:
    """The card that most is allocated on. Which one is current, CUDA knows of each thread by itself: of this
    thread it would be the first one, whatever the loop uses."""
    return max(range(torch.cuda.device_count()), key=torch.cuda.memory_allocated, default=0)


def flight() -> dict[str, Any]:
    """What the flight recorder knows: of each group the last collective enqueued and the last completed."""
    core = sys.modules.get("torch._C._distributed_c10d")
    found: dict[str, Any] = {}
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(core, name, None)
        if dump is not None and "torch.distributed" in sys.modules:
            told = json.loads(dump())
            found |= {group: dict(state) for group, state in told.get("pg_status", {}).items()}
            entries = told.get("entries", [])[-3:]
            found.setdefault("last", []).extend(
                [entry.get("collective_seq_id"), entry.get("profiling_name"), entry.get("state")]
                for entry in entries
            )
    return found


def _hang_text(frame: FrameType | None, inside: list[Inside]) -> str:
    where = top_user_frame(lines_of(frame)) if frame is not None else "its thread has ended"
    return f"{inside[-1].kind if inside else 'outside every span'}: {where}"
