"""Accelerator emulation, as MLPerf Storage does it: how many cards a store can feed, before there are any.

Each emulated card takes a batch, sleeps for as long as a real one computes, and takes the next. Its readers
read real samples from real files, past the page cache. Accelerator utilisation is the share of the time it
slept; a workload passes at 90%, CosmoFlow at 70%.
"""

from __future__ import annotations

import os
import queue
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stoker.bench.direct import Direct
from stoker.bench.figures import Bench, Figure
from stoker.errors import StorageError, UsageError
from stoker.formats.sizes import counted, say_size
from stoker.storage import named_errors

_WARM_UPS = 2  # batches of a card before its time counts
_LEFT_FREE = 1 << 30
_BLOCK = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A workload as MLPerf Storage 1.0 published it (dlio_benchmark 2.0, configs/workload)."""

    sample_bytes: int
    batch: int
    step_s: float
    in_a_file: int  # samples
    passes_at: float = 0.9
    readers: int = 4  # of a card
    ahead: int = 2  # batches

    @property
    def bytes_s(self) -> float:
        """What one card takes when it never waits."""
        return self.batch * self.sample_bytes / self.step_s


def _llm(parameters: float, tokens: int, *, flops: float) -> Profile:
    """Not of MLPerf: a sequence of 32-bit ids, 6 FLOPs a parameter and token, 40% of the peak."""
    return Profile(
        sample_bytes=4 * tokens, batch=1, step_s=6 * parameters * tokens / (0.4 * flops), in_a_file=1 << 15
    )


PROFILES = {
    "resnet50-h100": Profile(sample_bytes=114_660, batch=400, step_s=0.224, in_a_file=1251, readers=8),
    "resnet50-a100": Profile(sample_bytes=114_660, batch=400, step_s=0.435, in_a_file=1251, readers=8),
    "unet3d-h100": Profile(sample_bytes=146_600_628, batch=7, step_s=0.323, in_a_file=1),
    "unet3d-a100": Profile(sample_bytes=146_600_628, batch=7, step_s=0.636, in_a_file=1),
    "cosmoflow-h100": Profile(sample_bytes=2_828_486, batch=1, step_s=0.0035, in_a_file=1, passes_at=0.7),
    "cosmoflow-a100": Profile(sample_bytes=2_828_486, batch=1, step_s=0.00551, in_a_file=1, passes_at=0.7),
    "llama3-8b-h100": _llm(8.03e9, 8192, flops=989e12),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Emulated:
    """So many cards, for a while."""

    cards: int
    utilisation: float  # of the worst card
    bytes_s: float


def bench_accelerators(
    folder: Path,
    name: str,
    *,
    cards: int = 0,
    most: int = 64,
    size: int = 2 << 30,
    seconds: float = 5.0,
    said: Callable[[str, int, int], None] = lambda name, done, of: None,
) -> Bench:
    """How many cards of a profile the folder's disk feeds; with `cards`, whether it feeds that many."""
    profile = PROFILES.get(name)
    if profile is None:
        raise UsageError(f"there is no profile {name!r}", hint=f"use one of {', '.join(PROFILES)}")
    with samples_in(folder, profile, size) as files:
        tried: dict[int, Emulated] = {}

        def try_with(count: int) -> bool:
            said(f"{counted(count, 'card')} of {name}", len(tried), 0)
            tried[count] = emulate(profile, files, cards=count, seconds=seconds)
            return tried[count].utilisation >= profile.passes_at

        largest = (cards if try_with(cards) else 0) if cards else largest_passing(try_with, most=most)
        figures = [_figure(name, profile, tried[count]) for count in sorted(tried)]
        is_direct = files.is_direct
    if not cards:
        limit = _limit(tried, largest, most)
        figures.append(Figure(name=f"most cards of {name}", value=largest, unit="count", limit=limit))
    return Bench(
        verb="accelerators",
        of=f"{folder}: {name}, {say_size(profile.bytes_s)}/s a card, passes at {profile.passes_at:.0%}",
        figures=figures,
        passed=largest > 0,
        measured={"store_rate": max(one.bytes_s for one in tried.values())},
        notes=[] if is_direct else ["the filesystem has no O_DIRECT: memory answers what it has kept"],
    )


def largest_passing(passes: Callable[[int], bool], *, most: int) -> int:
    """The largest number that passes, by doubling and then halving the gap."""
    good, bad = 0, most + 1
    count = 1
    while count < bad and passes(count):
        good, count = count, min(2 * count, most)
        if good == most:
            return most
    bad = min(bad, count)
    while bad - good > 1:
        middle = (good + bad) // 2
        if passes(middle):
            good = middle
        else:
            bad = middle
    return good


