"""Storage to card: what `bench path --gpu` measures beyond the host, by the ways a loader has.

Stage by stage, as gdsio does: storage to host, host to card, both one after the other by threads with two
pinned buffers each, and by cuFile without the host where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from stoker.bench.card.asking import Said, ask
from stoker.bench.drive import Driven, Workload
from stoker.bench.figures import Figure
from stoker.errors import StokerError
from stoker.formats.sizes import counted, say_binary, say_size
from stoker.machine.allowed import usable_cores

_NEAR = 0.9  # of what a stage gives by itself: that stage holds the whole way back
_WORDS = {
    "copy": "pinned host to card",
    "direct": "storage to host to card, direct",
    "warm": "page cache to host to card",
    "cufile": "storage to card, cuFile",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Onward:
    """One way to the card: by copies alone, through the host, or by cuFile."""

    how: str
    work: Workload

    @property
    def name(self) -> str:
        threads = "" if self.how == "copy" else f" × {counted(self.work.threads, 'thread')}"
        order = "random, " if self.work.random else ""
        return f"{order}{_WORDS[self.how]}, {say_binary(self.work.block)}{threads}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """What came of them all."""

    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def usual_ways(seconds: float) -> list[Onward]:
    """Few: what is between storage and host is measured by more of them."""
    work = Workload(seconds=seconds)
    found = [Onward(how="copy", work=replace(work, block=size << 20)) for size in (1, 4, 32)]
    found += [Onward(how="direct", work=replace(work, block=1 << 20, threads=n)) for n in (1, 4, 16)]
    found += [Onward(how="direct", work=replace(work, block=4 << 20, threads=n)) for n in (4, 16)]
    found += [Onward(how="warm", work=replace(work, block=4 << 20, threads=n)) for n in (1, 4, 16)]
    return found + [Onward(how="cufile", work=replace(work, block=4 << 20, threads=n)) for n in (1, 4, 16)]


def reach_card(
    descriptor: int,
    file_bytes: int,
    *,
    device: str,
    ways: Sequence[Onward],
    storage_bytes_s: float,
    said: Said,
) -> Reached:
    """Measure; `storage_bytes_s` is what the storage gives the host at best."""
    fit = [one for one in ways if one.how == "copy" or one.work.block * one.work.threads <= file_bytes]
    few = f"{say_binary(file_bytes)} are too few"
    notes = [f"{one.name}: {few}" for one in ways if one not in fit]
    driven, cufile = dict[str, Driven](), ""
    # cuFile in a process of its own: what its library makes of a machine must not cost the other figures.
    for some in ([one for one in fit if one.how != "cufile"], [one for one in fit if one.how == "cufile"]):
        if not some:
            continue
        trials = [{"name": one.name, "how": one.how, "work": asdict(one.work)} for one in some]
        job = {"device": device, "descriptor": descriptor, "bytes": file_bytes, "trials": trials}
        seconds = 2 * sum(one.work.seconds for one in some) + 120.0
        try:
            answer = ask("reading", job, seconds=seconds, said=said, descriptors=[descriptor])
        except StokerError as error:
            if some[0].how != "cufile":
                raise
            notes += [f"{one.name}: {error.message}" for one in some]
            continue
        driven |= {one.pop("name"): _driven(one) for one in answer["found"]}
        notes += [f"{name}: {why}" for name, why in answer["refused"].items()]
        cufile = answer["cufile"]
    found = [(one, driven[one.name]) for one in fit if one.name in driven]
    return Reached(
        figures=[_figure(one, took, found, storage_bytes_s, cufile) for one, took in found],
        notes=notes,
        advice=_advice(found),
    )


def _driven(one: dict[str, Any]) -> Driven:
    return Driven(**{**one, "latencies": {int(bucket): n for bucket, n in one["latencies"].items()}})


def _figure(
    one: Onward, took: Driven, found: Sequence[tuple[Onward, Driven]], storage_bytes_s: float, cufile: str
) -> Figure:
    return Figure(
        name=one.name,
        value=took.bytes_s,
        unit="B/s",
        limit=_limit(one, took, found, storage_bytes_s, cufile),
        beside={
            "p50_s": took.latency_s(0.5),
            "p99_s": took.latency_s(0.99),
            "cores": took.cpu_s / max(1e-9, took.seconds),
        },
    )


def _limit(
    one: Onward, took: Driven, found: Sequence[tuple[Onward, Driven]], storage_bytes_s: float, cufile: str
) -> str:
    """The slowest of its stages, or that its own work is."""
    link = max((driven.bytes_s for way, driven in found if way.how == "copy"), default=0.0)
    if one.how == "copy":
        return "the link" if took.bytes_s >= _NEAR * link else "the start of each copy"
    if link and took.bytes_s >= _NEAR * link:
        return "the link"
    if one.how != "warm" and storage_bytes_s and took.bytes_s >= _NEAR * storage_bytes_s:
        return "the storage"
    more = [
        other.bytes_s
        for way, other in found
        if replace(way, work=replace(way.work, threads=1)) == replace(one, work=replace(one.work, threads=1))
        and way.work.threads > one.work.threads
    ]
    if more and max(more) > took.bytes_s / _NEAR:
        return "too few calls at once"
    if took.cpu_s >= 0.9 * took.seconds * min(one.work.threads, usable_cores()):
        return "memory and the processor"
    if one.how == "cufile" and "compat" in cufile:
        return cufile
    return "the storage" if one.how != "warm" else "memory and the processor"


def _advice(found: Sequence[tuple[Onward, Driven]]) -> list[str]:
    """The cheapest way that comes near to the best past the page cache."""
    cold = [(one, took) for one, took in found if one.how in ("direct", "cufile")]
    if not cold:
        return []
    best = max(took.bytes_s for _, took in cold)
    good = [(one, took) for one, took in cold if took.bytes_s >= 0.95 * best]
    one, took = min(good, key=lambda pair: (pair[0].work.threads, pair[0].work.block))
    way = "cuFile gives" if one.how == "cufile" else "through the host come"
    return [
        f"to the card {way} {say_size(took.bytes_s)}/s with {counted(one.work.threads, 'thread')} "
        f"and blocks of {say_binary(one.work.block)}"
    ]
