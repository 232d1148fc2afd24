"""A thread inside the training process for what no hook can see: gaps, hangs, the allocator's counters.

It wakes twenty times a second and mostly finds the loop inside a span. Only when the loop has been outside
every span for longer than GAP_S does it look at the loop's frames, and only when no span has ended for HANG_S
at everybody's.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from stoker.runs.files import Rows

if TYPE_CHECKING:
    from stoker.observe.probe import Probe

TICK_S = 0.05
GAP_S = 0.05
HANG_S = 10.0
SAY_AGAIN_S = 30.0
MEMORY_S = 1.0
_STACKS = 500  # events of one process: a gap in every step of a long run says nothing new
_FRAMES = 40
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


class Stalls:
    """Watches one probe; `start` and `stop` are the probe's, the rest runs in the thread."""

    def __init__(self, probe: Probe, memory: Path) -> None:
        self._probe, self._memory = probe, Rows(memory)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stoker-watch", daemon=True)
        self._stacks_left = _STACKS
        self._gap_told = self._hang_told = self._hang_began = 0.0
        self._memory_due = 0.0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2)
        self._memory.close()

    def _run(self) -> None:
        for look in (self._gap, self._hang, self._allocator):
            look(time.monotonic())  # imports and first calls happen before there is anything to disturb
        looks = [self._gap, self._hang, self._allocator]
        while not self._over.wait(TICK_S):
            now = time.monotonic()
            for look in list(looks):
                try:
                    look(now)
                except Exception as error:
                    looks.remove(look)
                    name = look.__name__.strip("_")
                    self._probe.events.say("hook off", f"{name}: {error!r}", hook=name)

    def _gap(self, now: float) -> None:
        """The loop is in no span: name the frame it is in, once a gap and again while it doubles."""
        probe = self._probe
        gap_s = now - probe.touched
        if probe.open or not probe.number or gap_s < GAP_S or not self._stacks_left:
            self._gap_told = 0.0
            return
        if gap_s < 2 * self._gap_told:
            return
        frames = frames_of(probe.loop)
        if frames and not probe.open:  # it may have gone on meanwhile
            self._gap_told = gap_s
            self._stacks_left -= 1
            probe.events.say("stack", top_user_frame(frames), seconds=gap_s, frames=frames)

    def _hang(self, now: float) -> None:
        probe = self._probe
        silent_s = now - probe.touched
        if silent_s < HANG_S:
            if self._hang_told:
                probe.events.say("hang over", "", seconds=probe.touched - self._hang_began)
            self._hang_told = 0.0
        elif not self._hang_told or now - self._hang_told > SAY_AGAIN_S:
            self._hang_told, self._hang_began = now, probe.touched
            inside = probe.open[-1][0] if probe.open else ""
            probe.events.say("hang", _hang_text(probe, inside), **self._hang_facts(silent_s, inside))

    def _hang_facts(self, silent_s: float, inside: str) -> dict[str, Any]:
        probe = self._probe
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        mine = threading.get_ident()
        stacks = {
            names.get(ident, str(ident)): _lines(frame)
            for ident, frame in sys._current_frames().items()
            if ident != mine
        }
        return {
            "seconds": silent_s,
            "inside": inside,
            "stacks": stacks,
            "collective_seq": probe.collective_seq,
            "collective_op": probe.collective_op,
            "in_collective": probe.inside("collective"),
            "flight": flight(),
        }

    def _allocator(self, now: float) -> None:
        torch = sys.modules.get("torch")
        if now < self._memory_due or torch is None or not torch.cuda.is_initialized():
            return
        self._memory_due = now + MEMORY_S
        stats = torch.cuda.memory_stats()
        readings = {
            "allocated": stats.get("allocated_bytes.all.current", 0),
            "reserved": stats.get("reserved_bytes.all.current", 0),
            "retries": stats.get("num_alloc_retries", 0),
            "ooms": stats.get("num_ooms", 0),
        }
        self._memory.add(now, readings)


def frames_of(ident: int) -> list[str]:
    """Where a thread is, outermost first; nothing of one that has ended."""
    frame = sys._current_frames().get(ident)
    return _lines(frame) if frame is not None else []


def top_user_frame(frames: list[str]) -> str:
    """The innermost frame that is not a library's: what the user can change."""
    own = [line for line in frames if not line.startswith((*_LIBRARIES, "<frozen"))]
    return (own or frames)[-1]


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


def _hang_text(probe: Probe, inside: str) -> str:
    frames = frames_of(probe.loop)
    where = top_user_frame(frames) if frames else "its thread has ended"
    return f"{inside or 'outside every span'}: {where}"


def _lines(frame: FrameType) -> list[str]:
    summary = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=_FRAMES, lookup_lines=False)
    return [f"{one.filename}:{one.lineno} {one.name}" for one in reversed(summary)]
