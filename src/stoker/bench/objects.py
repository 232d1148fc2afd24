"""Object-store benchmark: ranges of what lies under a URL, by size and connections; time to first byte.

Nothing is written. Every request asks for a range of its own, so that no cache in between has it already.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, islice

from stoker.bench.figures import Bench, Figure
from stoker.errors import StorageError, UsageError
from stoker.formats.sizes import counted, say_binary, say_size
from stoker.redact import redact_url
from stoker.storage import Entry, Store, open_store, split_url

_LISTED = 1000  # entries looked at for objects worth reading
_FIRST_BYTES = 16  # requests of a byte each, one after another
_ENOUGH = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranges:
    """How a store is asked: ranges of a size over so many connections."""

    bytes: int
    connections: int

    @property
    def name(self) -> str:
        return f"ranges of {say_binary(self.bytes)} × {counted(self.connections, 'connection')}"


USUAL = tuple(
    Ranges(bytes=size << 10, connections=many) for size in (64, 1024, 8192) for many in (1, 4, 16, 32)
)


def bench_objects(
    url: str,
    *,
    seconds: float = 1.0,
    wanted: Sequence[Ranges] = USUAL,
    said: Callable[[str, int, int], None] = lambda name, done, of: None,
) -> Bench:
    """Read from what lies under a URL, or from the one object that it names."""
    store, objects = _found(url)
    said("time to first byte", 0, len(wanted))
    figures = [_first_byte(store, objects)]
    notes, rates = [], list[tuple[Ranges, float]]()
    for number, ranges in enumerate(wanted):
        said(ranges.name, number, len(wanted))
        if sum(one.bytes // ranges.bytes for one in objects) < ranges.connections:
            notes.append(f"{ranges.name}: the objects are too small for so many")
            continue
        rate, latencies = _read(store, objects, ranges, seconds)
        rates.append((ranges, rate))
        beside = {"p50_s": statistics.median(latencies), "p99_s": _percentile(latencies, 0.99)}
        figures.append(Figure(name=ranges.name, value=rate, unit="B/s", beside=beside))
    held = f"{counted(len(objects), 'object')} of {say_size(sum(one.bytes for one in objects))}"
    return Bench(
        verb="path",
        of=f"{redact_url(url)}, {held}",
        figures=figures,
        advice=_advice(rates),
        measured=_measured(rates, figures[0].value),
        notes=notes,
    )


def _found(url: str) -> tuple[Store, list[Entry]]:
    """The largest objects under a prefix, or the one that is named."""
    store = open_store(url)
    unlisted: StorageError | None = None
    try:
        listed = [one for one in islice(store.list(), _LISTED) if one.bytes]
    except StorageError as error:  # a plain web server has no listing, and may well have the object
        listed, unlisted = [], error
    if not listed:
        folder, name = split_url(url.rstrip("/"))
        store = open_store(folder)
        try:
            store.read_range(name, 0, 1)
            listed = [store.stat(name)]
        except StorageError as error:
            if unlisted:
                raise unlisted from error
            raise UsageError(
                f"there is nothing to read under {redact_url(url)}", hint="name a prefix with objects in it"
            ) from error
    return store, sorted(listed, key=lambda one: -one.bytes)[:64]


def _first_byte(store: Store, objects: Sequence[Entry]) -> Figure:
    times = []
    for number in range(_FIRST_BYTES):
        entry = objects[number % len(objects)]
        begun = time.monotonic()
        store.read_range(entry.path, (number * 7919) % entry.bytes, 1)
        times.append(time.monotonic() - begun)
    return Figure(
        name="time to first byte",
        value=statistics.median(times),
        unit="s",
        better="less",
        beside={"p99_s": _percentile(times, 0.99)},
    )


def _read(
    store: Store, objects: Sequence[Entry], ranges: Ranges, seconds: float
) -> tuple[float, list[float]]:
    """Bytes a second of all connections, and how long each range took."""
    places = [
        (one.path, at) for one in objects for at in range(0, one.bytes - ranges.bytes + 1, ranges.bytes)
    ]
    turn, lock, latencies = count(), threading.Lock(), list[float]()
    begun = time.monotonic()

    def ask() -> None:
        while time.monotonic() - begun < seconds:
            with lock:
                number = next(turn)
            path, at = places[number * 2654435761 % len(places)]
            asked = time.monotonic()
            store.read_range(path, at, ranges.bytes)
            latencies.append(time.monotonic() - asked)

    with ThreadPoolExecutor(ranges.connections, thread_name_prefix="stoker-bench") as pool:
        for asked in [pool.submit(ask) for _ in range(ranges.connections)]:
            asked.result()
    return len(latencies) * ranges.bytes / max(1e-9, time.monotonic() - begun), latencies


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _advice(rates: Sequence[tuple[Ranges, float]]) -> list[str]:
    if not rates:
        return []
    enough = _ENOUGH * max(rate for _, rate in rates)
    ranges, rate = min(
        (one for one in rates if one[1] >= enough), key=lambda one: (one[0].connections, one[0].bytes)
    )
    return [
        f"{ranges.name} give {say_size(rate)}/s: more gain less than {1 - _ENOUGH:.0%}; staging finds its "
        "own number of connections"
    ]


def _measured(rates: Sequence[tuple[Ranges, float]], first_byte_s: float) -> dict[str, float]:
    if not rates:
        return {}
    return {"node_rate": max(rate for _, rate in rates), "store_latency": first_byte_s}
