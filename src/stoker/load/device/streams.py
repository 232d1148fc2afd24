"""CUDA streams and events: a device, and batches handed over to it. On a CPU the same code runs; its streams
and events do nothing.

Windows of tokens are made on the device (see `card`); everything else is made on the host and copied batch
by batch.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stoker.errors import UsageError
from stoker.load.assembly.rows import Batch, Rows


def as_tensors(batch: Any) -> Any:
    """The arrays of a batch as tensors over the same memory, also inside each other. Lists stay lists."""
    if isinstance(batch, dict):
        return {name: as_tensors(value) for name, value in batch.items()}
    if isinstance(batch, tuple):
        made = map(as_tensors, batch)
        return type(batch)(*made) if hasattr(batch, "_fields") else tuple(made)
    return as_tensor(batch)


def as_tensor(value: Any) -> Any:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":
        return value
    native = value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))
    return torch.from_numpy(native)


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a batch, however a user's collate laid them out."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (dict, list, tuple)):
        for one in batch.values() if isinstance(batch, dict) else batch:
            yield from tensors_of(one)


def with_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same batch with other tensors, asked for in the order of `tensors_of`."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {name: with_tensors(one, change) for name, one in batch.items()}
    if isinstance(batch, (list, tuple)):
        changed = [with_tensors(one, change) for one in batch]
        return type(batch)(*changed) if hasattr(batch, "_fields") else type(batch)(changed)
    return batch


class Device:
    """A device and its side streams."""

    def __init__(self, name: str, *, is_hurried: bool = False) -> None:
        """`is_hurried`: what is gathered goes before what others have the device do."""
        try:
            self.torch_device = torch.device(name)
        except RuntimeError as error:
            raise UsageError(
                f"device={name!r} is unknown: {error}", hint="use 'cuda', 'cuda:0' or 'cpu'"
            ) from None
        self.is_cuda = self.torch_device.type == "cuda"
        if self.is_cuda and not torch.cuda.is_available():
            raise UsageError(
                "this machine has no CUDA device", hint="use device='cpu', or check `nvidia-smi`"
            )
        if self.is_cuda and self.torch_device.index is None:
            self.torch_device = torch.device("cuda", torch.cuda.current_device())
        stream: Any = torch.cuda.Stream  # untyped in torch
        self._copying = stream(self.torch_device) if self.is_cuda else None
        priority = -1 if is_hurried else 0
        self._gathering = stream(self.torch_device, priority=priority) if self.is_cuda else None

    def copying(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._copying) if self._copying else nullcontext()

    def gathering(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._gathering) if self._gathering else nullcontext()

    @property
    def copy_stream(self) -> int:
        """What the driver calls the stream of copies."""
        return int(self._copying.cuda_stream) if self._copying else 0

    @property
    def gather_stream(self) -> int:
        return int(self._gathering.cuda_stream) if self._gathering else 0

    def mark(self, *, awaited: bool = False) -> Any:
        """An event of the current stream, here and now; None where there are no streams. One that a thread
        waits for lets it sleep meanwhile."""
        if not self.is_cuda:
            return None
        make_event: Any = torch.cuda.Event  # untyped in torch
        event = make_event(blocking=awaited)
        event.record(self._current())
        return event

    def wait_for(self, *events: Any) -> None:
        """Let the current stream, not this thread, wait for events."""
        if self.is_cuda:
            stream = self._current()
            for event in (event for event in events if event is not None):
                event.wait(stream)

    def moved(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """An array as a tensor there."""
        return torch.from_numpy(array).to(self.torch_device)

    def sent(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """The same for the current stream, without waiting. It travels in turn with all other copies: on
        another stream it would wait until theirs has nothing left to do (10 ms on an H200)."""
        if not self.is_cuda:
            return torch.from_numpy(array)
        with self.copying():
            there = torch.from_numpy(array).pin_memory().to(self.torch_device, non_blocking=True)
            arrived = self.mark()
        self.wait_for(arrived)
        self.used_here([there])
        return there

    def used_here(self, tensors: Iterable[torch.Tensor]) -> None:
        """The current stream uses tensors that another one made: their memory is not to be used again before
        it has."""
        stream = self._current()
        for tensor in {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values():
            tensor.record_stream(stream)

    def _current(self) -> Any:
        # by number: to find that of a torch.device takes longer than all the rest
        return torch.cuda.current_stream(self.torch_device.index)

    def drain(self) -> None:
        """Wait until everything asked of the device is done."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.is_cuda)


_UNFINISHED = 2  # groups asked of a device and not there yet


class Arrivals:
    """Hands batches made on side streams over to the consumer's stream."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._made: deque[Any] = deque()

    def made(self) -> Any:
        """Called by the thread that made a group: the event after which it is there. A loop that never waits
        for its device would have that thread ask for more and more groups, and memory for them."""
        with self._device.gathering():
            ready = self._device.mark(awaited=True)
        self._made.append(ready)
        if len(self._made) > _UNFINISHED and (earlier := self._made.popleft()):
            earlier.synchronize()
        return ready

    def accept(self, batches: Sequence[Batch], ready: Any) -> None:
        """Called by the consumer: its stream waits for the group, not its thread."""
        if ready is None:
            return
        self._device.wait_for(ready)
        whole = batches.columns if isinstance(batches, Rows) else list(batches)
        self._device.used_here(value for value in tensors_of(whole) if value.is_cuda)


class Copier:
    """Host batches to a device through pinned buffers, ahead of the consumer."""

    def __init__(self, device: Device, *, ahead: int = 2) -> None:
        self._device, self._ahead = device, ahead
        self._stages: deque[tuple[torch.Tensor, Any]] = deque()

    def copied(self, batches: Iterator[Batch], *, given: Callable[[], Any]) -> Iterator[tuple[Batch, Any]]:
        """Each batch on the device, with what `given` said when it left the host."""
        waiting: deque[tuple[Batch, Any, Any]] = deque()
        for batch in batches:
            waiting.append((*self._copy(batch), given()))
            if len(waiting) > self._ahead:
                yield self._arrived(waiting.popleft())
        while waiting:
            yield self._arrived(waiting.popleft())

    def moved(self, batch: Batch) -> Batch:
        """A batch whose tensors are on the device when what the current stream does next is done."""
        there, ready = self._copy(batch)
        self._device.wait_for(ready)
        return there

    def _arrived(self, one: tuple[Batch, Any, Any]) -> tuple[Batch, Any]:
        batch, ready, state = one
        Arrivals(self._device).accept([batch], ready)
        return batch, state

    def _copy(self, batch: Batch) -> tuple[Batch, Any]:
        if not self._device.is_cuda:
            return batch, None
        rooms = [-(-tensor.nbytes // 16) * 16 for tensor in tensors_of(batch) if not tensor.is_cuda]
        stage = self._stage(sum(rooms))
        places = itertools.accumulate(rooms, initial=0)

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_cuda:  # made there
                return tensor
            at = next(places)
            pinned = stage[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            pinned.copy_(tensor)
            return pinned.to(self._device.torch_device, non_blocking=True)

        with self._device.copying():
            moved = with_tensors(batch, move)
            ready = self._device.mark()
        self._stages.append((stage, ready))
        return moved, ready

    def _stage(self, size: int) -> torch.Tensor:
        if len(self._stages) > self._ahead:
            stage, copied = self._stages.popleft()
            copied.synchronize()  # the copy may still be running
            if stage.numel() >= size:
                return stage
        return self._device.pinned(size)
