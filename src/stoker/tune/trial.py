"""One trial: the job run with a setting until a window of its steps is measured, and then ended.

Every trial measures the same steps, so that first batches, epochs, evaluations and saves that fall among them
are in all of them. Its output goes into its folder, which is deleted unless the trial failed.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from stoker.errors import BadInputError
from stoker.formats.sizes import counted
from stoker.recording import KINDS, Floats, Recording
from stoker.tune.candidates import Setting
from stoker.watch import runs
from stoker.watch.command import Options, make_private, watch
from stoker.watch.inside.guard import REFUSED
from stoker.watch.inside.guard import VARIABLE as OVERWRITE
from stoker.watch.runs.batches import SETTLE
from stoker.watch.said import last_words
from stoker.watch.window import StepWindow, Window

_PATIENCE_S = 30.0  # beyond twice the usual start, in which no step ends
_TEXT = 300
_MOST_STEPS = 1 << 16
_UNLIKE = ("evaluation", "checkpoint")  # spans that make steps unlike others


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The steps that are measured: from the end of step `settle` to that of `last`."""

    settle: int
    last: int
    empty_at: int = 0  # batches after which queues are emptied: before the last step that is not measured
    most: int = (
        0  # a faster setting may go on to this step, for as long as the unchanged program was measured
    )

    @property
    def steps(self) -> int:
        return self.last - self.settle


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What came of one. `seconds` is infinite where its window was not finished; `failure` then says why."""

    setting: Setting
    seconds: float = math.inf
    failure: str = ""
    losses: tuple[float, ...] = ()
    refused: tuple[str, ...] = ()  # files that it would have overwritten
    took_s: float = 0.0

    @property
    def is_loser(self) -> bool:
        return self.failure == SLOWER

    def as_dict(self) -> dict[str, Any]:
        finite = self.seconds if math.isfinite(self.seconds) else None
        return {**asdict(self), "setting": dict(self.setting), "seconds": finite}


SLOWER = "ended early: it was much slower"


@dataclass(kw_only=True, slots=True)
class Bench:
    """Where trials are run, and how."""

    command: Sequence[str]
    folder: Path
    site: dict[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    overwrite: bool = False
    began: float = field(default_factory=time.time)
    count: int = 0
    interrupted: bool = False

    def first(self, *, seconds: float) -> Recording:
        """The job unchanged, until it has stepped for so long: what everything else is planned by."""
        folder = self.folder / "first"
        window = Window(folder, seconds=seconds)
        window.grace_s = 10.0
        self._watched(folder, {}, window, empty_at=0)
        try:
            return runs.read_recording(folder)
        except BadInputError:
            return Recording(
                title="", wall_s=0.0, ended=last_words(folder / "output.log"), ranks=(), gpus=(), hosts=()
            )

    def run(self, setting: Setting, span: Span, *, lost_s: float, usual_s: float, start_s: float) -> Trial:
        """One window of those steps, given up after `lost_s`; unchanged they take `usual_s`."""
        self.count += 1
        folder, began = self.folder / f"trial-{self.count:02}", time.monotonic()
        window = StepWindow(
            folder,
            steps=span.last,
            settle=span.settle,
            most=span.most,
            least_s=usual_s,
            slowest_s=lost_s + 1.0,
            silent_s=2 * start_s + 2 * usual_s + _PATIENCE_S,
        )
        code = self._watched(folder, setting, window, empty_at=span.empty_at)
        trial = self._read(folder, setting, span, window, code)
        if not trial.failure or trial.is_loser:
            shutil.rmtree(folder, ignore_errors=True)
        return replace(trial, took_s=time.monotonic() - began)

    def _watched(self, folder: Path, setting: Setting, window: Window, *, empty_at: int) -> int:
        make_private(folder)
        knobs = folder / "knobs.json"
        told = {"knobs": dict(setting), "site": self.site, "trial": self.began, "empty_at": empty_at}
        knobs.write_text(json.dumps(told), "utf-8")
        allowed = {OVERWRITE: "1"} if self.overwrite else {}
        options = Options(
            folder=folder,
            hz=2.0,
            apply=knobs,
            output=folder / "output.log",
            environ={"WANDB_MODE": "disabled", **self.environ, **allowed},
        )
        code = watch(self.command, options, window=window)
        self.interrupted = self.interrupted or window.interrupted
        return 0 if window.over else code

    def _read(self, folder: Path, setting: Setting, span: Span, window: StepWindow, code: int) -> Trial:
        try:
            recording = runs.read_recording(folder)
        except BadInputError:
            return Trial(
                setting=setting,
                failure=f"it ended with {code} before its first step: {last_words(folder / 'output.log')}",
            )
        seconds = measured_seconds(recording, span)
        losses = tuple(recording.facts.get("losses") or ())
        refused = refusals(recording)
        failure = "" if math.isfinite(seconds) else _failure(recording, folder, window, code)
        return Trial(setting=setting, seconds=seconds, failure=failure, losses=losses, refused=refused)


def window_seconds(recording: Recording, span: Span) -> float:
    """What the steps of a span took; infinite where not all of them ended."""
    ends = step_ends(recording)
    return float(ends[span.last - 1] - ends[span.settle - 1]) if len(ends) >= span.last else math.inf


def measured_seconds(recording: Recording, span: Span) -> float:
    """The same from all the steps that a trial went on for: twelve steps of a setting that is eight times as
    fast are soon over. Where it evaluated or saved among them they are not alike: then the span counts."""
    seconds, ends = window_seconds(recording, span), step_ends(recording)
    ends = ends[: span.most]
    if not math.isfinite(seconds) or len(ends) <= span.last:
        return seconds
    began, ended = ends[span.settle - 1], ends[-1]
    for rank in recording.ranks:
        other = np.isin(rank.spans.kind, [KINDS.index(kind) for kind in _UNLIKE])
        if bool((other & (rank.spans.end > began) & (rank.spans.start < ended)).any()):
            return seconds
    return float(ended - began) / (len(ends) - span.settle) * span.steps


def step_ends(recording: Recording) -> Floats:
    """Of the rank that has most."""
    found = [rank.steps.end for rank in recording.ranks]
    return max(found, key=len) if found else np.empty(0)


def plan_span(recording: Recording, *, queued: int, epoch: int, seconds: float) -> Span | None:
    """The steps to measure: after the queues of the workers that will be tried have run off, for so many
    seconds, and to the end of an epoch where they are short. None of fewer than five."""
    ends = step_ends(recording)
    if len(ends) < SETTLE + 5:
        return None
    step_s = float(np.median(np.diff(ends[SETTLE - 1 :])))
    settle = max(SETTLE, min(queued, int(seconds / max(step_s, 1e-9)), len(ends) // 3))
    mean_s = float(ends[-1] - ends[settle - 1]) / (len(ends) - settle)
    steps = max(5, int(seconds / max(mean_s, 1e-9)))
    if 0 < epoch <= steps:
        steps -= steps % epoch
        return Span(settle=settle, last=min(settle + steps, len(ends)))  # queues run off at its end
    each = batches_of_a_step(recording)
    last = min(settle + steps, len(ends))
    # An epoch that is emptied of what lay ready is over sooner.
    most = max(last, epoch // each - queued) if epoch else _MOST_STEPS
    return Span(settle=settle, last=last, empty_at=(settle - 1) * each, most=most)


def batches_of_a_step(recording: Recording) -> int:
    """More than one where gradients are accumulated."""
    rank = max(recording.ranks, key=lambda one: len(one.steps.end))
    steps = rank.spans.step[(rank.spans.kind == KINDS.index("data")) & (rank.spans.step >= 0)]
    counts = np.unique(steps, return_counts=True)[1]
    return max(1, int(np.median(counts))) if len(counts) else 1


def refusals(recording: Recording) -> tuple[str, ...]:
    events = (one for rank in recording.ranks for one in rank.events if one.what == REFUSED)
    return tuple(dict.fromkeys(one.text for one in events))


def failure_of(recording: Recording) -> str:
    """The exception that a run died of, or its end."""
    events = [one for rank in recording.ranks for one in rank.events if one.what == "exception"]
    return _one_line(events[-1].text if events else recording.ended)


def _one_line(text: str) -> str:
    """A worker's exception carries its traceback: the line before it, and the one that says what it was."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " … ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))[:_TEXT]


def _failure(recording: Recording, folder: Path, window: StepWindow, code: int) -> str:
    if window.gave_up == "slower":
        return SLOWER
    if window.gave_up == "silent":
        return "no step ended any more: it was stopped"
    if window.interrupted:
        return "interrupted"
    done = len(step_ends(recording))
    said = failure_of(recording) if code else "the program ended"
    return (
        f"{said} (after {counted(done, 'step')})" if done else f"{said or last_words(folder / 'output.log')}"
    )
