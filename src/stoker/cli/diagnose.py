"""`stoker diagnose`: what is wrong with a run, what it costs, what to change."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.values import given_path
from stoker.formats.sizes import counted
from stoker.symptoms import page_of

if TYPE_CHECKING:
    from stoker.diagnose.compare import Comparison
    from stoker.diagnose.rules import Verdict
    from stoker.recording import Recording

_KEYS = (
    "kind", "cause", "share", "gpu_seconds", "speedup_if_gone", "at_most", "confidence", "evidence", "remedy",
    "missing",
)  # fmt: skip


@click.command()
@click.argument("runs", metavar="RUN [B]", nargs=-1, required=True, type=given_path(exists=True))
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
@click.pass_context
def command(ctx: click.Context, runs: tuple[Path, ...], as_json: bool) -> None:
    """Explain a run: why its GPUs wait, the price, what to change.

    RUN is a folder written by `stoker watch`, a flat recording (JSON lines), or a trace that torch's
    profiler exported (trace.json, trace.json.gz; several, or a folder of them: one a rank). With a second
    run, or a second trace of the same rank: what changed from RUN to B.

    Exit code 0: healthy, or B no slower; 1: something was found, or too little was seen; 2: a file that
    cannot be read.
    """
    from stoker.diagnose.rules import diagnose
    from stoker.watch.runs import read_job

    recordings = read_job(runs)
    if len(recordings) == 2:
        ctx.exit(_compare(*recordings, as_json=as_json))
    recording = recordings[0]
    verdict = diagnose(recording)
    if as_json:
        click.echo(json.dumps(plain(verdict) | _cards(recording), indent=1))
    else:
        show(recording, verdict)
    ctx.exit(0 if verdict.healthy else 1)


def plain(verdict: Verdict) -> dict[str, Any]:
    """The verdict as JSON gives it; a finding without a cause has null there."""
    findings = [
        {key: getattr(one, key) for key in _KEYS} | {"cause": one.cause or None} for one in verdict.findings
    ]
    pages = dict.fromkeys(page for one in verdict.findings if (page := page_of(one)))
    abstained = [asdict(one) for one in verdict.abstained]
    return {"findings": findings, "abstained": abstained, "pages": [*pages]}


def _cards(recording: Recording) -> dict[str, Any]:
    """What a profiler saw of the cards, rank by rank; nothing where none looked."""
    from stoker.diagnose.activity import worked

    looks = [(rank.rank, worked(look)) for rank in recording.ranks for look in rank.looks]
    return {"looks": [{"rank": rank, **asdict(one)} for rank, one in looks]} if looks else {}


# --- for people -----------------------------------------------------------------------------------


def show(recording: Recording, verdict: Verdict) -> None:
    """The run in a line, the verdict card of all surfaces, and where there is no verdict, why."""
    from stoker.report.card import show_card
    from stoker.report.summary import summarise
    from stoker.report.units import words

    click.echo(f"{recording.title}: {recording.wall_s:.1f} s, {_who(recording)}\n")
    show_card(summarise(recording, verdict.findings), sys.stdout)
    if not verdict.findings:
        reasons = [one for one in verdict.abstained if one.missing or one.kind == "healthy"]
        click.echo("\n".join(["", "why not", *(f"  - {words(one.kind)}: {one.why}" for one in reasons)]))


def _who(recording: Recording) -> str:
    steps = max((len(rank.steps.end) for rank in recording.ranks), default=0)
    names = sorted({gpu.name for gpu in recording.gpus if gpu.name})
    cards = f"{len(recording.gpus)} × {', '.join(names) or 'GPU'}" if recording.gpus else "no GPU readings"
    ended = f", {recording.ended}" if recording.ended else ""
    return f"{counted(steps, 'step')}, {counted(len(recording.ranks), 'rank')}, {cards}{ended}"


# --- two runs -------------------------------------------------------------------------------------


def _compare(run: Recording, other: Recording, *, as_json: bool) -> int:
    from stoker.diagnose.compare import compare

    found = compare(run, other)
    if as_json:
        click.echo(json.dumps({**asdict(found), "direction": found.direction}, indent=1))
    else:
        click.echo(_changes(found))
    return 1 if found.direction == "slower" or found.new else 0


def _changes(found: Comparison) -> str:
    low, high = found.interval
    mean, median = ([f"{1000 * seconds:.4g}" for seconds in pair] for pair in (found.mean_s, found.median_s))
    lines = [
        f"B is {found.direction}: a step takes {mean[0]} ms in A and {mean[1]} ms in B "
        f"(medians {median[0]} and {median[1]})",
        f"  {found.ratio:.3f} times as long, 95% between {low:.3f} and {high:.3f}; "
        f"p = {found.chance:.2g} that this is chance",
    ]
    for name, (before, after) in sorted(found.moved.items(), key=lambda item: item[1][0] - item[1][1]):
        lines.append(f"  {name:12} {1000 * before:9.4g} → {1000 * after:.4g} ms a step")
    lines += [f"  gone: {kind}" for kind in found.gone] + [f"  new: {kind}" for kind in found.new]
    return "\n".join(lines)
