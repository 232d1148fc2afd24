"""What the training loop did, told by the marks of the hooks: spans, steps, evaluations.

A mark says what was done, from when to when and in which thread. Hooks put it when that has ended; here it is
read, a moment later, by one thread at a time. What lay inside comes before what lay around it. Steps and
evaluations are those of one thread, the loop: the one that steps the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from stoker.inside.process import began
from stoker.spans import NO_STEP, Recorder, Ring

# What, start, end, thread (None: the loop's; to ask for it takes a microsecond), bytes, and a note: of data
# its tokens or one of the three below, of an optimizer which one, of a collective its name.
Mark = tuple[str, float, float, "int | None", int, Any]
NO_TOKENS = -1  # a batch that is no text
EVALUATED = -2  # a batch to evaluate on
EXHAUSTED = -3  # there was no other batch to evaluate on


class Loop:
    """Which step this is, and when something was last seen to end."""

    def __init__(self, thread: int, *, now: float) -> None:
        self.reset(thread, now=now)

    def reset(self, thread: int, *, now: float) -> None:
        """Nothing has happened yet, and nothing is written."""
        self.thread = thread  # the one that stepped an optimizer last
        self.touched = now  # when the loop last ended a span
        self._fetched = 0.0  # when it last asked for a batch
        self.number = 0
        self.calls_model = False
        self.collectives, self.collective = 0, ""  # how many were done; the last one
        self._spans: Ring | None = None
        self._steps: Ring | None = None
        self._numbers: dict[int, int] = {}  # of threads, as the recorder knows them
        self._step_start = 0.0  # 0: no step has begun
        self._stepped_at = 0.0  # when the last optimizer step since the boundary ended; 0: none has
        self._steppers: set[int] = set()
        self._tokens = self._last_tokens = NO_TOKENS
        self._evaluation_start = self._evaluation_end = 0.0
        self._exhausted = False  # the loader evaluated on has come to its end
        self._reads: dict[str, Callable[[float, float, Any], None]] = {
            "data": self._data,
            "forward": self._forward,
            "backward": self._backward,
            "optimizer": self._optimizer,
            "collective": self._collective,
        }

    def record(self, recorder: Recorder, steps: Ring) -> None:
        """From now on what is read is written there."""
        self._spans, self._steps, self._numbers = recorder.ring, steps, recorder.threads

    def read(self, marks: Iterable[Mark]) -> None:
        """Written flat: it runs beside the loop, and takes the interpreter from it."""
        if self._spans is None:
            return
        write, reads, loop = self._spans.write, self._reads, self.thread
        number = self._numbers[loop]
        for kind, start, end, thread, moved_bytes, note in marks:
            if thread is None or thread == loop:
                if kind in reads:
                    reads[kind](start, end, note)
                self.touched = end
                write(kind, start, end, self.number if self._step_start else NO_STEP, moved_bytes, number)
            else:
                write(kind, start, end, NO_STEP, moved_bytes, self._numbers[thread])

    def finish(self, at: float) -> None:
        """The process ends: so do its evaluation and its step."""
        if self._evaluation_start:
            self._finish_evaluation(at)
        self._finish_step()

    # --- what each kind means ---------------------------------------------------------------------

    def _data(self, start: float, end: float, note: int) -> None:
        """A batch was asked for: the step before is over, if its optimizer has stepped."""
        if self._stepped_at:
            self._finish_step()
        self._turn(start, evaluating=note <= EVALUATED)
        if note == EXHAUSTED:
            self._evaluation_end, self._exhausted = end, True
        elif note >= 0:
            around = start <= self._fetched  # a loader around another: these are the tokens of the last mark
            self._tokens = max(self._tokens, 0) + note - (max(self._last_tokens, 0) if around else 0)
        self._fetched, self._last_tokens = start, note

    def _forward(self, start: float, end: float, note: object) -> None:
        self.calls_model = True
        if self._evaluation_start:
            self._evaluation_end = end

    def _backward(self, start: float, end: float, note: object) -> None:
        """A gradient was taken. If a batch to evaluate on was the last one seen, it was none: the model
        trains in its evaluation mode."""
        if self._evaluation_start and not self._exhausted:
            self._evaluation_start = self._evaluation_end = 0.0
        self._turn(start, evaluating=False)

    def _optimizer(self, start: float, end: float, which: int) -> None:
        if which in self._steppers:
            self._finish_step()  # the same one again with no batch seen in between
        self._turn(start, evaluating=False)
        self._stepped_at = end
        self._steppers.add(which)

    def _collective(self, start: float, end: float, name: str) -> None:
        if name:
            self.collectives += 1
            self.collective = name

    # --- steps and evaluations --------------------------------------------------------------------

    def _turn(self, at: float, *, evaluating: bool) -> None:
        if not self._step_start:
            self._span("startup", began(), at)
            self._step_start = at
        if evaluating:
            self._evaluation_start = self._evaluation_start or at
        elif self._evaluation_start:
            self._finish_evaluation(at)
        self._exhausted = False

    def _finish_evaluation(self, at: float) -> None:
        self._span("evaluation", self._evaluation_start, self._evaluation_end or at)
        self._evaluation_start = self._evaluation_end = 0.0

    def _span(self, kind: str, start: float, end: float) -> None:
        if self._spans is not None:
            step = self.number if self._step_start else NO_STEP
            self._spans.write(kind, start, end, step, 0, self._numbers[self.thread])

    def _finish_step(self) -> None:
        if self._stepped_at and self._steps is not None:
            thread = self._numbers[self.thread]
            self._steps.write("step", self._step_start, self._stepped_at, self.number, self._tokens, thread)
            self._step_start, self._stepped_at = self._stepped_at, 0.0
            self.number += 1
            self._steppers.clear()
            self._tokens = NO_TOKENS
