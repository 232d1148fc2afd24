"""`stoker.attach(loader)`: a loader no hook knows, whose waits are reported all the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from stoker.observe.batches import batch_bytes, tokens_of
from stoker.observe.boot import HANDLE

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
        start = self._guarded(self._begin)
        try:
            batch = next(self._batches)
        except BaseException as error:
            last = isinstance(error, StopIteration)
            self._guarded(lambda: self._probe.end_data(start, last=last))
            raise
        self._guarded(lambda: self._end(start, batch))
        return batch

    def _begin(self) -> float:
        evaluating = "torch" in sys.modules and self._roots.evaluating(self)
        return float(self._probe.begin_data(evaluating=evaluating))

    def _end(self, start: float, batch: T) -> None:
        self._probe.end_data(start, tokens=tokens_of(batch))
        if not self._probe.meta.get("loader"):
            self._probe.tell(loader={"kind": self._kind, "batch_bytes": batch_bytes(batch)})

    def _guarded(self, part: Callable[[], Any]) -> Any:
        """What fails of ours is switched off; the loop goes on."""
        if self._switch.on:
            try:
                return part()
            except Exception as error:
                self._switch.fail(error)
        return 0.0


def attach(loader: Iterable[T]) -> Attached[T]:
    """Report the waits of any iterable of batches: `for batch in stoker.attach(loader)`. Costs nothing
    unless `stoker watch` runs the program."""
    return Attached(loader)
