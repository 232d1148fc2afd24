"""Parallel map: the same work for many things, in threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_threads(work: Callable[[T], R], things: Sequence[T], *, threads: int, name: str) -> Iterator[R]:
    """Results in the order of the things, each as soon as it is there. The first error ends the rest.

    Plain threads and no pool: a pool refuses work once the interpreter has begun to exit, and the last save
    of a script that just ends must still be written."""
    if threads <= 1 or len(things) <= 1:
        yield from map(work, things)
        return
    results: list[Future[R]] = [Future() for _ in things]
    left, stop = deque(zip(things, results, strict=True)), threading.Event()
    workers = [
        threading.Thread(target=_work_off, args=(work, left, stop), name=f"{name}-{number}")
        for number in range(min(threads, len(things)))
    ]
    try:
        for worker in workers:
            worker.start()
        for result in results:
            yield result.result()
    finally:
        stop.set()
        for worker in workers:
            worker.join()


def _work_off(work: Callable[[T], R], left: deque[tuple[T, Future[R]]], stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            thing, result = left.popleft()
        except IndexError:
            return
        try:
            result.set_result(work(thing))
        except BaseException as error:
            stop.set()
            result.set_exception(error)
