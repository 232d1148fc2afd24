"""Loader benchmark of a program: its own DataLoader, iterated alone, without a change to its code.

A first window of the program says which loader feeds its loop and what a step takes beside waiting. Then the
program is started once for each number of workers; where it asks for its first batch, its loader is emptied
by itself (watch/inside/alone.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.bench.figures import Bench, Figure, say_seconds
from stoker.bench.program import Program, program_of
from stoker.diagnose.features import features
from stoker.errors import StokerError
from stoker.formats.sizes import counted
from stoker.machine.allowed import usable_cores
from stoker.recording import Recording
from stoker.watch.command import name_of
from stoker.watch.inside.alone import PREFIX, Asked
from stoker.watch.runs.files import read_meta
from stoker.watch.window import AnswerWindow, Window

_PATIENCE_S = 60.0  # beyond the start that was seen, and what is asked for
Said = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Feeding:
    """The loader that feeds the loop, and the loop."""

    number: int
    ranks: int
    workers: int
    site: dict[str, Any]
    iterable: bool
    step_s: float  # without its wait for batches
    start_s: float  # before the first step


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    """All ranks together, with so many workers each."""

    workers: int
    batch_s: float  # of one rank
    first_s: float
    samples_s: float
    tokens_s: float
    bytes_s: float
    cpu_batch_s: float
    memory_bytes: float
    cores: float
    epochs: int


def bench_own_loader(
    command: Sequence[str],
    *,
    seconds: float = 3.0,
    most_batches: int = 0,
    step_s: float = 0.0,
    said: Said = lambda name, done, of: None,
) -> Bench:
    """A program's loader with no workers, as many as it has, and more."""
    with program_of(command) as program:
        said("a first window of the program", 0, 0)
        window = Window(program.folder / "first", seconds=max(2.0, seconds))
        window.grace_s = 10.0
        program.run("first", window)
        feeding = read_feeding(program.read("first"))
        step_s = step_s or feeding.step_s
        counts = worker_counts(feeding.workers, cores=max(1, usable_cores() // feeding.ranks))
        done: list[Alone] = []
        failed: list[str] = []
        for number, count in enumerate(counts):
            said(f"num_workers={count}", number, len(counts))
            asked = Asked(number=feeding.number, seconds=seconds, most_batches=most_batches)
            try:
                done.append(_alone(program, feeding, asked, workers=count))
            except StokerError as error:
                failed.append(f"num_workers={count}: {error}")
    return _bench(command, feeding, done, failed, step_s=step_s)


def worker_counts(given: int, *, cores: int) -> list[int]:
    """None, those of the program, and more: the cores, or twice as many as given. Two at least: workers that
    wait for a store need no core."""
    return sorted({0, given, max(cores, 2 * given, 2)})


def read_feeding(recording: Recording) -> Feeding:
    loader = recording.facts.get("loader") or {}
    number, built = loader.get("number"), recording.facts.get("loaders") or []
    if number is None or not 0 <= number < len(built):
        raise StokerError(
            "no DataLoader was seen to feed the training loop",
            hint="`stoker watch` says what the loop waits for",
        )
    loop = features(recording).loop
    own = built[number]
    ends = [rank.steps.end[0] for rank in recording.ranks if len(rank.steps.end)]
    return Feeding(
        number=number,
        ranks=max(1, len(recording.ranks)),
        workers=int(own["settings"].get("num_workers") or 0),
        site={name: own[name] for name in ("file", "line", "text")},
        iterable=bool(own.get("iterable")),
        step_s=max(0.0, loop.median_s * (1 - loop.share["data"])) if loop.median_s == loop.median_s else 0.0,
        start_s=float(max(ends, default=0.0)),
    )


def _alone(program: Program, feeding: Feeding, asked: Asked, *, workers: int) -> Alone:
    name = f"workers-{workers}"
    window = AnswerWindow(
        program.folder / name,
        name=f"{PREFIX}*.json",
        answers=feeding.ranks,
        patience_s=2 * (feeding.start_s + asked.seconds) + _PATIENCE_S,
    )
    # As it is built, the program's own number needs no knob: it may be set in ways that a knob would undo.
    knobs = {} if workers == feeding.workers else {"num_workers": workers}
    program.run(name, window, knobs=knobs, site=feeding.site, environ=asked.environ)
    answers = [read_meta(path) for path in sorted((program.folder / name).glob(f"{PREFIX}*.json"))]
    failures = [one["failure"] for one in answers if "failure" in one]
    if failures or len(answers) < feeding.ranks:
        why = failures[0].splitlines()[0] if failures else program.tail(name) or "the program ended"
        raise StokerError(f"no batches came: {why}")
    if any(one["workers"] != workers or not one["batches"] for one in answers):
        raise StokerError("the loader did not take this number of workers, or gave no batch in time")
    return _together(answers)


def _together(answers: list[dict[str, Any]]) -> Alone:
    """Rates add up over the ranks; a batch takes what it takes the slowest."""

    def rate(name: str) -> float:
        return float(sum(one[name] / one["seconds"] for one in answers))

    return Alone(
        workers=answers[0]["workers"],
        batch_s=max(one["seconds"] / one["batches"] for one in answers),
        first_s=max(one["first_s"] for one in answers),
        samples_s=rate("samples"),
        tokens_s=rate("tokens"),
        bytes_s=rate("bytes"),
        cpu_batch_s=max(one["cpu_s"] / one["batches"] for one in answers),
        memory_bytes=sum(one["memory_bytes"] for one in answers),
        cores=rate("cpu_s"),
        epochs=max(one["epochs"] for one in answers),
    )


def _bench(
    command: Sequence[str], feeding: Feeding, done: list[Alone], failed: list[str], *, step_s: float
) -> Bench:
    if not done:
        raise StokerError(f"the loader gave nothing by itself: {'; '.join(failed)}")
    given = next((one for one in done if one.workers == feeding.workers), done[0])
    ranks = f", {counted(feeding.ranks, 'rank')}" if feeding.ranks > 1 else ""
    return Bench(
        verb="loader",
        of=f"{name_of(command)}{ranks}, its own DataLoader",
        figures=[figure for one in done for figure in _figures(one, feeding, step_s)],
        advice=_advice(done, given, step_s) + _remarks(feeding, done),
        passed=not step_s or given.batch_s <= step_s,
        notes=failed,
    )


def _figures(one: Alone, feeding: Feeding, step_s: float) -> list[Figure]:
    name = f"num_workers={one.workers}"
    beside = {
        "a_batch_s": one.batch_s,
        "cpu_a_batch_s": one.cpu_batch_s,
        "data_bytes_s": one.bytes_s,
        "memory_bytes": one.memory_bytes,
        **({"of_a_step_share": one.batch_s / step_s} if step_s else {}),
    }
    busy = one.cores >= 0.9 * min(feeding.ranks * max(1, one.workers), usable_cores())
    limit = "the processor" if busy else "storage, or what samples wait for"
    rates = [("samples", one.samples_s)] + ([("tokens", one.tokens_s)] if one.tokens_s else [])
    found = [
        Figure(
            name=f"{what}, {name}",
            value=value,
            unit="1/s",
            limit=limit if what == "samples" else "",
            beside=beside if what == "samples" else {},
        )
        for what, value in rates
    ]
    return [*found, Figure(name=f"first batch, {name}", value=one.first_s, unit="s", better="less")]


def _advice(done: list[Alone], given: Alone, step_s: float) -> list[str]:
    """Against what a step eats. Alone a loader has all cores: beside a loop on the processor it has fewer."""
    best = min(done, key=lambda one: (round(one.batch_s, 6), one.workers))
    if not step_s:
        return [f"a step longer than {say_seconds(best.batch_s)} never waits; say yours with --step"]
    takes = f"a step takes {say_seconds(step_s)} without its wait, a batch {say_seconds(given.batch_s)}"
    if given.batch_s <= step_s:
        return [f"{takes}: with num_workers={given.workers}, as it is, the loop need not wait"]
    if best.batch_s <= step_s:
        return [f"{takes}; num_workers={best.workers} one in {say_seconds(best.batch_s)}: try `stoker tune`"]
    wait = 1 - step_s / best.batch_s
    return [
        f"{takes}; with num_workers={best.workers}, {say_seconds(best.batch_s)}, the loop waits {wait:.0%}",
        "prepare more offline (`stoker prepare`), or read from a faster disk (`stoker bench path`)",
    ]


def _remarks(feeding: Feeding, done: list[Alone]) -> list[str]:
    said = []
    if feeding.iterable:
        said.append("an IterableDataset: with other workers its samples may come twice; rates are of batches")
    if any(one.epochs for one in done):
        said.append("epochs began anew within the window: their start is in the rates")
    return said
