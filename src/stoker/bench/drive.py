"""Storage workload: blocks of a file read or written by threads for a while, each call timed, as fio does.

Every thread has a region of its own. It goes through its blocks in turn, or in a drawn order in which each
comes once, and with `repeats` begins anew at the end. `drive.c` runs it where it was built; the twin here
does the same, with two microseconds of Python in each call, and has no io_uring.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from stoker.native import native

ENGINES = ("sync", "mmap", "io_uring")  # in the order of drive.c
_FINE = 64  # buckets for each power of two: a percentile is off by 1.6% at most
_SEED = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is done to a file. Whether the page cache is passed by is the descriptor's matter."""

    engine: str = "sync"
    block: int = 1 << 20
    threads: int = 1
    depth: int = 1  # calls on their way at once, in each thread; io_uring's
    writes: bool = False
    random: bool = False
    repeats: bool = True
    seconds: float = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Driven:
    """How a workload went."""

    calls: int
    bytes: int
    seconds: float
    cpu_s: float  # of this process while it lasted
    latencies: Mapping[int, int]  # calls by bucket

    @property
    def bytes_s(self) -> float:
        return self.bytes / max(1e-9, self.seconds)

    def latency_s(self, share: float) -> float:
        """The latency that this share of the calls stayed within."""
        seen, wanted = 0, share * sum(self.latencies.values())
        for bucket, calls in sorted(self.latencies.items()):
            seen += calls
            if seen >= wanted:
                return bucket_s(bucket)
        return 0.0


def drive(descriptor: int, file_bytes: int, work: Workload) -> Driven:
    """Do the work. OSError is what the filesystem said, ENOSYS where there is no io_uring."""
    calls, seconds, cpu_s, latencies = _driven(descriptor, file_bytes, work)
    return Driven(
        calls=calls,
        bytes=calls * work.block,
        seconds=seconds,
        cpu_s=cpu_s,
        latencies=latencies,
    )


def _driven(descriptor: int, file_bytes: int, work: Workload) -> tuple[int, float, float, Mapping[int, int]]:
    built = native("bench._drive")
    if built is None:
        return drive_in_python(descriptor, file_bytes, work)
    calls, nanoseconds, cpu_ns, latencies = built.drive(
        descriptor,
        ENGINES.index(work.engine),
        work.writes,
        work.random,
        work.repeats,
        file_bytes,
        work.block,
        work.threads,
        work.depth,
        work.seconds,
        _SEED,
    )
    return calls, nanoseconds / 1e9, cpu_ns / 1e9, latencies


def drive_in_python(
    descriptor: int, file_bytes: int, work: Workload
) -> tuple[int, float, float, Mapping[int, int]]:
    """The twin of drive.c: calls, seconds, seconds of CPU, calls by bucket of latency."""
    if work.engine == "io_uring":
        raise OSError(errno.ENOSYS, "io_uring needs the C module, which was not built here")
    blocks = file_bytes // work.block // work.threads
    if not blocks:
        raise ValueError("the file has no block for each thread")
    # buffers may take longer to fill than a trial: its clock begins when every thread has filled its own
    clock = _Clock()
    gate = threading.Barrier(work.threads, action=clock.start)
    jobs = [_Job(descriptor, work, number, blocks, gate, clock) for number in range(work.threads)]
    threads = [threading.Thread(target=job.run, name=f"stoker-bench-{i}") for i, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for job in jobs:
        if job.failed:
            raise job.failed
    latencies = sum((job.latencies for job in jobs), Counter[int]())
    ended, cpu_s = max(job.ended for job in jobs), time.process_time() - clock.cpu_s
    return sum(latencies.values()), max(0, ended - clock.begun) / 1e9, cpu_s, latencies


class _Clock:
    """When all threads began, and the processor's time then."""

    begun, cpu_s = 0, 0.0

    def start(self) -> None:
        self.cpu_s, self.begun = time.process_time(), time.monotonic_ns()


class _Job:
    """One thread's share of the work."""

    def __init__(
        self,
        descriptor: int,
        work: Workload,
        number: int,
        blocks: int,
        gate: threading.Barrier,
        clock: _Clock,
    ) -> None:
        self._descriptor, self._work, self._blocks = descriptor, work, blocks
        self._first = number * blocks * work.block
        self._gate, self._clock, self.ended = gate, clock, 0
        self._seed = _SEED + number * 7919
        self.latencies: Counter[int] = Counter()
        self.failed: OSError | None = None

    def run(self) -> None:
        try:
            with mmap.mmap(-1, self._work.block) as buffer:  # a page's alignment, as O_DIRECT wants it
                buffer[:] = os.urandom(self._work.block)  # a disk that compresses must not find zeros
                self._gate.wait()
                self._run(buffer)
        except threading.BrokenBarrierError:
            return  # another has no memory, and tells it
        except OSError as error:
            self.failed = error
            self._gate.abort()  # nobody waits for it

    def _run(self, buffer: mmap.mmap) -> None:
        move = self._mover(buffer)
        begun = time.monotonic_ns()
        deadline = self._clock.begun + int(self._work.seconds * 1e9)
        for block in block_order(self._work, self._blocks, self._seed):
            if self.ended and begun >= deadline:  # one call at least
                return
            if move(self._first + block * self._work.block) != self._work.block:
                raise OSError(errno.ENOSPC if self._work.writes else errno.EIO, "a part of a block")
            self.ended = time.monotonic_ns()
            self.latencies[bucket_of(self.ended - begun)] += 1
            begun = self.ended

    def _mover(self, buffer: mmap.mmap) -> Callable[[int], int]:
        """What moves the block at a place; it says how many bytes that were."""
        if self._work.engine == "mmap":
            mapped = mmap.mmap(self._descriptor, 0, prot=mmap.PROT_READ)
            return lambda place: _copied(mapped, place, buffer)
        if self._work.writes:
            return lambda place: os.pwrite(self._descriptor, buffer, place)
        return lambda place: os.preadv(self._descriptor, [buffer], place)


def _copied(mapped: mmap.mmap, place: int, buffer: mmap.mmap) -> int:
    found = mapped[place : place + len(buffer)]
    buffer[: len(found)] = found
    return len(found)


def block_order(work: Workload, blocks: int, seed: int) -> Iterator[int]:
    """Blocks in the order in which drive.c comes by them."""
    mask = (1 << max(1, (blocks - 1).bit_length())) - 1 if blocks > 1 else 0
    at = seed & mask
    while True:
        for given in range(blocks):
            if work.random:
                at = _drawn(at, mask)
                while at >= blocks:
                    at = _drawn(at, mask)
            yield at if work.random else given
        if not work.repeats:
            return


def _drawn(at: int, mask: int) -> int:
    """A linear congruence that meets each number below a power of two once (Hull and Dobell)."""
    return (at * 6364136223846793005 + 1442695040888963407) & mask


def bucket_of(nanoseconds: int) -> int:
    if nanoseconds < _FINE:
        return nanoseconds
    shift = nanoseconds.bit_length() - 7
    return shift * _FINE + (nanoseconds >> shift)


def bucket_s(bucket: int) -> float:
    """Seconds in the middle of a bucket."""
    if bucket < 2 * _FINE:
        return bucket / 1e9
    shift = bucket // _FINE - 1
    return ((bucket - shift * _FINE) + 0.5) * (1 << shift) / 1e9
