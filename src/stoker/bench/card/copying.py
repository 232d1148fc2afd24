"""A process that copies between host and cards: `python -m stoker.bench.card.copying`, a job on its input.

Blocks walk through buffers that no processor's cache holds. A stream is waited for after a group of copies,
as a loader does, and not after each one; what one copy costs that is waited for is measured beside.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle, islice
from typing import Any

import torch

from stoker.bench.card.asking import Said, answer_with
from stoker.errors import UsageError

_GROUP_BYTES, _MOST_COPIES = 256 << 20, 64  # of a group
_VIEWS = 512  # places that a size is copied to in turn
_ALONE = 21  # copies that are waited for, each by itself
TO, FROM, BOTH = "host to card", "card to host", "both at once"


class Card:
    """A device with a stream of its own for each direction. On a CPU nothing is ever late."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.is_cuda = self.device.type == "cuda"

    def stream(self) -> Any:
        make: Any = torch.cuda.Stream  # untyped in torch
        return make(self.device) if self.is_cuda else None

    def host(self, size: int, *, pinned: bool) -> torch.Tensor:
        """Memory that is there: what was only reserved is copied from no memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned and self.is_cuda).fill_(7)

    def own(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device).fill_(1)


class Way:
    """Copies of one size in one direction, by one thread."""

    def __init__(self, card: Card, target: torch.Tensor, source: torch.Tensor, size: int) -> None:
        self._stream = card.stream()
        places = range(0, target.numel() - size + 1, size)
        thin = -(-len(places) // _VIEWS)
        pairs = [(target[at : at + size], source[at : at + size]) for at in places[::thin]]
        self._next: Iterator[tuple[torch.Tensor, torch.Tensor]] = cycle(pairs)
        self._size, self._group = size, max(1, min(_MOST_COPIES, _GROUP_BYTES // size))
        self.copies, self.began, self.ended, self.alone_s = 0, 0.0, 0.0, 0.0

    def warm_up(self) -> None:
        with self._on():
            self._copy(self._group)
            alone = []
            for _ in range(_ALONE):
                begun = time.perf_counter()
                self._copy(1)
                alone.append(time.perf_counter() - begun)
        self.alone_s = statistics.median(alone)

    def run(self, seconds: float, gate: threading.Barrier) -> None:
        with self._on():
            gate.wait()
            self.began = self.ended = time.perf_counter()
            while self.ended - self.began < seconds:
                self._copy(self._group)
                self.copies += self._group
                self.ended = time.perf_counter()

    @property
    def bytes(self) -> int:
        return self.copies * self._size

    def _copy(self, count: int) -> None:
        for target, source in islice(self._next, count):
            target.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()

    def _on(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()


def measure(job: dict[str, Any], said: Said) -> dict[str, Any]:
    """Every card, size, direction and kind of memory; then between cards."""
    if job["cores"]:
        os.sched_setaffinity(0, job["cores"])  # before any memory: it then lies on their node
    cards = [Card(name) for name in device_names(job["device"])]
    torch.set_num_threads(1)  # of a CPU's copies: a card's need none
    plans = [(card, pinned) for card in cards for pinned in (True, False) if card.is_cuda or not pinned]
    rounds = len(plans) * len(job["sizes"]) * 3
    done: list[dict[str, Any]] = []
    for card, pinned in plans:
        room = max(job["room"], *job["sizes"])
        hosts = [card.host(room, pinned=pinned) for _ in range(2)]
        own = [card.own(room) for _ in range(2)]
        for size in job["sizes"]:
            for name, pairs in ((TO, [(own[0], hosts[0])]), (FROM, [(hosts[1], own[1])]), (BOTH, None)):
                said(f"{card.device}, {name}, {size} B", len(done), rounds)
                both = [(own[0], hosts[0]), (hosts[1], own[1])]
                found = timed([Way(card, *pair, size) for pair in pairs or both], job["seconds"])
                done.append(
                    {"card": cards.index(card), "way": name, "pinned": pinned, "bytes": size, **found}
                )
        del hosts, own
    peers = between(cards, job) if len(cards) > 1 and job["peers"] else []
    return {"cards": [described(card) for card in cards], "copies": done, "peers": peers}


def timed(ways: Sequence[Way], seconds: float) -> dict[str, float]:
    """All of them at once: their bytes together over the time until the last has ended."""
    for way in ways:
        way.warm_up()
    gate = threading.Barrier(len(ways))
    threads = [threading.Thread(target=way.run, args=(seconds, gate)) for way in ways]
    cpu_s = time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cpu_s = time.process_time() - cpu_s
    if not all(way.copies for way in ways):
        raise RuntimeError("a copy failed")  # its thread has said why
    took_s = max(way.ended for way in ways) - min(way.began for way in ways)
    return {
        "bytes_s": sum(way.bytes for way in ways) / took_s,
        "each_s": took_s / max(way.copies for way in ways),
        "alone_s": max(way.alone_s for way in ways),
        "cpu_s": cpu_s,
    }


def between(cards: Sequence[Card], job: dict[str, Any]) -> list[dict[str, Any]]:
    """From each card to each other one, the largest size."""
    size, found = job["sizes"][-1], []
    for one in cards:
        for other in cards:
            if one is not other:
                way = Way(one, other.own(size), one.own(size), size)
                direct = torch.cuda.can_device_access_peer(one.device, other.device)
                places = {"card": cards.index(one), "other": cards.index(other), "direct": direct}
                found.append({**places, "bytes": size, **timed([way], job["seconds"])})
    return found


def device_names(wanted: str) -> list[str]:
    """`cuda` is every card that is visible."""
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise UsageError(f"--device {wanted}: {error}", hint="cuda, cuda:0 or cpu") from None
    if device.type == "cpu":
        return ["cpu"]
    if device.type != "cuda" or not torch.cuda.is_available():
        raise UsageError(
            "this machine has no card that torch can use",
            hint="`stoker doctor` says why; `--device cpu` measures memory alone",
        )
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise UsageError(f"there is no cuda:{device.index}", hint=f"there are {count}, from cuda:0 on")
    return [f"cuda:{number}" for number in ([device.index] if device.index is not None else range(count))]


def described(card: Card) -> dict[str, Any]:
    """Its name and its place on the bus, by which the machine's inventory knows it."""
    if not card.is_cuda:
        return {"name": "", "bus": "", "device": "cpu"}
    known: Any = torch.cuda.get_device_properties(card.device)
    place = [getattr(known, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    bus = f"{place[0]:04x}:{place[1]:02x}:{place[2]:02x}.0" if None not in place else ""
    return {"name": known.name, "bus": bus, "device": str(card.device)}


if __name__ == "__main__":
    answer_with(measure)
