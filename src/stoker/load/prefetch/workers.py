"""Worker processes, for transforms that are slow Python. Everything else is faster with threads.

Item n of the stream (a batch, or the end of an epoch) is made by worker n mod workers, which plans the
whole stream itself: nothing is sent to a worker but where to begin. Batches come back through a ring of
shared memory per worker; what does not fit a slot goes through the pipe.

A worker lives as long as its pipe: when the parent is killed, the pipe ends and the worker goes.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Any

from stoker.errors import StokerError, TaskError, UsageError
from stoker.load.assembly.rows import Batch
from stoker.load.options import LoaderOptions
from stoker.load.ordering.plan import Cursor
from stoker.load.prefetch.pipeline import Group
from stoker.load.prefetch.ring import Ring, RingPlan, make_ring
from stoker.options import given

_RESTARTS = 2  # of one worker on one item, before it is called hopeless


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a worker needs to make the same stream as its parent would."""

    options: LoaderOptions
    cursor: Cursor
    begin: int  # the number of the stream's first item
    first: int  # the first item this worker makes
    workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Made:
    """An item, announced through the pipe; its arrays lie in a slot, or come along when they do not fit."""

    number: int
    slot: int | None
    sizes: tuple[int, ...]
    pickled: bytes


class Processes:
    """The stream, made by worker processes. The consumer calls `next` and `close`."""

    def __init__(self, recipe: Recipe, *, finish: Callable[[Batch], Batch]) -> None:
        self._recipe, self._finish = recipe, finish
        self._number = 0
        self._epoch_begin = (recipe.cursor, 0)
        self._restarts: dict[int, int] = {}
        self._workers: list[_Worker] = []
        try:
            for index in range(recipe.workers):
                self._workers.append(_Worker(replace(recipe, first=index)))
        except BaseException:
            self.close()
            raise

    @property
    def is_behind(self) -> bool:
        return False  # a worker's pipe is only looked into by the consumer's thread

    def next(self) -> Group:
        which = self._number % len(self._workers)
        while True:
            try:
                found = self._workers[which].receive()
                break
            except _WorkerDied as death:
                self._bury(which, death)
        self._number += 1
        if isinstance(found, BaseException):
            raise found
        if not found.batches:
            cursor, _ = self._epoch_begin
            self._epoch_begin = (Cursor(epoch=cursor.epoch + 1), self._number)
        return replace(found, batches=[self._finish(batch) for batch in found.batches])

    def close(self) -> None:
        """End the processes; safe twice."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def _bury(self, which: int, death: _WorkerDied) -> None:
        self._workers[which].close()
        tried = self._restarts.get(self._number, 0)
        if self._recipe.options.on_worker_death != "restart" or tried >= _RESTARTS:
            again = f", {tried + 1} times" if tried else ""
            raise TaskError(
                f"worker process {which} {death.how}{again}, on {death.status or 'nothing yet'}",
                hint="run its transform on that sample alone to see why; out of memory shows in `dmesg`; "
                "on_worker_death='restart' tries again",
            )
        self._restarts[self._number] = tried + 1
        cursor, begin = self._epoch_begin
        self._workers[which] = _Worker(replace(self._recipe, cursor=cursor, begin=begin, first=self._number))


class _WorkerDied(Exception):
    def __init__(self, how: str, status: str) -> None:
        super().__init__(how)
        self.how, self.status = how, status


class _Worker:
    """The parent's side of one worker process."""

    def __init__(self, recipe: Recipe) -> None:
        self.ring = make_ring(wanted=recipe.options.memory // 2 // recipe.workers, rings=recipe.workers)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=run_worker, args=(theirs, self.ring.plan), name="stoker-worker", daemon=True
        )
        try:
            self._process.start()
            theirs.close()
            reduction.send_handle(self._pipe, self.ring.handle, self.pid)
            self._pipe.send_bytes(_pickle(recipe))
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def receive(self) -> Group | BaseException:
        wait([self._pipe, self._process.sentinel])
        try:
            if not self._pipe.poll():
                raise EOFError
            made: _Made = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            raise _WorkerDied(_how(self._process.exitcode), self.ring.status()) from None
        found: Group | BaseException = self._unpack(made)
        return found

    def _unpack(self, made: _Made) -> Any:  # a Group, or the error that ended it
        if made.slot is None:
            return pickle.loads(made.pickled)
        view, buffers = self.ring.slot(made.slot), []
        for size in made.sizes:
            buffers.append(bytearray(view[:size]))
            view = view[size:]
        del view
        with suppress(BrokenPipeError, ConnectionResetError):  # gone: the next item will tell
            self._pipe.send(made.slot)
        return pickle.loads(made.pickled, buffers=buffers)

    def close(self) -> None:
        """End the process; safe twice."""
        if self._pipe.closed:
            return
        self._pipe.close()
        if self._process.pid is not None:
            self._process.join(1)
            if self._process.exitcode is None:
                self._process.kill()
            self._process.join()
            self._process.close()
        self.ring.close()


