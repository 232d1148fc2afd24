"""A watched run as an entry: the figures that `diagnose` and the report show."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from stoker.diagnose.rules import diagnose
from stoker.diagnose.timeline import STATES
from stoker.errors import UnreadableError
from stoker.formats.sizes import counted
from stoker.history.figures import HIGHER, LOWER, NEITHER, Entry, Figure, Origin
from stoker.history.goodput.account import account
from stoker.history.goodput.attempts import read_attempts
from stoker.history.origin import machine_kind, read_origin
from stoker.history.record import entry_id
from stoker.recording import Recording
from stoker.report.summary import Summary, summarise
from stoker.watch.runs import read_recording
from stoker.watch.runs.files import node_name, read_meta

_LOST = ("data", "copy", "checkpoint", "startup", "stalled", "unattributed")  # states that less of is better


def read_run(folder: Path, *, title: str = "", code: Path | None = None) -> Entry | None:
    """A run folder that is over; None of one that still runs. `code` is where it ran, if that is here."""
    recording = read_recording(folder)
    if recording.ended == "running":
        return None
    verdict = diagnose(recording)
    summary = summarise(recording, verdict.findings)
    attempts = read_attempts(folder, recording)
    figures = (*run_figures(summary), *_goodput(account(attempts).share("productive")))
    facts = {
        "ended": recording.ended,
        "verdict": [one.kind for one in verdict.findings],
        "wall_s": recording.wall_s,
        "steps": summary.steps.count,
        "job": attempts[0].job if attempts else "",
    }
    return Entry(
        id=run_id(folder),
        kind="watch",
        title=title or recording.title,
        at=float(recording.facts.get("started", 0.0)),
        told=time.time(),
        origin=_origin(recording, code),
        figures=figures,
        command=() if title else tuple(map(str, recording.facts.get("argv", ()))),
        run=str(folder.absolute()) if folder.is_dir() else str(folder),
        facts=facts,
    )


def run_id(folder: Path) -> str:
    """Of the run itself, wherever its folder lies: who began it, when."""
    metas = [meta for path in sorted(folder.glob("node-*.json")) if (meta := read_meta(path))]
    if not metas:
        if folder.is_dir():
            raise UnreadableError(f"{folder} holds no run", hint="give a folder that `stoker watch` named")
        return entry_id("flat", folder.name, folder.stat().st_size)
    first = min(metas, key=lambda meta: float(meta.get("began", math.inf)))
    return entry_id("run", first.get("node"), first.get("pid"), first.get("began"))


def run_figures(summary: Summary) -> tuple[Figure, ...]:
    """What is kept of a run; what was not seen is left out."""
    return tuple(one for one in _figures(summary) if one is not None)


def _figures(summary: Summary) -> Iterator[Figure | None]:
    steps = summary.steps
    yield _known("steps/s", 1 / steps.median_s if steps.median_s > 0 else math.nan, "steps/s", HIGHER)
    yield _known("step time", steps.median_s, "s", LOWER)
    yield _known("step time p95", steps.p95_s, "s", LOWER)
    yield _known("tokens/s", steps.tokens_per_s, "tokens/s", HIGHER)
    yield _known("mfu", summary.mfu, "ratio", HIGHER)
    if summary.wall_s > 0 and summary.ranks:
        for state, spent in zip(STATES, summary.state_s, strict=True):
            better = LOWER if state in _LOST else NEITHER
            yield _known(f"share of wall: {state}", spent / summary.wall_s, "ratio", better)


def _known(name: str, value: float, unit: str, better: str) -> Figure | None:
    return Figure(name=name, value=value, unit=unit, better=better) if math.isfinite(value) else None


def _goodput(share: float) -> list[Figure]:
    return [one for one in (_known("goodput", share, "ratio", HIGHER),) if one]


def _origin(recording: Recording, code: Path | None) -> Origin:
    """Of the machine that ran: this one where the run has just ended here, else as its folder tells."""
    gpus = tuple(gpu.name for gpu in recording.gpus)
    versions = {name: str(recording.facts[name]) for name in ("torch", "python") if recording.facts.get(name)}
    if code is not None:
        here = read_origin(gpus=gpus, code=code)
        return replace(here, machine=_of_job(here.machine, recording), versions={**here.versions, **versions})
    host = recording.hosts[0].node if recording.hosts else ""
    cores = max((one.cpus for one in recording.hosts), default=0)
    # the folder knows less of its machine than the machine does: where it is this one, that is asked
    machine = read_origin(gpus=gpus).machine if host == node_name() else machine_kind(cores, 0, gpus)
    return Origin(machine=_of_job(machine, recording), host=host, gpus=gpus, versions=versions)


def _of_job(machine: str, recording: Recording) -> str:
    """Ranks and nodes are part of what must be alike."""
    nodes, ranks = len({host.node for host in recording.hosts}), len(recording.ranks)
    if nodes <= 1 and ranks <= 1:
        return machine
    return f"{machine}, {counted(ranks, 'rank')} on {counted(max(1, nodes), 'node')}"
