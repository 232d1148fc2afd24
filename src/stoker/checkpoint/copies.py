"""Taking snapshots in the loop's thread: their memory, made ahead, and the copy: at once, proving, behind."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stoker.checkpoint.options import CheckpointOptions
from stoker.checkpoint.snapshot.arena import Arena
from stoker.checkpoint.snapshot.copy import Snapshot
from stoker.checkpoint.snapshot.plan import Plan
from stoker.errors import StokerError

# The share of a copy before writing begins. Small machine, 1.85 GiB: with none of it the stall is a third
# longer, with all of it the time to durable a fifth.
_HEAD_START = 0.25


class Copies:
    """Takes snapshots, one at a time, into one piece of memory. The loop's thread calls."""

    def __init__(self, options: CheckpointOptions) -> None:
        self._options = options
        self._arena = Arena()
        self._allocating: threading.Thread | None = None
        self._overlaps = options.overlap
        self._proven: Plan | None = None  # whose copies were shown to be able to wait
        self._taken: tuple[Plan, Snapshot] | None = None
        self._turn = options.world.rank  # what is looked at again; ranks that hold alike look elsewhere
        self._hook: Any = None  # before every step of an optimizer, once a copy may be behind the loop
        self.check_s = 0.0  # spent to show it

    @property
    def host_bytes(self) -> int:
        return self._arena.bytes

    @property
    def settle_s(self) -> float:
        """How long an optimizer's step stood still for the snapshot that is not settled yet."""
        return self._taken[1].settle_s if self._taken else 0.0

    def allocate(self, plan: Plan, *, pinned: bool, before: Callable[[], None]) -> None:
        """Make room while the loop goes on: touching and pinning gigabytes takes seconds, which the first
        save need not wait for."""

        def work() -> None:
            before()
            with suppress(StokerError, OSError):  # the save will meet it too, and say so
                self._arena.ensure(self._room(plan), pinned=pinned)

        self._allocating = threading.Thread(target=work, name="stoker-arena")
        self._allocating.start()

    def snapshot(self, plan: Plan, tensors: Sequence[torch.Tensor]) -> Snapshot:
        """Room for a copy of these; `take` makes it."""
        self._allocated()
        self._arena.ensure(self._room(plan), pinned=any(tensor.is_cuda for tensor in tensors))
        behind = self._overlaps and plan is self._proven
        made = Snapshot(
            self._arena,
            plan,
            tensors,
            chunk_bytes=self._options.chunk_bytes,
            head_start=0.0 if behind else _HEAD_START,
            turn=self._turn,
            on_mixed=self._stop_overlapping,
        )
        self._turn += 1
        self._taken = plan, made
        return made

    def take(self) -> None:
        """Copy; what goes wrong fails the save, and the next step says so."""
        assert self._taken is not None
        plan, snapshot = self._taken
        began = time.monotonic()
        try:
            if not self._overlaps:
                snapshot.copy()
                return
            self._hook = self._hook or _before_steps(self)
            if plan is self._proven:
                snapshot.copy_behind()
            else:
                snapshot.copy_proving()
                self.check_s += time.monotonic() - began
        except BaseException as error:
            snapshot.abort(error)  # or what writes would wait for the rest for ever
            if not isinstance(error, Exception):
                raise

    def settle(self) -> float:
        """Wait for the copy that is under way; gives for how long a step of an optimizer stood still."""
        if self._taken is None:
            return 0.0
        (plan, snapshot), self._taken = self._taken, None
        snapshot.arrive(stepping=False)
        if snapshot.proved == "":
            self._proven = plan
        elif snapshot.proved:
            self._overlaps = False
            warnings.warn(_mixed(snapshot.proved), RuntimeWarning, stacklevel=4)
        return snapshot.settle_s

    def before_step(self) -> None:
        """An optimizer is about to step."""
        if self._taken is not None:
            self._taken[1].arrive(stepping=True)

    def _stop_overlapping(self) -> None:
        self._overlaps = False

    def close(self) -> None:
        self._allocated()
        self._arena.close()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _allocated(self) -> None:
        if self._allocating is not None:
            self._allocating.join()
            self._allocating = None

    def _room(self, plan: Plan) -> int:
        """Host memory for a snapshot: all of it, or as much as is allowed, in whole chunks."""
        chunk, limit = self._options.chunk_bytes, self._options.max_host_bytes
        everything = -(-plan.bytes // chunk) * chunk
        return min(everything, max(limit // chunk, 2) * chunk) if limit else everything


def _before_steps(copies: Copies) -> Any:
    """A hook before every optimizer's step. It stays: torch goes through its hooks while they run, and one
    that went meanwhile would break the others' (another saver's, a profiler's); and a compiled step is
    compiled again whenever they change. It is no part of what is compiled."""
    weak = weakref.ref(copies)  # whose memory may be given back before the hook goes

    def arrive(*_: Any) -> None:
        if (found := weak()) is not None:
            found.before_step()

    disable: Any = torch.compiler.disable  # untyped in torch
    return register_optimizer_step_pre_hook(disable(arrive))


def _mixed(name: str) -> str:
    return (
        f"overlap=True is switched off for this run: {name} was changed after a save and before an "
        "optimizer's step, past what torch counts. That save is whole, for it was copied at once; an "
        "overlapped one would have mixed two steps"
    )
