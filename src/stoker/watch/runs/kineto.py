"""A torch profiler's (Kineto's) trace as columns: what the card did, what the host did, who queued what.

Operators inside operators, Python functions too short to matter and arrows between events are dropped as
they are read, so that what is kept grows with the kernels and not with the file.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import UnreadableError
from stoker.recording import WORK, Floats
from stoker.watch.runs.traceevents import Line, read_events

US = 1e-6
SHORT_US = 500.0  # Python functions below it explain no gap that matters
HOST = ("op", "runtime", "annotation", "python")
_HOST_OF = {
    "cpu_op": "op",
    "operator": "op",  # as torch 1.x called it
    "cuda_runtime": "runtime",
    "runtime": "runtime",
    "cuda_driver": "runtime",
    "user_annotation": "annotation",
    "python_function": "python",
}
_CARD = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "concurrent_kernel")
# The collectives' kernels by name, of NCCL and RCCL; the same as HolisticTraceAnalysis takes.
_COLLECTIVE = re.compile(r"^(nccl|rccl|mscclpp?|oneccl).*Kernel", re.IGNORECASE)
_DEVICES = 1 << 16
_COPY = re.compile(r"^(Memcpy|CopyHost|CopyDevice|dma)", re.IGNORECASE)


@dataclass(slots=True)
class Rows:
    """Events as columns while they are read; times in microseconds of the trace."""

    what: array[int] = field(default_factory=lambda: array("B"))
    name: array[int] = field(default_factory=lambda: array("i"))
    start: array[float] = field(default_factory=lambda: array("d"))
    end: array[float] = field(default_factory=lambda: array("d"))
    place: array[int] = field(default_factory=lambda: array("i"))  # thread, or device
    link: array[int] = field(default_factory=lambda: array("q"))  # correlation: who queued what
    bytes: array[int] = field(default_factory=lambda: array("q"))

    def put(
        self, what: int, name: int, start: float, end: float, place: int, link: int, bytes: int = 0
    ) -> None:
        self.what.append(what)
        self.name.append(name)
        self.start.append(start)
        self.end.append(end)
        self.place.append(place)
        self.link.append(link)
        self.bytes.append(bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Rows as arrays, sorted by start; times in seconds since the trace's first event."""

    what: NDArray[np.uint8]
    name: NDArray[np.int32]
    start: Floats
    end: Floats
    place: NDArray[np.int32]
    link: NDArray[np.int64]
    bytes: NDArray[np.int64]

    def kept(self, which: NDArray[Any]) -> Columns:
        return Columns(**{name: getattr(self, name)[which] for name in self.__slots__})


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One rank's trace: the card's events (what: WORK) and the host's (what: HOST)."""

    path: Path
    facts: Line
    names: tuple[str, ...]
    origin_us: float  # the trace's first moment, by its own clock
    card: Columns
    host: Columns

    @property
    def rank(self) -> int | None:
        told = self.facts.get("distributedInfo")
        rank = told.get("rank") if isinstance(told, dict) else None
        return rank if isinstance(rank, int) and not isinstance(rank, bool) else None


def read_trace(path: Path) -> Trace:
    """Read one file."""
    facts: Line = {}
    reading = _Reading()
    for event in read_events(path, facts=facts):
        if event.get("ph") == "X":
            reading.take(event)
    if not reading.card.start and not reading.host.start:
        raise UnreadableError(
            f"{path} holds no event of a profiler", hint="give a trace that torch.profiler exported"
        )
    origin_us = min(min(rows.start, default=np.inf) for rows in (reading.card, reading.host))
    return Trace(
        path=path,
        facts=facts,
        names=tuple(reading.names),
        origin_us=float(origin_us),
        card=_columns(reading.card, origin_us),
        host=_columns(reading.host, origin_us),
    )


class _Reading:
    """Takes event after event."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.card, self.host = Rows(), Rows()
        self._threads: dict[object, int] = {}
        self._kinds: dict[str, int] = {}
        self._outer: dict[int, float] = {}  # thread → until when its last operator lasts

    def take(self, event: Line) -> None:
        category = str(event.get("cat") or "").lower()
        if category in _CARD:
            self._of_card(event, category)
        elif category in _HOST_OF:
            self._of_host(event, _HOST_OF[category])

    def _of_card(self, event: Line, category: str) -> None:
        name, args = str(event.get("name")), event.get("args")
        args = args if isinstance(args, dict) else {}
        times = _times(event)
        if times is None:
            return
        kind = self._kinds.get(name)
        if kind is None:
            kind = self._kinds[name] = WORK.index(_work(name, category))
        device = _whole(args.get("device", event.get("pid"))) % _DEVICES
        link = _whole(args.get("correlation"))
        self.card.put(kind, self._name(name), *times, device, link, _whole(args.get("bytes")))

    def _of_host(self, event: Line, kind: str) -> None:
        times = _times(event)
        if times is None:
            return
        thread = self._thread(event)
        if kind == "op":
            if times[1] <= self._outer.get(thread, -1.0):
                return  # inside another operator of its thread
            self._outer[thread] = times[1]
        elif kind == "python" and times[1] - times[0] < SHORT_US:
            return
        args = event.get("args")
        link = _whole(args.get("correlation")) if isinstance(args, dict) and kind == "runtime" else 0
        self.host.put(HOST.index(kind), self._name(str(event.get("name"))), *times, thread, link)

    def _thread(self, event: Line) -> int:
        key = (event.get("pid"), event.get("tid")) if not isinstance(event.get("tid"), (list, dict)) else ()
        return self._threads.setdefault(key, len(self._threads))

    def _name(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))


def _work(name: str, category: str) -> str:
    if _COLLECTIVE.match(name):
        return "collective"
    if "memset" in category or name.startswith("Memset"):
        return "memset"
    if "memcpy" in category or _COPY.match(name):
        return "h2d" if "HtoD" in name or "HostToDevice" in name else "d2h" if "DtoH" in name else "copy"
    return "kernel"


def _times(event: Line) -> tuple[float, float] | None:
    """Start and end in microseconds; None of what has none."""
    try:
        start, lasts = float(event["ts"]), float(event["dur"])
    except (KeyError, TypeError, ValueError):
        return None
    return (start, start + lasts) if lasts >= 0 and abs(start) < 1e18 and lasts < 1e15 else None


def _whole(value: object) -> int:
    try:
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return 0
    return number if abs(number) < 2**62 else 0


def _columns(rows: Rows, origin_us: float) -> Columns:
    start = (np.array(rows.start, float) - origin_us) * US
    found = Columns(
        what=np.array(rows.what, np.uint8),
        name=np.array(rows.name, np.int32),
        start=start,
        end=(np.array(rows.end, float) - origin_us) * US,
        place=np.array(rows.place, np.int32),
        link=np.array(rows.link, np.int64),
        bytes=np.array(rows.bytes, np.int64),
    )
    return found.kept(np.argsort(start, kind="stable"))
