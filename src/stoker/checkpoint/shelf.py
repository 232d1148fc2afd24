"""The checkpoints on this node's disk, for the rank that looks after them: which are proven, which may go."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from stoker.checkpoint.options import CheckpointOptions
from stoker.checkpoint.saved.commit import Saving
from stoker.checkpoint.saved.layout import SAVING
from stoker.checkpoint.saved.retention import Ours, collect, make_room, remove_local, retain_local
from stoker.errors import StokerError


class Shelf:
    """`proven` holds the names of those that were read back in this run."""

    def __init__(self, root: Path, options: CheckpointOptions, *, ours: Ours) -> None:
        self._root, self._keep, self._budget = root, options.keep, options.max_local_bytes
        self._ours, self._rules = ours, options.rules
        self._failed: list[str] = []
        self.proven: set[str] = set()

    @property
    def deletes(self) -> bool:
        """Whether anything here ever goes."""
        return bool(self._keep or self._budget)

    def collect(self) -> None:
        """Delete what killed runs left, and what the run before could not delete any more."""
        collect(self._root)
        self.retain(spare=())

    def retain(self, *, spare: Collection[str]) -> None:
        """Delete what newer ones stand in for."""
        retain_local(self._root, keep=self._keep, spare=spare, **self._what_goes)

    def make_room(self, *, spare: Collection[str]) -> None:
        """Stay within the budget, with one more; a save goes on without, if need be."""
        with suppress(StokerError):
            make_room(self._root, budget=self._budget, spare=spare, **self._what_goes)

    @property
    def _what_goes(self) -> dict[str, Any]:  # Any: keyword arguments of two functions
        return {"proven": self.proven.__contains__, "among": self._ours.has, "rules": self._rules}

    def failed(self, saving: Saving) -> None:
        self._failed.append(f"{SAVING}{saving.name}")

    def sweep(self) -> None:
        """Take away what is left of saves that failed, once no rank is at them any more."""
        failed, self._failed = self._failed, []
        for name in failed:
            with suppress(StokerError):
                remove_local(self._root, name)
