"""Prefetch pipeline: tasks to batches, in the caller's thread or in a thread of its own that stays ahead.

A group is what one task makes. The background thread plans, gathers and hands over whole groups, because
handing over single batches costs more than making them; reading threads fill chunks ahead of it.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stoker import spans
from stoker.load.assembly.batch import AllDamagedError, Assembler
from stoker.load.assembly.rows import Batch
from stoker.load.ordering.draw import Draw, Key
from stoker.load.ordering.plan import Cursor, Planner, Task
from stoker.load.prefetch.tune import Seen, Tuner
from stoker.load.reading.chunks import Chunks

_LOOK_S = 0.02  # between looks whether files are still to come: tens of microseconds each
_GROUPS_SEARCHED = 100  # for one that is not damaged, in the place of one that is


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Batches ready to use, and the cursor after each. No batches: an epoch ended here."""

    batches: Sequence[Batch]
    after: Sequence[Cursor]
    skipped: int = 0  # damaged samples that others stand in for
    ready: Any = None  # on a device: the event after which the batches are there


class Maker:
    """Makes groups from a cursor on, epoch after epoch. Used by one thread at a time.

    Reading threads are told what comes next before this one gathers. A device does what it is asked
    `in_turn`: what comes next is asked of it behind what this group needs.
    """

    def __init__(
        self,
        planner: Planner,
        cache: Callable[[int], Chunks],
        assembler: Assembler,
        *,
        group: int,
        alone: bool = False,
        in_turn: bool = False,
        order: Callable[[Draw], Sequence[Key]] = lambda draw: draw.keys,
        finish: Callable[[Batch], Batch] | None = None,
        made: Callable[[], Any] = lambda: None,
        is_coming: Callable[[], bool] = lambda: False,
    ) -> None:
        """`order`: in which the chunks of a group are asked for. `is_coming`: whether files still are to be
        fetched."""
        self._planner, self._cache, self._assembler, self._finish = planner, cache, assembler, finish
        self._alone, self._in_turn, self._mark_made, self._order = alone, in_turn, made, order
        self._group, self.is_coming = group, is_coming
        self._made = 0
        self.ahead = 1  # tasks whose chunks are being read ahead
        self.reading_s = 0.0

    def groups(self, cursor: Cursor) -> Iterator[Group]:
        """Every group from here on, without end."""
        self._made = 0
        planned: deque[Task | None] = deque()
        tasks = self._tasks(cursor)
        while True:
            # nothing is planned or read ahead of the first batch: it is being waited for
            while len(planned) <= (self.ahead if self._made else 0):
                planned.append(next(tasks))
            task = planned.popleft()
            if task is None:
                yield Group(batches=(), after=())
                continue
            yield self._make(task, [more for more in planned if more])
            self._made += 1

    def some_groups(
        self, cursor: Cursor, *, begin: int, first: int, step: int
    ) -> Iterator[tuple[int, Group]]:
        """Groups first, first + step, ... of the stream, one batch each; all others are only planned."""
        self._group = 1
        for number, task in enumerate(self._tasks(cursor), start=begin):
            if number < first or (number - first) % step:
                continue
            if task is None:
                yield number, Group(batches=(), after=())
            else:
                yield number, self._make(task, [])

    def _tasks(self, cursor: Cursor) -> Iterator[Task | None]:
        for epoch in itertools.count(cursor.epoch):
            begin = cursor if epoch == cursor.epoch else Cursor(epoch=epoch)
            for task in self._planner.epoch(begin, group=self._next_group):
                yield replace(task, draw=task.draw.alone()) if self._alone else task
            yield None

    def _next_group(self) -> int:
        """Batches in the next task: few at first, because every lane's first chunk has to be read and
        verified, and the first batch should not wait for all of them."""
        return min(self._group, 1 << self._made)

    def _make(self, task: Task, soon: Sequence[Task]) -> Group:
        keys = task.draw.keys
        cache = self._cache(len(keys))
        begin = time.monotonic()
        asked = (self._order(one.draw) for one in (task, *soon))
        needed = dict.fromkeys(itertools.chain.from_iterable(asked))
        if not self._in_turn:
            cache.prefetch(needed, keep=needed)
        held = cache.hold(keys)
        read = time.monotonic()
        self.reading_s += read - begin
        skipped = self._assembler.skipped
        try:
            batches = self._assembler.assemble(task, held)
        except AllDamagedError as error:
            batches = self._made_of_later_ones(task, error)
            self._assembler.skipped = skipped + len(task.draw)  # theirs are counted when their turn comes
        if self._in_turn:
            cache.prefetch(needed, keep=needed)
        if self._finish:
            batches = tuple(map(self._finish, batches))
        spans.emit("load.read", start=begin, end=read)
        spans.emit("load.assemble", start=read, end=time.monotonic())
        skipped = self._assembler.skipped - skipped
        return Group(batches=batches, after=task.after, skipped=skipped, ready=self._mark_made())

    def _made_of_later_ones(self, task: Task, error: AllDamagedError) -> Sequence[Batch]:
        """The batches of a task that is damaged from end to end: the next group that is not stands in."""
        cursor = task.after[-1]
        for _ in range(_GROUPS_SEARCHED):
            later = next(self._planner.epoch(cursor, group=lambda: task.batches), None)
            if later is None:
                break
            draw = later.draw.rows(np.resize(np.arange(len(later.draw)), len(task.draw)))
            draw = draw.alone() if self._alone else draw
            held = self._cache(len(draw.keys)).hold(draw.keys)
            with suppress(AllDamagedError):
                return self._assembler.assemble(replace(task, draw=draw), held)
            cursor = later.after[-1]
        raise error