@contextmanager
def samples_in(folder: Path, profile: Profile, size: int) -> Iterator[Direct]:
    """Files of samples in a folder of our own, gone afterwards."""
    count = max(2, size // (profile.sample_bytes * profile.in_a_file))
    in_a_file = min(profile.in_a_file, max(1, size // profile.sample_bytes // count))
    each = in_a_file * profile.sample_bytes
    with named_errors("write", folder):
        stat = os.statvfs(folder)
        if stat.f_bavail * stat.f_frsize < count * each + _LEFT_FREE:
            raise StorageError(
                f"{folder} has too little room for {say_size(count * each)}", hint="give --size"
            )
        own = Path(tempfile.mkdtemp(prefix=".stoker-bench-", dir=folder))
    try:
        with named_errors("write", own):
            paths = [_written(own / f"{number:06}", each) for number in range(count)]
        with Direct(paths, sample_bytes=profile.sample_bytes, in_a_file=in_a_file) as files:
            yield files
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _written(path: Path, size: int) -> Path:
    block = os.urandom(min(size, _BLOCK))  # a disk that compresses must not find zeros
    with path.open("wb") as file:
        for at in range(0, size, len(block)):
            file.write(block[: size - at])
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def emulate(profile: Profile, files: Direct, *, cards: int, seconds: float) -> Emulated:
    """Cards beside one another; the worst one's share of time at work."""
    all_cards = [_Card(profile, files, seed) for seed in range(cards)]
    deadline = time.monotonic() + seconds
    threads = [
        threading.Thread(target=work, args=(deadline,), name="stoker-bench-card")
        for card in all_cards
        for work in (card.compute, *[card.read] * profile.readers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for card in all_cards:
        if card.failed:
            raise card.failed
    rates = [card.batches * profile.batch * profile.sample_bytes / card.seconds for card in all_cards]
    return Emulated(cards=cards, utilisation=min(card.utilisation for card in all_cards), bytes_s=sum(rates))


class _Card:
    """An emulated card and the threads that read for it."""

    def __init__(self, profile: Profile, files: Direct, seed: int) -> None:
        self._profile, self._files, self._seed = profile, files, seed
        # a slot for each sample that may be ahead; readers put samples, the card takes a batch of them
        self._ready: queue.Queue[int] = queue.Queue(profile.batch * profile.ahead)
        self._over = threading.Event()
        self.batches, self.seconds = 0, 1e-9
        self.failed: OSError | None = None

    @property
    def utilisation(self) -> float:
        return min(1.0, self.batches * self._profile.step_s / self.seconds)

    def compute(self, deadline: float) -> None:
        """Warm up, then take batches until the time is over; at least one."""
        try:
            for _ in range(_WARM_UPS):
                self._take()
            begun = time.monotonic()
            while not self.failed and (time.monotonic() < deadline or not self.batches):
                self._take()
                time.sleep(self._profile.step_s)
                self.batches += 1
                self.seconds = time.monotonic() - begun
        finally:
            self._over.set()

    def _take(self) -> None:
        for _ in range(self._profile.batch):
            while not self.failed:
                try:
                    self._ready.get(timeout=0.5)
                    break
                except queue.Empty:
                    continue

    def read(self, deadline: float) -> None:
        draw = random.Random(self._seed << 16 | threading.get_ident() & 0xFFFF)
        with self._files.buffer() as buffer:
            while not self._over.is_set():
                try:
                    self._files.read(draw.randrange(self._files.samples), buffer)
                except OSError as error:
                    self.failed = error
                    return
                while not self._over.is_set():
                    try:
                        self._ready.put(1, timeout=0.05)
                        break
                    except queue.Full:
                        continue


def _figure(name: str, profile: Profile, one: Emulated) -> Figure:
    passed = one.utilisation >= profile.passes_at
    return Figure(
        name=f"utilisation, {one.cards} × {name}",
        value=one.utilisation,
        unit="share",
        limit="passes" if passed else "the cards wait for storage",
        beside={"read_bytes_s": one.bytes_s},
    )


def _limit(tried: dict[int, Emulated], largest: int, most: int) -> str:
    if largest == most:
        return f"no more than {most} were tried"
    worst = min((one for one in tried.values() if one.cards > largest), key=lambda one: one.cards)
    return f"with {worst.cards} the store gives {say_size(worst.bytes_s)}/s and no more"
