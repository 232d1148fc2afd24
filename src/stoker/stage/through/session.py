"""A unit that lands in pieces: those first that somebody waits for, the rest behind them.

Which slice comes next is decided with the scheduler's lock held (`urgent`, `some`, `done`), fetching is not.
Each slice is checked against the digests of its blocks as it lands; one that is wrong stays missing and is
fetched once more.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stoker.errors import BadShardError
from stoker.stage.fetch import Stopped
from stoker.stage.landing.maps import SLICE_BYTES
from stoker.stage.landing.part import Part
from stoker.stage.landing.slices import Landing
from stoker.stage.plan import Unit
from stoker.stage.tenure import Tenure
from stoker.stage.wire.wire import Landed, Wire

_AT_ONCE = 16  # slices of one file that nobody waits for: the wire shares them out
_FILES_AT_ONCE = 64  # small ones, or as many as make 16 MiB
_TRIES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Slices for one thread to bring; `files`: whole small files, that travel together."""

    session: Session
    slices: tuple[int, ...]
    files: tuple[int, ...] = ()


class Session:
    """What this process brings of one unit whose lease it holds."""

    def __init__(self, unit: Unit, tenure: Tenure, part: Part, *, stopping: threading.Event) -> None:
        self.unit, self.part, self._tenure, self._stopping = unit, part, tenure, stopping
        self._file_of = [n for n in range(len(unit.files)) for _ in part.slices(n)]
        self._wanted: dict[int, None] = {}
        self._claimed: set[int] = set()
        self._tries: Counter[int] = Counter()
        self._missing = sum(not self._has(one) for one in range(len(part.sizes)))
        self._front = 0  # no slice before it is both missing and unclaimed
        self.active = 0
        self.is_ending = self.is_over = False
        self.error: BaseException | None = None
        self.used_at = time.monotonic()

    def want(self, slices: Iterable[int]) -> bool:
        """These are waited for; whether any of them is still to come."""
        self.used_at = time.monotonic()
        coming = [one for one in slices if one < len(self.part.sizes) and not self._has(one)]
        self._wanted.update(dict.fromkeys(coming))
        return bool(coming)

    def has(self, slices: Iterable[int]) -> bool:
        return all(map(self._has, slices))

    @property
    def is_wanted(self) -> bool:
        return bool(self._wanted)

    @property
    def is_done(self) -> bool:
        """Whether nothing more is to be fetched, because all is here or something went wrong."""
        return not self.active and not self.is_ending and (not self._missing or self.error is not None)

    def urgent(self) -> Job | None:
        """The next slice that somebody waits for: one by one, so that they come side by side."""
        for one in self._wanted:
            if self._is_open(one) and self.error is None and not self.is_ending:
                return self._job((one,))
        return None

    def some(self) -> Job | None:
        """The next slices of a file that nobody waits for, or the next small files."""
        if self.error is not None or self.is_ending:
            return None
        slices = range(self._front, len(self.part.sizes))
        first = next((one for one in slices if self._is_open(one)), len(self.part.sizes))
        self._front = first
        if first == len(self.part.sizes):
            return None
        if self.unit.is_bundle and (files := self._whole_files(first)):
            return self._job([one for n in files for one in self.part.slices(n)], files=files)
        run, stop = [], min(first + _AT_ONCE, self.part.slices(self._file_of[first]).stop)
        for one in range(first, stop):
            if not self._is_open(one):
                break
            run.append(one)
        return self._job(run)

    def fetch(self, job: Job, wire: Wire) -> None:
        """Bring what a job is about; without the lock."""
        if job.files:
            self._fetch_files(job.files, wire)
        else:
            self._fetch_slices(job.slices, wire)

    def _count(self, size: int) -> None:
        """Called as bytes arrive: the place to stop, or to notice that another has taken over."""
        if self._stopping.is_set():
            raise Stopped
        self._tenure.check()

    def done(self, job: Job, error: BaseException | None) -> None:
        """A job has ended."""
        self.active -= 1
        self.error = self.error or error
        for one in job.slices:
            self._claimed.discard(one)
            if self._has(one):
                self._missing -= 1
                self._wanted.pop(one, None)
                continue
            self._front = min(self._front, one)
            self._tries[one] += 1
            if self._tries[one] >= _TRIES and self.error is None:
                number = self._file_of[one]
                self.error = _is_wrong(self.unit, number, one - self.part.slices(number).start)

    @property
    def is_whole(self) -> bool:
        return not self._missing

    def end(self) -> bool:
        """Publish what is whole, leave what is not; which of them. Raises what went wrong."""
        try:
            with self._tenure.working(self.part):
                if self.error is not None:
                    raise self.error
                if self.is_whole:
                    self._sync()
                    self._tenure.publish(self.part)
        finally:
            self._tenure.release()
        return self.is_whole

    def _sync(self) -> None:
        if self.unit.is_bundle:
            self.part.sync()
            return
        handle = self.part.open(0)
        try:
            os.fdatasync(handle)
        finally:
            os.close(handle)

    def _fetch_slices(self, slices: Sequence[int], wire: Wire) -> None:
        number = self._file_of[slices[0]]
        first = self.part.slices(number).start
        spans = []
        for one in slices:
            begin = (one - first) * SLICE_BYTES
            spans.append((begin + self.part.landed[one], begin + self.part.sizes[one]))
        handle = self.part.open(number)
        try:
            sink = Landing(self.part, number, handle)
            try:
                wire.fetch(self.unit.files[number], missing=_joined(spans), sink=sink, on_bytes=self._count)
            finally:
                sink.close()
        finally:
            os.close(handle)

    def _fetch_files(self, numbers: Sequence[int], wire: Wire) -> None:
        of = {self.unit.files[number].name: number for number in numbers}

        def deliver(landed: Sequence[Landed]) -> None:
            self.part.put([(of[file.name], data) for file, data in landed])

        try:
            wire.fetch_small([self.unit.files[n] for n in numbers], deliver=deliver, on_bytes=self._count)
        except BadShardError:  # one of them: by itself it shows which, and may be right the next time
            for number in (n for n in numbers if self.part.missing(n)):
                self._fetch_slices(self.part.slices(number), wire)
        finally:
            self.part.say()

    def _whole_files(self, first: int) -> tuple[int, ...]:
        """Files from that of a slice on of which nothing has landed nor is on its way."""
        found: list[int] = []
        size = 0
        for number in range(self._file_of[first], len(self.unit.files)):
            slices = self.part.slices(number)
            if not all(self._is_open(one) and not self.part.landed[one] for one in slices):
                break
            size += self.unit.files[number].bytes
            if len(found) == _FILES_AT_ONCE or (found and size > _AT_ONCE * SLICE_BYTES):
                break
            if slices:
                found.append(number)
        return tuple(found)

    def _job(self, slices: Sequence[int], *, files: tuple[int, ...] = ()) -> Job:
        self._claimed.update(slices)
        self.active += 1
        return Job(session=self, slices=tuple(slices), files=files)

    def _has(self, one: int) -> bool:
        return self.part.landed[one] == self.part.sizes[one]

    def _is_open(self, one: int) -> bool:
        return one not in self._claimed and not self._has(one)


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _is_wrong(unit: Unit, number: int, index: int) -> BadShardError:
    at = index * SLICE_BYTES
    return BadShardError(
        f"{unit.files[number].url} arrived as other bytes than its manifest says, from {at:,} on",
        hint="they were damaged on the way or at the origin: run the same command again, or check the origin "
        "with `stoker prepare verify`",
    )
