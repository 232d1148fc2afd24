"""Manual instrumentation, `stoker.attach(loader)`: waits for a loader that no hook knows are reported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from stoker.watch.inside.batches import batch_bytes, tokens_of
from stoker.watch.inside.boot import HANDLE
from stoker.watch.inside.loop import EVALUATED, EXHAUSTED, NO_TOKENS
from stoker.watch.inside.switch import ident, now

T = TypeVar("T")


class Attached(Generic[T]):
    """The loader itself, but for the time its batches take, which goes into the run."""

    def __init__(self, loader: Iterable[T]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[T]:
        hooks = sys.modules.get(HANDLE)
        return iter(self._loader) if hooks is None else _Timed(self._loader, hooks)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # where the loader has a length

    def __getattr__(self, name: str) -> Any:  # whatever the loader has
        return getattr(self._loader, name)


class _Timed(Generic[T]):
    """One pass over the loader."""

    def __init__(self, loader: Iterable[T], hooks: Any) -> None:  # the hooks module of this process
        self._batches = iter(loader)
        self._probe, self._roots = hooks.here()
        self._switch = hooks.Switch(self._probe, "attach")
        self._kind = type(loader).__name__

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        kind, start = "data", now()
        self._note = NO_TOKENS
        self._guarded(self._begin)
        try:
            batch = next(self._batches)
        except BaseException as error:
            last = isinstance(error, StopIteration) and self._note == EVALUATED
            self._probe.marks.append((kind, start, now(), ident(), 0, EXHAUSTED if last else self._note))
            raise
        self._guarded(lambda: self._look(batch))
        self._probe.marks.append((kind, start, now(), ident(), 0, self._note))
        return batch

    def _begin(self) -> None:
        self._probe.begin()
        if "torch" in sys.modules and self._roots.evaluating(self):
            self._note = EVALUATED

    def _look(self, batch: T) -> None:
        if self._note != EVALUATED:
            self._note = tokens_of(batch)
        if not self._probe.meta.get("loader"):
            self._probe.tell(loader={"kind": self._kind, "batch_bytes": batch_bytes(batch)})

    def _guarded(self, part: Callable[[], None]) -> None:
        """What fails of ours is switched off; the loop goes on."""
        if self._switch.on:
            try:
                part()
            except Exception as error:
                self._switch.fail(error)


def attach(loader: Iterable[T]) -> Attached[T]:
    """Report the waits of any iterable of batches: `for batch in stoker.attach(loader)`. Costs nothing
    unless `stoker watch` runs the program."""
    return Attached(loader)