def _how(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode}"


def _pickle(recipe: Recipe) -> bytes:
    try:
        return pickle.dumps(recipe)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"the loader cannot be sent to worker processes: {error}",
            hint="define transform and collate at the top level of a module, or use workers='thread'",
        ) from error


# --- in the worker process --------------------------------------------------------------------------


def run_worker(pipe: Connection, plan: RingPlan) -> None:
    """The worker process: make every workers-th item until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it closes the pipe
    ring = Ring(reduction.recv_handle(pipe), plan)
    recipe: Recipe = pickle.loads(pipe.recv_bytes())
    slots: queue.SimpleQueue[int] = queue.SimpleQueue()
    for slot in range(plan.slots):
        slots.put(slot)
    threading.Thread(target=_watch, args=(pipe, slots), daemon=True).start()
    try:
        _make_items(recipe, pipe, ring, slots)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)
    except BaseException as error:
        _send_error(error, pipe)


def _watch(pipe: Connection, slots: queue.SimpleQueue[int]) -> None:
    """Take slots back; when the parent is gone, go too, whatever the transform is doing."""
    try:
        while True:
            slots.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(0)


def _make_items(recipe: Recipe, pipe: Connection, ring: Ring, slots: queue.SimpleQueue[int]) -> None:
    from stoker.load.loader import Loader  # the loader imports this module

    # on the host: a device of each worker would only be copied from, through pickles
    # images stay bytes until they are there, whatever is to be made of them
    images = {name: replace(one, dtype="") for name, one in recipe.options.images.items()}
    video = replace(recipe.options.video, dtype="") if recipe.options.video else None
    options = replace(
        recipe.options, workers="inline", output="numpy", device="", image=images or None, video=video
    )
    loader = Loader(**given(options, LoaderOptions))
    for number, group in loader.items(
        recipe.cursor, begin=recipe.begin, first=recipe.first, step=recipe.workers, on_sample=ring.say
    ):
        _send(number, group, pipe, ring, slots)


def _send(number: int, group: Group, pipe: Connection, ring: Ring, slots: queue.SimpleQueue[int]) -> None:
    buffers: list[pickle.PickleBuffer] = []
    plain = replace(group, batches=list(group.batches), after=list(group.after))
    pickled = pickle.dumps(plain, protocol=5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    sizes = tuple(part.nbytes for part in raw)
    if sum(sizes) > ring.plan.slot_bytes:
        made = _Made(number=number, slot=None, sizes=(), pickled=pickle.dumps(plain, protocol=5))
    else:
        slot = slots.get()
        view = ring.slot(slot)
        for part in raw:
            view[: part.nbytes] = part
            view = view[part.nbytes :]
        made = _Made(number=number, slot=slot, sizes=sizes, pickled=pickled)
    pipe.send_bytes(pickle.dumps(made))


def _send_error(error: BaseException, pipe: Connection) -> None:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # an exception that cannot travel is described instead
        pickled = pickle.dumps(StokerError(f"{type(error).__name__} in a worker process: {error}"))
    pipe.send_bytes(pickle.dumps(_Made(number=-1, slot=None, sizes=(), pickled=pickled)))
    threading.Event().wait()  # until the parent has read it and closes the pipe
