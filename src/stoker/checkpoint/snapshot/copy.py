"""Device-to-host copy: the state as it is now, in one reused arena, from which the writer takes its chunks.

The memory is laid out as the file will be. On a GPU it is pinned, and copies run on a side stream. With
`overlap` the loop goes on at once: copies run during its next forward and backward, and whoever calls an
optimizer's step next waits for them first. The first such copy is taken at once and proves that the others
may be taken so: nothing may have changed when the optimizer's step comes; of later ones a few pieces are
looked at again (`witness.py`). When the state is larger than
the memory allowed, the memory is a ring: it is filled again where it has been written.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from stoker.checkpoint.saved.threads import in_threads
from stoker.checkpoint.snapshot.arena import Arena
from stoker.checkpoint.snapshot.digest import digests
from stoker.checkpoint.snapshot.plan import Move, Plan
from stoker.checkpoint.snapshot.witness import Witness
from stoker.errors import CheckpointError
from stoker.formats.sizes import counted
from stoker.machine.allowed import usable_cores

_GROUP_BYTES = 64 << 20  # copied at once: what follows can start when one is done
_MOST_THREADS = 8


class Snapshot:
    """One copy of the state into the arena; the writer's source.

    The loop's thread calls `copy` or `copy_behind`, the writer's threads `chunk` and `release`; whoever
    fails calls `abort`, so that nobody waits for what will never come. The writer gets nothing before the
    share `head_start` of the state is copied: it would take the copy's cores and memory bandwidth."""

    def __init__(
        self,
        arena: Arena,
        plan: Plan,
        tensors: Sequence[torch.Tensor],
        *,
        chunk_bytes: int,
        head_start: float = 0.0,
        turn: int = 0,
        on_mixed: Callable[[], None] = lambda: None,
    ) -> None:
        self.bytes = plan.bytes
        self._arena, self._chunk_bytes = arena, chunk_bytes
        fits = arena.bytes >= plan.bytes
        self._ring_bytes = arena.bytes if fits else arena.bytes // chunk_bytes * chunk_bytes
        self._plan = plan
        self._tensors = list(tensors)
        self._devices = _Devices(tensors)
        self._groups, split = plan.groups(self._group_bytes())
        for at in split:
            self._tensors[at] = self._tensors[at].contiguous()
        self._versions = versions(self._tensors[plan.hasty :])
        self._hasty_groups = sum(1 for group in self._groups if group[0].at < plan.hasty_bytes)
        self._changed = threading.Condition()
        self._copied = 0  # groups whose copy was asked for
        self._head_start = int(head_start * len(self._groups)) if fits else 0
        self._events: list[Any] = []  # of each group: after which it is there
        self._released: set[int] = set()
        self._free_chunks = 0  # so many chunks from the beginning are written
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._turn, self._on_mixed = turn, on_mixed
        self._witness: Witness | None = None  # of a copy that runs behind the loop
        self._looked = False  # whether it has been looked at again
        self._watched: list[torch.Tensor] = []  # what an overlapped copy would take its time for
        self._proof: list[int] | None = None  # their digests
        self.settle_s = 0.0  # how long an optimizer's step stood still for it
        self.proved: str | None = None  # which tensor changed before that; "" is none, None is not known

    # --- the loop's side ---

    def copy(self) -> None:
        """Copy everything; the loop may go on when this returns."""
        self._devices.follow()
        self._copy_groups(0, len(self._groups))
        self._devices.wait(self._events[-1:])
        self._check_versions()

    def copy_behind(self) -> None:
        """Copy what may change in the next forward, and the rest while the loop goes on: the next step of
        any optimizer waits for it."""
        self._devices.follow()
        self._copy_groups(0, self._hasty_groups)
        self._devices.order(self._events[-1:])
        if not self._devices:  # on a card this has not been tried, and would be one more kernel a piece
            self._witness = Witness(self._tensors[self._plan.hasty :], turn=self._turn)
        self._thread = threading.Thread(target=self._copy_rest, name="stoker-snapshot")
        self._thread.start()

    def copy_proving(self) -> None:
        """Copy everything at once, and see at the next step of an optimizer whether it could have waited."""
        self._watched = self._tensors[self._plan.hasty :]
        self.copy()
        self._proof = digests(self._watched)

    def arrive(self, *, stepping: bool) -> None:
        """Return when the loop may change its weights; `stepping`: an optimizer is about to."""
        began = time.monotonic()
        if self._proof is not None:
            self._prove(stepping=stepping)
        elif self._thread is not None:
            self._thread.join()
            self._thread = None
            self._devices.order(self._events[-1:])
            self._check_versions()
        else:
            return
        self.settle_s = time.monotonic() - began

    def _prove(self, *, stepping: bool) -> None:
        """Nothing may have changed up to here; if no optimizer has come here, that is no proof."""
        pairs = zip(digests(self._watched), self._proof or (), strict=True)
        changed = next((at for at, (now, before) in enumerate(pairs) if now != before), None)
        if changed is not None:
            self.proved = self._name(changed)
        elif stepping:
            self.proved = ""
        self._proof, self._watched = None, []

    def _name(self, steady: int) -> str:
        return self._plan.writes[self._plan.hasty + steady].piece.box.name

    def _copy_rest(self) -> None:
        try:
            self._copy_groups(self._hasty_groups, len(self._groups))
            if self._witness is not None:
                self._witness.look()
            with self._changed:
                self._looked = True
                self._changed.notify_all()
        except BaseException as error:
            self.abort(error)

    def _check_versions(self) -> None:
        """Once, before the optimizer changes anything: was something else faster than the copy?"""
        with self._changed:
            before, self._versions = self._versions, []
            now = versions(self._tensors[self._plan.hasty :]) if before else []
            changed = [at for at, (a, b) in enumerate(zip(now, before, strict=False)) if a != b]
        if changed:
            self._mixed(f"{counted(len(changed), 'tensor')} changed", changed[0])

    def _hear_witness(self) -> None:
        """In the writer's thread, when all is written: what torch does not count may have changed, too."""
        if self._witness is None:
            return
        with self._changed:  # all may be written before it was looked at
            self._changed.wait_for(lambda: self._looked or self._error is not None)
            self._raise_if_aborted()
        changed = self._witness.changed()
        self._witness = None
        if changed is not None:
            self._mixed("something changed, past what torch counts,", changed)

    def _mixed(self, what: str, first: int) -> None:
        self._on_mixed()
        self.abort(
            CheckpointError(
                f"{what} while being copied, {self._name(first)} first",
                hint="with overlap=True only an optimizer's step may change what is saved; else use "
                "overlap=False. The next saves of this run do not overlap",
            )
        )

    def _copy_groups(self, first: int, last: int) -> None:
        is_alone = self._devices or last - first < 2
        threads = 1 if is_alone else min(_MOST_THREADS, usable_cores())
        for event in in_threads(self._copy_group, range(first, last), threads=threads, name="stoker-copy"):
            with self._changed:
                self._events.append(event)
                self._copied += 1
                self._changed.notify_all()

    def _copy_group(self, index: int) -> Any:
        group = self._groups[index]
        self._wait_for_room(group[-1].at + group[-1].bytes)
        with self._devices.copying():
            for move in group:
                self._copy_move(move)
            return self._devices.mark()

    def _copy_move(self, move: Move) -> None:
        tensor, to = self._tensors[move.write], move.at % self._ring_bytes
        if not tensor.is_cuda and tensor.is_contiguous():
            ctypes.memmove(self._arena.address + to, tensor.data_ptr() + move.skip, move.bytes)
            return
        whole = move.bytes == tensor.nbytes
        source = tensor if whole else _as_bytes(tensor)[move.skip : move.skip + move.bytes]
        room = self._arena.tensor[to : to + move.bytes].view(source.dtype).view(source.shape)
        room.copy_(source, non_blocking=True)

    # --- the writer's side ---

    def chunk(self, start: int, stop: int) -> memoryview:
        wanted = self._groups_up_to(min(stop, self.bytes))
        needed = max(wanted, self._head_start)
        with self._changed:
            self._changed.wait_for(lambda: self._copied >= needed or self._error is not None)
            self._raise_if_aborted()
            event = self._events[wanted - 1] if wanted else None
        _synchronize(event)
        at = start % self._ring_bytes
        return self._arena.view(at, at + stop - start)

    def release(self, start: int, stop: int) -> None:
        with self._changed:
            self._released.add(start // self._chunk_bytes)
            while self._free_chunks in self._released:
                self._released.remove(self._free_chunks)
                self._free_chunks += 1
            self._changed.notify_all()

    def abort(self, error: BaseException) -> None:
        """Nobody needs to wait any longer: it failed."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def finish(self) -> None:
        """Raise what went wrong in the copy, now that everything is written, and let go of the tensors."""
        self._groups = []
        self._check_versions()
        self._hear_witness()
        self._tensors = []
        with self._changed:
            self._raise_if_aborted()

    def _wait_for_room(self, stop: int) -> None:
        """In a ring: wait until what lies where these bytes will is written."""
        if stop <= self._ring_bytes:
            return
        chunks = -(-(stop - self._ring_bytes) // self._chunk_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._free_chunks >= chunks or self._error is not None)
            self._raise_if_aborted()

    def _raise_if_aborted(self) -> None:
        if self._error is not None:
            raise self._error

    def _groups_up_to(self, stop: int) -> int:
        """How many groups hold the bytes before `stop`."""
        low, high = 0, len(self._groups)
        while low < high:
            middle = (low + high) // 2
            if self._groups[middle][0].at < stop:
                low = middle + 1
            else:
                high = middle
        return low

    def _group_bytes(self) -> int:
        """No group crosses a multiple of this. In a ring a group is a chunk: that fits or not."""
        return self._chunk_bytes if self._ring_bytes < self.bytes else _GROUP_BYTES


class _Devices:
    """The GPUs that hold some of the state, each with its side stream; falsy when there are none."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        stream: Any = torch.cuda.Stream  # untyped in torch
        self._streams = {device: stream(device) for device in devices}

    def __bool__(self) -> bool:
        return bool(self._streams)

    def follow(self) -> None:
        """Copy only after what the loop has asked for so far."""
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))

    def copying(self) -> ExitStack:
        stack = ExitStack()
        for stream in self._streams.values():
            stack.enter_context(torch.cuda.stream(stream))
        return stack

    def mark(self) -> Any:
        # blocking: a thread that waits for a copy sleeps, instead of spinning beside the loop's own launches
        event: Any = torch.cuda.Event  # untyped in torch
        return [stream.record_event(event(blocking=True)) for stream in self._streams.values()]

    def order(self, marks: Sequence[Any]) -> None:
        """Let the loop's streams, not its thread, wait for these copies."""
        for events in marks:
            for device, event in zip(self._streams, events, strict=True):
                torch.cuda.current_stream(device).wait_event(event)

    def wait(self, marks: Sequence[Any]) -> None:
        for events in marks:
            _synchronize(events)


def _synchronize(events: Any) -> None:
    for event in events or ():
        event.synchronize()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each was changed; that of tensors made in inference mode is not counted."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
