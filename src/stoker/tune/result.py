"""What `stoker tune` says: one record for the terminal, `--json`, `tuned.json` and the history."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker import __version__
from stoker.formats.sizes import counted
from stoker.redact import redact_args
from stoker.storage import new_file
from stoker.tune.candidates import NUMERICS, Setting, not_tried
from stoker.tune.edit import Edit, in_words
from stoker.tune.gain import ENOUGH, LOSSES
from stoker.tune.search import Outcome, Tried
from stoker.tune.seen import Seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """The end of a search, and what to do about it."""

    command: Sequence[str]
    seen: Seen
    outcome: Outcome
    steps: int
    plain_s: float  # what those steps take unchanged
    seconds: float  # of all trials
    folder: Path
    edit: Edit | None = None

    @property
    def better(self) -> bool:
        return bool(self.outcome.best)

    @property
    def verdict(self) -> str:
        found = self.seen.findings
        return found[0].summary if found else "no verdict: too little was seen"

    def settings_file(self) -> dict[str, Any]:
        """`tuned.json`: what `stoker watch --apply` and `stoker.apply` read."""
        gain = self.outcome.gain
        return {
            "stoker": __version__,
            "command": redact_args(self.command),
            "knobs": dict(self.outcome.best),
            "site": self.seen.site,
            "gain": gain.as_dict() if gain else None,
            "losses": self.outcome.losses,
        }

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.settings_file(),
            "better": self.better,
            "why": self.outcome.why,
            "verdict": self.verdict,
            "findings": [one.as_dict() for one in self.seen.findings],
            "step_s": self.plain_s / max(1, self.steps),
            "steps": self.steps,
            "seconds": self.seconds,
            "tried": [one.as_dict() for one in self.outcome.tried],
            "trials": [one.as_dict() for one in self.outcome.trials],
            "not_tried": not_tried(self.seen),
            "diff": self.edit.diff if self.edit else "",
            "by_hand": in_words(self.seen.site, self.outcome.best),
            "folder": str(self.folder),
        }


def write_settings(tuned: Tuned) -> Path:
    path = tuned.folder / "tuned.json"
    with new_file(path) as file:
        file.write(json.dumps(tuned.settings_file(), indent=1).encode() + b"\n")
    return path


def as_lines(tuned: Tuned) -> list[str]:
    """The table of a terminal, and what to set."""
    outcome = tuned.outcome
    step_ms = 1e3 * tuned.plain_s / max(1, tuned.steps)
    lines = [
        f"tune · {step_ms:.3g} ms a step, {counted(tuned.steps, 'step')} a window, "
        f"{counted(len(outcome.trials), 'trial')}",
        "",
    ]
    lines += [f"  {tuned.verdict}", ""]
    lines += _table(outcome.tried)
    lines += [f"  - {line}" for line in not_tried(tuned.seen)]
    if not tuned.better:
        return [*lines, "", _nothing(outcome), *_remedy(tuned.seen)]
    lines += ["", f"{outcome.gain} as fast with {say(outcome.best)}", f"  {LOSSES[outcome.losses]}"]
    lines += [f"  this changes results: {name}" for name in NUMERICS if outcome.best.get(name)]
    return [*lines, "", *_what_to_do(tuned)]


def _nothing(outcome: Outcome) -> str:
    """That a search had no time is not that there is nothing."""
    if outcome.why and ((outcome.gain and outcome.gain.pairs < ENOUGH) or not outcome.tried):
        return f"nothing proven: {outcome.why}"
    return f"nothing better found: {outcome.why}" if outcome.why else "nothing better found"


def say(setting: Setting) -> str:
    return ", ".join(f"{name}={value}" for name, value in setting.items()) or "the program unchanged"


def _table(tried: Sequence[Tried]) -> list[str]:
    rows = [(say(one.setting), f"{one.times:.2f}×" if one.times else "–", _note(one)) for one in tried]
    width = max((len(name) for name, *_ in rows), default=0)
    return [f"  {name:{width}}  {times:>6}  {note}".rstrip() for name, times, note in rows]


def _note(one: Tried) -> str:
    """A trial that failed is a finding."""
    return one.note or (LOSSES[one.losses] if one.losses == "differ" else "")


def _what_to_do(tuned: Tuned) -> list[str]:
    """The diff, then what it does not hold."""
    edited = tuned.edit.diff.splitlines() if tuned.edit else []
    by_hand = in_words(tuned.seen.site, tuned.outcome.best)
    if edited:
        by_hand = [line for line in by_hand if not line.startswith(("DataLoader(", "TrainingArguments("))]
    place = f"{tuned.seen.site['file']}:{tuned.seen.site['line']}" if tuned.seen.site else ""
    said = [f"at {place}"] if place and not edited else []
    said += [
        f"this replaces {one}: what sets it now does nothing any more; set it there, if you can"
        for one in (tuned.edit.replaced if tuned.edit else ())
    ]
    return [*edited, *said, *(f"set {line}" for line in by_hand)]


def _remedy(seen: Seen) -> list[str]:
    """What the verdict advises where no knob helps."""
    return [f"  - {line}" for one in seen.findings[:1] for line in one.remedy]
