"""A user's transform, over many samples at once: on a pool of threads, in order, or in the calling thread.

Decoders that let go of the GIL use all cores that way. Python that does not belongs into worker processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from stoker.errors import UsageError

Transform = Callable[[Any], Any]

_END = object()
_PER_THREAD = 2  # stretches of samples: one that takes long leaves the others work to do


class Transforms:
    """Applies a transform to samples. Used by one thread; `close` ends the pool, and is safe twice."""

    def __init__(self, transform: Transform, *, threads: int = 1) -> None:
        if not callable(transform):
            raise UsageError(
                f"transform={transform!r} cannot be called", hint="give a function of one sample"
            )
        self._transform, self._threads = transform, threads
        self._pool: ThreadPoolExecutor | None = None

    def of(
        self, samples: Sequence[Any], *, named: Callable[[int], str], on_sample: Callable[[str], None]
    ) -> list[Any]:
        """What becomes of the samples, in their order; `named` says which one an error was in."""
        step = -(-len(samples) // (self._threads * _PER_THREAD)) or 1
        if self._threads < 2 or step >= len(samples):
            return self._stretch(samples, 0, named, on_sample)
        pool = self._opened()
        made = [
            pool.submit(self._stretch, samples[at : at + step], at, named, on_sample)
            for at in range(0, len(samples), step)
        ]
        try:
            return [one for stretch in made for one in stretch.result()]
        finally:
            for stretch in made:
                stretch.cancel()

    def of_coming(
        self, samples: Iterable[Any], *, named: Callable[[int], str], on_sample: Callable[[str], None]
    ) -> list[Any]:
        """The same of samples that are made when a thread asks for the next one: none waits for all of them
        to be there, nor at the end for one that has many left. The first sample's error is raised."""
        if self._threads < 2:
            return self._stretch(samples, 0, named, on_sample)
        coming, lock = iter(samples), threading.Lock()
        made: list[Any] = []
        wrong: dict[int, BaseException] = {}

        def run() -> None:
            while not wrong:
                with lock:
                    number = len(made)
                    try:
                        sample = next(coming, _END)
                    except BaseException as error:
                        wrong[number] = error
                        return
                    if sample is _END:
                        return
                    made.append(None)
                try:
                    made[number] = self._one(sample, named(number), on_sample)
                except BaseException as error:
                    wrong[number] = error

        pool = self._opened()
        for running in [pool.submit(run) for _ in range(self._threads)]:
            running.result()
        if wrong:
            raise wrong[min(wrong)]
        return made

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _opened(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="stoker-transform")
        return self._pool

    def _stretch(
        self,
        samples: Iterable[Any],
        first: int,
        named: Callable[[int], str],
        on_sample: Callable[[str], None],
    ) -> list[Any]:
        return [self._one(sample, named(first + number), on_sample) for number, sample in enumerate(samples)]

    def _one(self, sample: Any, name: str, on_sample: Callable[[str], None]) -> Any:
        on_sample(name)
        try:
            return self._transform(sample)
        except Exception as error:
            if hasattr(error, "add_note"):
                error.add_note(f"in transform of {name}")
            raise
