"""A process that reads a file on to a card: `python -m stoker.bench.card.reading`, a job on its input.

Each thread reads blocks into two pinned buffers in turn and asks for their copies: while one is copied the
other is filled, as a loader does. cuFile reads into the card's memory itself.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from stoker.bench.card.asking import Said, answer_with
from stoker.bench.card.copying import Card, Way, device_names, timed
from stoker.bench.drive import Driven, Workload, block_order, bucket_of
from stoker.errors import StorageError
from stoker.load.reading.cufile import CuFile, open_cufile

_STAGES = 2  # one is filled while the other is copied
_SEED = 7
_COPIED_BYTES = 64 << 20  # that copies alone walk through


class Stages:
    """Pinned buffers of a thread, on whole pages, and where their copies go."""

    def __init__(self, card: Card, block: int) -> None:
        self._stream: Any = card.stream()
        self._card, self._block = card, block
        self._held = [card.host(block + mmap.PAGESIZE, pinned=True) for _ in range(_STAGES)]
        starts = [-one.data_ptr() % mmap.PAGESIZE for one in self._held]
        self._stages = [one[at : at + block] for one, at in zip(self._held, starts, strict=True)]
        self._own = [card.own(block) for _ in range(_STAGES)]
        self._copied: list[Any] = [None] * _STAGES
        self._now = 0
        self.drain()  # what filled the card's memory ran on another stream

    def take(self) -> Any:
        """A stage to fill, as an array."""
        self._now = (self._now + 1) % _STAGES
        if self._copied[self._now] is not None:
            self._copied[self._now].synchronize()
        return self._stages[self._now].numpy()

    def push(self) -> None:
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            self._own[self._now].copy_(self._stages[self._now], non_blocking=True)
            if self._stream is not None:
                event: Any = torch.cuda.Event  # untyped in torch
                self._copied[self._now] = event(blocking=True)
                self._copied[self._now].record(self._stream)

    def drain(self) -> None:
        if self._card.is_cuda:
            torch.cuda.synchronize(self._card.device)

    @property
    def pointer(self) -> int:
        """For those who write into the card's memory by themselves."""
        return int(self._own[0].data_ptr())


class Reader:
    """One thread's blocks, dealt out in turn: all threads together go through the file as a loader does."""

    def __init__(
        self, number: int, blocks: int, work: Workload, stages: Stages, read: Callable[..., int]
    ) -> None:
        self._number, self._blocks, self._work = number, blocks, work
        self._seed, self._stages, self._read = _SEED + number * 7919, stages, read
        self.latencies: Counter[int] = Counter()
        self.began, self.ended = 0.0, 0.0
        self.failed: OSError | None = None

    def run(self, gate: threading.Barrier) -> None:
        try:
            gate.wait()
            self._run()
        except threading.BrokenBarrierError:
            return
        except OSError as error:
            self.failed = error
            gate.abort()

    def _run(self) -> None:
        self.began = begun = time.monotonic_ns()
        deadline = begun + int(self._work.seconds * 1e9)
        for block in block_order(self._work, self._blocks, self._seed):
            if self.latencies and begun >= deadline:
                break
            place = (block * self._work.threads + self._number) * self._work.block
            if self._read(self._stages, place) != self._work.block:
                raise OSError(5, "a part of a block")
            ended = time.monotonic_ns()
            self.latencies[bucket_of(ended - begun)] += 1
            begun = ended
        self._stages.drain()  # what was asked for is there only then
        self.ended = time.monotonic_ns()


def measure(job: dict[str, Any], said: Said) -> dict[str, Any]:
    """Copies alone, then each trial: through the host past the page cache or out of it, or by cuFile."""
    card = Card(device_names(job["device"])[0])
    cufile = open_cufile()
    found, refused = list[dict[str, Any]](), dict[str, str]()
    for number, trial in enumerate(job["trials"]):
        said(trial["name"], number, len(job["trials"]))
        work = Workload(**trial["work"])
        try:
            if trial["how"] == "copy":
                driven = _copied(card, work)
            elif trial["how"] == "cufile":
                if cufile.cufile is None or not card.is_cuda:
                    refused[trial["name"]] = cufile.reason if card.is_cuda else "cuFile reads into a card"
                    continue
                driven = _by_cufile(card, cufile.cufile, job, work)
            else:
                driven = _by_host(card, job, work, direct=trial["how"] == "direct")
        except OSError as error:
            refused[trial["name"]] = error.strerror or str(error)
            continue
        except RuntimeError as error:  # the card's memory, or pinned memory
            raise StorageError(f"{trial['name']}: {error}", hint="smaller blocks, or fewer threads") from None
        found.append({"name": trial["name"], **asdict(driven)})
    return {"found": found, "refused": refused, "cufile": cufile.reason}


def _copied(card: Card, work: Workload) -> Driven:
    room = max(work.block, _COPIED_BYTES)
    way = Way(card, card.own(room), card.host(room, pinned=True), work.block)
    took = timed([way], work.seconds)
    latencies = {bucket_of(int(took["each_s"] * 1e9)): way.copies}
    return Driven(
        calls=way.copies,
        bytes=way.bytes,
        seconds=way.bytes / took["bytes_s"],
        cpu_s=took["cpu_s"],
        latencies=latencies,
    )


def _by_host(card: Card, job: dict[str, Any], work: Workload, *, direct: bool) -> Driven:
    descriptor = _reopened(job["descriptor"], direct=direct)
    try:
        if not direct:  # into the page cache first
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while os.read(descriptor, 4 << 20):
                pass

        def read(stages: Stages, place: int) -> int:
            size = os.preadv(descriptor, [stages.take()], place)
            stages.push()
            return size

        return _driven(card, job, work, read)
    finally:
        os.close(descriptor)


def _by_cufile(card: Card, cufile: CuFile, job: dict[str, Any], work: Workload) -> Driven:
    path = Path(f"/proc/self/fd/{job['descriptor']}")

    def read(stages: Stages, place: int) -> int:
        return cufile.read(path, offset=place, pointer=stages.pointer, size=work.block)

    return _driven(card, job, work, read)


def _driven(card: Card, job: dict[str, Any], work: Workload, read: Callable[..., int]) -> Driven:
    blocks = job["bytes"] // work.block // work.threads
    readers = [Reader(number, blocks, work, Stages(card, work.block), read) for number in range(work.threads)]
    gate = threading.Barrier(work.threads)
    threads = [threading.Thread(target=one.run, args=(gate,)) for one in readers]
    cpu_s = time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cpu_s = time.process_time() - cpu_s
    for one in readers:
        if one.failed:
            raise one.failed
    latencies = sum((one.latencies for one in readers), Counter[int]())
    calls = sum(latencies.values())
    if not calls:
        raise OSError(5, "no thread has read")
    seconds = (max(one.ended for one in readers) - min(one.began for one in readers)) / 1e9
    return Driven(
        calls=calls, bytes=calls * work.block, seconds=seconds, cpu_s=cpu_s, latencies=dict(latencies)
    )


def _reopened(descriptor: int, *, direct: bool) -> int:
    """The same file, opened anew: whether the page cache is passed by is then ours alone."""
    flags = os.O_DIRECT if direct else 0
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | flags)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise  # no O_DIRECT here
        # a filesystem that does not open what has no name any more
        again = os.dup(descriptor)
        had = fcntl.fcntl(again, fcntl.F_GETFL)
        fcntl.fcntl(again, fcntl.F_SETFL, had | flags if direct else had & ~os.O_DIRECT)
        return again


if __name__ == "__main__":
    answer_with(measure)
