"""What the training loop did, told by the marks of the hooks: spans, steps, evaluations.

A mark says when something began or ended and in which thread; here it is read, a moment later, by one thread
at a time. Steps, evaluations and what is open are those of one thread, the loop: the one that steps the
optimizer.
"""

from __future__ import annotations

from stoker.inside.process import began
from stoker.spans import NO_STEP, Recorder, Ring


class Loop:
    """What is open, which step this is. Every method but `reset` and `record` reads one mark."""

    def __init__(self, thread: int, *, now: float) -> None:
        self.reset(thread, now=now)

    def reset(self, thread: int, *, now: float) -> None:
        """Nothing has happened yet, and nothing is written."""
        self.thread = thread
        self.open: list[str] = []  # what the loop is in, outermost first
        self.touched = now  # when the loop last ended a span
        self.number = 0
        self.collective_seq, self.collective_op = 0, ""
        self._spans: Ring | None = None
        self._steps: Ring | None = None
        self._numbers: dict[int, int] = {}  # of threads, as the recorder knows them
        self._step_start = 0.0  # 0: no step has begun
        self._stepped_at = 0.0  # when the last optimizer step since the boundary ended; 0: none has
        self._steppers: set[int] = set()
        self._starts: list[float] = []  # of optimizer steps under way
        self._tokens = -1
        self._evaluation_start = self._evaluation_end = 0.0
        self._exhausted = False  # the loader evaluated on has come to its end

    def record(self, recorder: Recorder, steps: Ring) -> None:
        """From now on what is read is written there."""
        self._spans, self._steps, self._numbers = recorder.ring, steps, recorder.threads

    # --- spans ------------------------------------------------------------------------------------

    def begin(self, at: float, thread: int, kind: str, op: str = "") -> None:
        if op and kind not in self.open:
            self.collective_seq += 1
            self.collective_op = op
        if thread == self.thread:
            self.open.append(kind)

    def end(self, at: float, thread: int, kind: str, start: float, moved_bytes: int = 0) -> None:
        """Nested spans of one kind are one."""
        if thread == self.thread:
            while self.open and self.open.pop() != kind:
                pass  # an optimizer step that raised was never ended
            self.touched = at
            if kind in self.open:
                return
            if self._evaluation_start and kind == "forward":
                self._evaluation_end = at
        self.span(at, thread, kind, start, moved_bytes)

    def span(self, at: float, thread: int, kind: str, start: float, moved_bytes: int = 0) -> None:
        """One known only afterwards."""
        if self._spans is not None:
            step = self.number if self._step_start else NO_STEP
            self._spans.write(kind, start, at, step, moved_bytes, self._numbers[thread])

    # --- steps ------------------------------------------------------------------------------------

    def begin_data(self, at: float, thread: int, evaluating: bool) -> None:
        """A batch is asked for: the step before is over, if its optimizer has stepped."""
        if thread == self.thread:
            if "optimizer" in self.open:
                self.open.clear()
            if not self.open:
                self._finish_step()
                self._turn(at, evaluating=evaluating)
        self.begin(at, thread, "data")

    def end_data(
        self, at: float, thread: int, start: float, tokens: int = -1, moved_bytes: int = 0, last: bool = False
    ) -> None:
        self.end(at, thread, "data", start, moved_bytes)
        if thread != self.thread:
            return
        if last and self._evaluation_start:
            self._evaluation_end, self._exhausted = at, True
        elif tokens >= 0 and not self._evaluation_start and "data" not in self.open:
            self._tokens = max(self._tokens, 0) + tokens

    def begin_backward(self, at: float, thread: int, kind: str) -> None:
        """A gradient is taken. If a batch to evaluate on was the last one seen, it was none: the model trains
        in its evaluation mode."""
        if self._evaluation_start and not self._exhausted:
            self._evaluation_start = self._evaluation_end = 0.0
        self._begin_training(at, thread, kind)

    def begin_optimizer(self, at: float, thread: int, optimizer: int) -> None:
        if "optimizer" not in self.open:
            self.thread = thread
            self._starts.clear()  # steps that raised never ended
            if optimizer in self._steppers:
                self._finish_step()  # the same optimizer again with no batch seen in between
        self._starts.append(at)
        self._begin_training(at, thread, "optimizer")

    def end_optimizer(self, at: float, thread: int, optimizer: int) -> None:
        if not self._starts:
            return
        self.end(at, thread, "optimizer", self._starts.pop())
        if "optimizer" not in self.open:
            self._stepped_at = at
            self._steppers.add(optimizer)

    def _begin_training(self, at: float, thread: int, kind: str) -> None:
        """Whatever evaluation was open is over."""
        if thread == self.thread and not self.open:
            self._turn(at, evaluating=False)
        self.begin(at, thread, kind)

    def _turn(self, at: float, *, evaluating: bool) -> None:
        if not self._step_start:
            self.span(at, self.thread, "startup", began())
            self._step_start = at
        if evaluating and not self._evaluation_start:
            self._evaluation_start = at
        elif self._evaluation_start and not evaluating:
            self._finish_evaluation(at)
        self._exhausted = False

    def _finish_evaluation(self, at: float) -> None:
        self.span(self._evaluation_end or at, self.thread, "evaluation", self._evaluation_start)
        self._evaluation_start = self._evaluation_end = 0.0

    def _finish_step(self) -> None:
        if self._stepped_at and self._steps is not None:
            thread = self._numbers[self.thread]
            self._steps.write("step", self._step_start, self._stepped_at, self.number, self._tokens, thread)
            self._step_start, self._stepped_at = self._stepped_at, 0.0
            self.number += 1
            self._steppers.clear()
            self._tokens = -1

    def finish(self, at: float) -> None:
        """The process ends: so do its evaluation and its step."""
        if self._evaluation_start:
            self._finish_evaluation(at)
        self._finish_step()
