"""The user's program, run for a while: what `bench loader -- COMMAND` and `bench scaling` measure.

As in a trial of `stoker tune` it is ended after what is measured, its output goes to a file, and it may not
overwrite what lay there before.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.errors import BadInputError, StokerError, UsageError
from stoker.recording import Recording
from stoker.watch import runs
from stoker.watch.command import Options, make_private, watch
from stoker.watch.inject import not_attachable
from stoker.watch.inside.guard import REFUSED
from stoker.watch.said import last_words
from stoker.watch.window import Window, end_all


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A command, and the folder for its runs."""

    command: Sequence[str]
    folder: Path
    began: float = field(default_factory=time.time)

    def run(
        self,
        name: str,
        window: Window,
        *,
        knobs: Mapping[str, Any] | None = None,
        site: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        command: Sequence[str] = (),
    ) -> None:
        """Run it until the window is over. Ctrl-C ends it and us."""
        folder = self.folder / name
        make_private(folder)
        told = folder / "knobs.json"
        told.write_text(
            json.dumps({"knobs": dict(knobs or {}), "site": dict(site or {}), "trial": self.began})
        )
        options = Options(
            folder=folder,
            hz=2.0,
            apply=told,
            output=folder / "output.log",
            environ={"WANDB_MODE": "disabled", **(environ or {})},
        )
        try:
            watch(command or self.command, options, window=window)
        finally:
            end_all(folder)
        if window.interrupted:
            raise KeyboardInterrupt

    def read(self, name: str) -> Recording:
        """What was recorded; where there is nothing, an error that says how the program ended."""
        try:
            recording = runs.read_recording(self.folder / name)
        except BadInputError:
            raise StokerError(
                f"no training step was seen: {self.tail(name) or 'the program did not start'}",
                hint="run it under `stoker watch`: does it train?",
            ) from None
        events = (one for rank in recording.ranks for one in rank.events if one.what == REFUSED)
        if refused := next(events, None):
            raise UsageError(
                f"the program would overwrite {refused.text}, which lay there before",
                hint="let it write elsewhere while it is measured",
            )
        if recording.ended.startswith("exit ") and recording.ended != "exit 0" and not _steps(recording):
            said = self.tail(name) or "it wrote nothing"
            raise StokerError(
                f"the program failed before its first step ({recording.ended.partition(':')[0]}): {said}",
                hint="let it run by itself first",
            )
        return recording

    def tail(self, name: str) -> str:
        return last_words(self.folder / name / "output.log")


def _steps(recording: Recording) -> int:
    return sum(len(rank.steps.end) for rank in recording.ranks)


@contextmanager
def program_of(command: Sequence[str]) -> Iterator[Program]:
    """Its runs lie in a folder that is gone afterwards."""
    if why := not_attachable(command):
        raise UsageError(
            f"nothing can be seen of this program: {why}", hint="leave -I and -E out to measure it"
        )
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as place:
        yield Program(command=command, folder=Path(place))
