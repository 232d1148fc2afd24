"""Step detection: what the training loop did, told by the marks of the hooks; spans, steps, evaluations.

A mark says what was done, from when to when and in which thread. Hooks put it when that has ended; here it is
read, a moment later, by one thread at a time. What lay inside comes before what lay around it. Steps and
evaluations are those of one thread, the loop: the one that steps the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from stoker.spans import NO_STEP, Recorder, Ring
from stoker.watch.inside.process import began

# What, start, end, thread (None: the loop's; to ask for it takes a microsecond), bytes, and a note: of data
# its tokens or one of the three below, of a forward whether it evaluates, of an optimizer which one, of a
# collective its name.
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
        self._cycles = Cycles()
        self._reads: dict[str, Callable[[float, float, Any], None]] = {
            "data": self._data,
            "forward": self._forward,
            "backward": self._backward,
            "optimizer": self._optimizer,
            "collective": self._collective,
        }

    @property
    def evaluating(self) -> bool:
        return bool(self._evaluation_start)

    def believe_cycles(self) -> None:
        """No optimizer of torch's lives: cycles of batch and gradient are this program's steps."""
        self._cycles.settled = True

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
        """The process ends: so does its step, and its evaluation with the last thing that was seen of it."""
        if self._evaluation_start:
            self._finish_evaluation(max(self.touched, self._evaluation_start))
        if self._cycles.taken and not self._cycles.known:
            self._finish_cycle(at)
        self._cycles.settled = True
        self._write_cycles()
        self._finish_step()

    # --- what each kind means ---------------------------------------------------------------------

    def _data(self, start: float, end: float, note: int) -> None:
        """A batch was asked for: the step before is over, if its optimizer has stepped."""
        if self._stepped_at:
            self._finish_step()
        elif note > EVALUATED and self._cycles.over("data"):
            self._finish_cycle(start)
        self._turn(start, evaluating=note <= EVALUATED)
        if note == EXHAUSTED:
            self._evaluation_end, self._exhausted = end, True
        elif note >= 0:
            around = start <= self._fetched  # a loader around another: these are the tokens of the last mark
            self._tokens = max(self._tokens, 0) + note - (max(self._last_tokens, 0) if around else 0)
        self._fetched, self._last_tokens = start, note

    def _forward(self, start: float, end: float, note: int) -> None:
        """Without gradients and in evaluation mode what is trained is evaluated, whoever made the batch."""
        self.calls_model = True
        if note == EVALUATED:
            self._turn(start, evaluating=True)
            self._exhausted = True
        else:
            if self._cycles.over("forward"):
                self._finish_cycle(start)
            if self._exhausted:
                self._turn(start, evaluating=False)
        if self._evaluation_start:
            self._evaluation_end = end

    def _backward(self, start: float, end: float, note: object) -> None:
        """A gradient was taken. If a batch to evaluate on was the last one seen, it was none: the model
        trains in its evaluation mode."""
        if self._evaluation_start and not self._exhausted:
            self._evaluation_start = self._evaluation_end = 0.0
        if self._cycles.over("backward"):
            self._finish_cycle(start)
        self._turn(start, evaluating=False)
        self._cycles.taken = True

    def _optimizer(self, start: float, end: float, which: int) -> None:
        if not self._cycles.known:
            self._join_micro_batches()
        if which in self._steppers and start >= self._stepped_at:
            self._finish_step()  # the same one again with no batch seen in between, nor inside itself
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

    def _finish_cycle(self, at: float) -> None:
        """A step without an optimizer of torch's: from one batch to the next, with a gradient in between."""
        self._cycles.end(self._step_start, at, self._tokens)
        self._step_start, self._tokens = at, NO_TOKENS
        self.number += 1
        self._write_cycles()

    def _join_micro_batches(self) -> None:
        """An optimizer steps after all: what looked like steps were the micro-batches of its first one."""
        pending, self._cycles = self._cycles.pending, Cycles(known=True)
        if pending:
            self.number -= len(pending)
            self._step_start = pending[0][0]
            told = [tokens for *_, tokens in (*pending, (0.0, 0.0, self._tokens)) if tokens >= 0]
            self._tokens = sum(told) if told else NO_TOKENS

    def _write_cycles(self) -> None:
        thread = self._numbers[self.thread]
        for number, (start, end, tokens) in self._cycles.to_write():
            if self._steps is not None:
                self._steps.write("step", start, end, number, tokens, thread)

    def _finish_step(self) -> None:
        if self._stepped_at and self._steps is not None:
            thread = self._numbers[self.thread]
            self._steps.write("step", self._step_start, self._stepped_at, self.number, self._tokens, thread)
            self._step_start, self._stepped_at = self._stepped_at, 0.0
            self.number += 1
            self._steppers.clear()
            self._tokens = NO_TOKENS


class Cycles:
    """Steps of programs that step no optimizer of torch's: cycles of a batch, a forward and a gradient.

    They begin with the outermost of these that is seen. Where an optimizer steps after all, the first cycles
    were its micro-batches: so many are kept back before they are believed.
    """

    _BELIEVED = 64

    def __init__(self, *, known: bool = False) -> None:
        self.known = known  # an optimizer steps: there is nothing to be guessed
        self.taken = False  # a gradient, since the cycle began
        self.settled = False
        self.pending: list[tuple[float, float, int]] = []
        self._begins = "backward"  # the outermost kind seen
        self._written = 0

    def over(self, kind: str) -> bool:
        """Does what begins now begin another cycle?"""
        if _OUTER[kind] < _OUTER[self._begins]:
            self._begins = kind
        return self.taken and not self.known and kind == self._begins

    def end(self, start: float, at: float, tokens: int) -> None:
        self.taken = False
        self.pending.append((start, at, tokens))
        self.settled = self.settled or len(self.pending) >= self._BELIEVED

    def to_write(self) -> list[tuple[int, tuple[float, float, int]]]:
        if not self.settled:
            return []
        found = list(enumerate(self.pending, self._written))
        self._written += len(self.pending)
        self.pending.clear()
        return found


_OUTER = {"data": 0, "forward": 1, "backward": 2}