class Inline:
    """Makes each group when it is asked for."""

    def __init__(self, maker: Maker, cursor: Cursor) -> None:
        maker.ahead = 0
        self._groups = maker.groups(cursor)

    @property
    def is_behind(self) -> bool:
        return False  # nothing is made ahead

    def next(self) -> Group:
        return next(self._groups)

    def close(self) -> None:
        self._groups.close()  # type: ignore[attr-defined]  # a generator


class Background:
    """Makes groups ahead in a thread. The consumer calls `next` and `close`, from one thread."""

    def __init__(
        self, maker: Maker, cursor: Cursor, *, resize: Callable[[int], None], tuner: Tuner, ahead: int = 1
    ) -> None:
        self._ready: deque[Group | BaseException] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._tuner, self._resize, self._maker, self._ahead = tuner, resize, maker, ahead
        self._set()
        self._waited_s, self._full_s, self._began = 0.0, 0.0, time.monotonic()
        self._cpu_s, self._look_at_s = time.process_time(), 0.0
        self._thread = threading.Thread(target=self._run, args=(cursor,), name="stoker-load", daemon=True)
        self._thread.start()

    @property
    def is_behind(self) -> bool:
        return not self._ready

    def next(self) -> Group:
        with self._changed:
            if not self._ready:
                begin = time.monotonic()
                while not self._ready:
                    self._changed.wait()
                self._waited_s += (end := time.monotonic()) - begin
                spans.emit("load.wait", start=begin, end=end)
            group = self._ready.popleft()
            self._changed.notify_all()
        if isinstance(group, BaseException):
            raise group
        return group

    def close(self) -> None:
        """Stop the thread; safe twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._ready.clear()

    def _run(self, cursor: Cursor) -> None:
        try:
            for group in self._maker.groups(cursor):
                if not self._hand_over(group):
                    return
                self._tune()
        except BaseException as error:
            self._hand_over(error)

    def _hand_over(self, group: Group | BaseException) -> bool:
        with self._changed:
            begin = time.monotonic()
            while len(self._ready) >= self._tuner.setting.depth and not self._closed:
                self._changed.wait()
                self._full_s += time.monotonic() - begin
                begin = time.monotonic()
            if self._closed:
                return False
            self._ready.append(group)
            self._changed.notify_all()
            return True

    def _tune(self) -> None:
        wall_s = time.monotonic() - self._began
        is_due = self._tuner.is_due(wall_s)
        seen = Seen(
            wall_s=wall_s,
            consumer_s=self._waited_s,
            reading_s=self._maker.reading_s,
            full_s=self._full_s,
            cpu_s=time.process_time() - self._cpu_s if is_due else 0.0,
            is_coming=self._is_coming(wall_s),
        )
        if self._tuner.after_group(seen):
            self._set()

    def _is_coming(self, wall_s: float) -> bool:
        """Whether files are still to come, as far as has been looked."""
        if not self._tuner.awaits_files or wall_s < self._look_at_s:
            return True
        self._look_at_s = wall_s + _LOOK_S
        return self._maker.is_coming()

    def _set(self) -> None:
        """Let every reader have a chunk to read: plan as many tasks ahead as that takes."""
        self._resize(self._tuner.setting.readers)
        self._maker.ahead = self._tuner.setting.readers * self._ahead


class Readers(Executor):
    """Reading threads whose number can change while they work; started when there is work for them."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._wanted = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.put((future, lambda: fn(*args, **kwargs)))
        for _ in range(len(self._threads), self._wanted):
            thread = threading.Thread(target=self._run, name="stoker-read", daemon=True)
            thread.start()
            self._threads.append(thread)
        return future

    def resize(self, threads: int) -> None:
        self._wanted = threads
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for _ in range(threads, len(self._threads)):
            self._work.put(None)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads once they have done what was asked; safe twice."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads if wait else ():
            if thread is not threading.current_thread():  # which may be where a dropped loader is found
                thread.join()
        self._threads = []

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            future, call = work
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del work, future, call  # an idle thread holds nothing
