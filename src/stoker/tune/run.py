"""`stoker tune`: a first window, its verdict, trials of what that points at, and the proof."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stoker.errors import StokerError, UsageError
from stoker.formats.sizes import counted
from stoker.tune.candidates import Setting, most_workers
from stoker.tune.edit import edit_for
from stoker.tune.result import Tuned, say, write_settings
from stoker.tune.search import Outcome, Search
from stoker.tune.seen import Seen, read_seen
from stoker.tune.trial import (
    Bench,
    Span,
    Trial,
    failure_of,
    plan_span,
    refusals,
    step_ends,
    window_seconds,
)  # fmt: skip
from stoker.watch.command import make_private
from stoker.watch.inject import not_attachable
from stoker.watch.inside.guard import REFUSAL
from stoker.watch.said import last_words

_TRIALS = 14  # that should fit into the time: two stages of candidates, and three to five pairs
_SHORTEST_S, _LONGEST_S = 1.5, 10.0  # of a window: shorter ones are noise, longer ones waste

Said = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How long, where, and what may be tried."""

    folder: Path
    minutes: float = 3.0
    numerics: bool = False
    overwrite: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)


def tune(command: Sequence[str], options: Options, *, said: Said = lambda line: None) -> Tuned:
    """Find better settings for a job, and prove them. Where there are any, the folder gets `tuned.json`."""
    if why := not_attachable(command):
        raise UsageError(
            f"settings cannot reach this program: {why}", hint="leave -I and -E out for the trials"
        )
    began = time.monotonic()
    make_private(options.folder)
    bench = Bench(
        command=command, folder=options.folder, environ=options.environ, overwrite=options.overwrite
    )
    seconds = min(_LONGEST_S, options.minutes * 60 / 16)
    said(f"a first window of {seconds:.0f} s, unchanged")
    seen, span, plain, start_s = _first(bench, seconds=seconds, minutes=options.minutes)
    said(seen.findings[0].summary if seen.findings else "no verdict: too little was seen")
    until = began + 60 * options.minutes

    def run(setting: Setting, lost_s: float) -> Trial:
        if bench.interrupted:
            raise KeyboardInterrupt
        said(f"{time.monotonic() - began:.0f} s: {counted(span.steps, 'step')} with {say(setting)}")
        return bench.run(setting, span, lost_s=lost_s, usual_s=plain.seconds, start_s=start_s)

    each_s = start_s + plain.seconds * span.last / span.steps
    search = Search(run, seen, until=until, each_s=each_s, numerics=options.numerics)
    outcome = search.search(plain=plain)
    if bench.interrupted:
        raise KeyboardInterrupt
    return _tuned(command, options, seen, span, plain, outcome, time.monotonic() - began)


def _first(bench: Bench, *, seconds: float, minutes: float) -> tuple[Seen, Span, Trial, float]:
    """The verdict, the steps to measure, what they took, and the time before the first of them."""
    recording = bench.first(seconds=seconds)
    if bench.interrupted:
        raise KeyboardInterrupt
    log = bench.folder / "first" / "output.log"
    if refused := refusals(recording):
        raise UsageError(
            f"a trial would overwrite {refused[0]}, which lay there before",
            hint="let the program write elsewhere in trials, or allow it with --overwrite",
        )
    ranks = max(1, len(recording.ranks))
    seen = read_seen(recording, ranks=ranks)
    bench.site = seen.site
    ends = step_ends(recording)
    start_s = float(ends[0]) if len(ends) else 0.0
    spare = minutes * 60 - start_s - seconds
    window_s = min(_LONGEST_S, max(_SHORTEST_S, 0.7 * (spare / _TRIALS - start_s)))
    queued = most_workers(seen) * int(seen.settings.get("prefetch_factor") or 2) + 1
    span = plan_span(recording, queued=queued, epoch=seen.epoch, seconds=min(seconds, window_s))
    if span is None:
        told = f"{recording.ended} {failure_of(recording)}"
        hint = f"see {log}; --overwrite allows it" if REFUSAL in told else f"see {log}"
        said = failure_of(recording)
        if said == "exit 0":
            said = "the program ended"
        elif said.removeprefix("exit ").isdecimal():  # no hook was told why: then its last line
            said = f"{said}: {last_words(log) or 'it wrote nothing'}"
        raise StokerError(_too_short(said, len(ends)), hint=hint)
    plain = Trial(
        setting={}, seconds=window_seconds(recording, span), losses=tuple(recording.facts.get("losses") or ())
    )
    return seen, span, plain, start_s


def _too_short(said: str, steps: int) -> str:
    """Why there is nothing to compare."""
    if steps:
        return f"the program ended after {counted(steps, 'step')} ({said}): ten are the least to compare"
    return f"no training step was seen: {said or 'the program did not start'}"


def _tuned(
    command: Sequence[str],
    options: Options,
    seen: Seen,
    span: Span,
    plain: Trial,
    outcome: Outcome,
    seconds: float,
) -> Tuned:
    found = Tuned(
        command=command,
        seen=seen,
        outcome=outcome,
        steps=span.steps,
        plain_s=plain.seconds,
        seconds=seconds,
        folder=options.folder,
        edit=edit_for(seen.site, outcome.best) if outcome.best else None,
    )
    if found.better:
        write_settings(found)
    return found
