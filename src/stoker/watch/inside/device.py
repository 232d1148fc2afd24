"""CUDA events: copies to the card and waits for it. Nothing here synchronises: large copies are timed by two
events of the card, read when they are done. Also those that the host waits for: a copy out of plain memory
first waits for what the card computes, which is no copying.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from stoker.watch.inside.switch import Switch, ident, now, timed, unseen

if TYPE_CHECKING:
    from stoker.watch.inside.probe import Probe

_LARGE = 1 << 20  # bytes; a smaller copy takes less time than two events cost
_PENDING = 256


def hook_copies(probe: Probe, roots: Any, torch: Any) -> None:
    """`Tensor.to`, `.cuda`, `.copy_` between host and card; where torch knows no card, nothing."""
    if not has_card(torch):
        return
    copies = Copies(probe, torch)
    for name in ("to", "cuda", "cpu", "copy_"):
        switch = Switch(probe, f"Tensor.{name}")
        setattr(torch.Tensor, name, copies.watched(getattr(torch.Tensor, name), switch))


def hook_syncs(probe: Probe, roots: Any, torch: Any) -> None:
    """The host waiting for the card: `.item()`, `float(loss)`, `if mask.any():`, `synchronize()`."""
    if not has_card(torch):
        return
    for name in ("item", "tolist", "__float__", "__int__", "__bool__"):
        setattr(torch.Tensor, name, _waiting(probe, getattr(torch.Tensor, name)))
    torch.cuda.synchronize = timed(probe, "sync", torch.cuda.synchronize)
    for kind in (torch.cuda.Event, torch.cuda.Stream):
        kind.synchronize = timed(probe, "sync", kind.synchronize)


def has_card(torch: Any) -> bool:
    return bool(torch.backends.cuda.is_built())


def _waiting(probe: Probe, original: Any) -> Any:
    spanned = timed(probe, "sync", original)

    @functools.wraps(original)
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return (spanned if tensor.is_cuda else original)(tensor, *args, **kwargs)

    return unseen(call)


class Captures:
    """CUDA graphs being captured. To ask an event meanwhile, in any thread, breaks the capture: on an H200
    with cudaErrorStreamCaptureInvalidated."""

    def __init__(self, cuda: Any) -> None:
        self.under_way = 0
        self.none_begins = threading.Lock()
        graph: Any = getattr(cuda, "CUDAGraph", None)
        if graph is not None:
            graph.capture_begin = self._beginning(graph.capture_begin)
            graph.capture_end = self._ending(graph.capture_end)

    def _beginning(self, original: Any) -> Any:
        @functools.wraps(original)
        def capture_begin(*args: Any, **kwargs: Any) -> Any:
            with self.none_begins:
                self.under_way += 1
            try:
                return original(*args, **kwargs)
            except BaseException:
                self.under_way -= 1
                raise

        return unseen(capture_begin)

    def _ending(self, original: Any) -> Any:
        @functools.wraps(original)
        def capture_end(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                self.under_way = max(0, self.under_way - 1)

        return unseen(capture_end)


class Copies:
    """Wraps copying methods, and remembers copies that are still under way."""

    def __init__(self, probe: Probe, torch: Any) -> None:
        self._probe, self._torch = probe, torch
        self._captures = Captures(torch.cuda)
        self._free: list[Any] = []  # pairs of events
        self._pending: deque[tuple[float, float, int, Any]] = deque(maxlen=_PENDING)

    def watched(self, original: Any, switch: Switch) -> Any:
        @functools.wraps(original)
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not switch.on or self._probe.recorder is None:
                return original(tensor, *args, **kwargs)
            try:
                events = self._begin(tensor, args)
                start = now()
            except Exception as error:
                switch.fail(error)
                return original(tensor, *args, **kwargs)
            result = original(tensor, *args, **kwargs)
            try:
                self._end(tensor, args, result, start, events)
            except Exception as error:
                switch.fail(error)
            return result

        return unseen(call)

    def _begin(self, tensor: Any, args: Any) -> Any:
        """Two events around a large copy to the card, on the stream that computes."""
        source = args[0] if args and hasattr(args[0], "is_cuda") else tensor
        cuda = self._torch.cuda
        if source.is_cuda or source.nbytes < _LARGE or not cuda.is_initialized():
            return None
        if source is not tensor and not tensor.is_cuda:
            return None
        if (
            self._captures.under_way
            or cuda.is_current_stream_capturing()
            or cuda.current_stream() != cuda.default_stream()
        ):
            return None  # a copy on a stream of its own is overlapped: the loop does not wait for it
        events = self._free.pop() if self._free else self._new_events()
        events[0].record()
        return events

    def _end(self, tensor: Any, args: Any, result: Any, start: float, events: Any) -> None:
        source = args[0] if args and hasattr(args[0], "is_cuda") and result is tensor else tensor
        if source.is_cuda == result.is_cuda:
            if events is not None:
                self._free.append(events)
            return
        returned, moved = now(), int(result.nbytes)
        if events is not None:
            events[1].record()
            self._pending.append((start, returned, moved, events))
        else:
            self._say("h2d" if result.is_cuda else "sync", start, returned, moved)
        self._collect()

    def _collect(self) -> None:
        """Say the copies that are done; the first that is not ends the look."""
        with self._captures.none_begins:
            if self._captures.under_way:
                return
            while self._pending and self._pending[0][3][1].query():
                start, returned, moved, events = self._pending.popleft()
                copied_s = events[0].elapsed_time(events[1]) / 1e3
                began = max(start, returned - copied_s)
                if began > start:  # the host waited for the copy, and before that for its turn
                    self._say("sync", start, began, 0)
                self._say("h2d", began, max(returned, began + copied_s), moved)
                self._free.append(events)

    def _say(self, kind: str, start: float, end: float, moved: int) -> None:
        self._probe.marks.append((kind, start, end, ident(), moved, ""))

    def _new_events(self) -> Any:
        event = self._torch.cuda.Event
        return event(enable_timing=True), event(enable_timing=True)
