"""`stoker.attach(loader)`: a loader no hook knows, whose waits are reported all the same."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
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
    def __init__(self, loader: Iterable[T], hooks: Any) -> None:  # the hooks module of this process
        self._batches = iter(loader)
        self._probe, self._roots = hooks.here()
        self._kind = type(loader).__name__
        self._told = False

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        start = self._probe.begin_data(evaluating="torch" in sys.modules and self._roots.evaluating(self))
        try:
            batch = next(self._batches)
        except BaseException as error:
            self._probe.end_data(start, last=isinstance(error, StopIteration))
            raise
        self._probe.end_data(start, tokens=tokens_of(batch), moved_bytes=0)
        if not self._told:
            self._told = True
            if not self._probe.meta.get("loader"):
                self._probe.tell(loader={"kind": self._kind, "batch_bytes": batch_bytes(batch)})
        return batch


def attach(loader: Iterable[T]) -> Attached[T]:
    """Report the waits of any iterable of batches: `for batch in stoker.attach(loader)`. Costs nothing
    unless `stoker watch` runs the program."""
    return Attached(loader)
