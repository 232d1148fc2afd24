"""`stoker history`: figures over time, compared, checked, exported; goodput over a job's whole life."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.groups import Group
from stoker.cli.values import json_option
from stoker.errors import UsageError, require
from stoker.formats.sizes import counted

if TYPE_CHECKING:
    from stoker.history.figures import Entry
    from stoker.history.goodput.attempts import Attempt
    from stoker.history.series import Regression, Series

_PATH = click.Path(path_type=Path)


def _store_option(function: Callable[..., None]) -> Callable[..., None]:
    said = "The history.  [default: $STOKER_HISTORY, else .stoker/history.db beside the runs here]"
    return click.option("--store", type=_PATH, help=said)(function)


@click.group(cls=Group, invoke_without_command=True)
@_store_option
@click.option("--all", "everything", is_flag=True, help="List every run, not the newest 20.")
@json_option
@click.pass_context
def command(ctx: click.Context, store: Path | None, everything: bool, as_json: bool) -> None:
    """Show how figures change over time; nothing leaves the machine.

    \b
    stoker history                        the newest runs
    stoker history show steps/s           a figure over time, its changes marked
    stoker history check --fail           exit 1 where something became worse
    stoker history compare main..branch   a branch beside what it left
    stoker history goodput JOB            a job's life, and what each restart cost

    `stoker watch` records its runs here; `import` brings in what is there already.
    """
    if ctx.invoked_subcommand is not None:
        return
    from stoker.history.export.feed import entry_facts
    from stoker.history.plot import entry_lines

    entries = _entries(store)
    if as_json:
        click.echo(json.dumps([entry_facts(one) for one in entries], indent=1))
        return
    _say(entry_lines(entries, most=len(entries) if everything else 20))


@command.command(name="import")
@_store_option
@click.argument("runs", metavar="RUN…", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
def import_(store: Path | None, runs: tuple[Path, ...]) -> None:
    """Bring in runs that are there already.

    RUN is a folder of `stoker watch`, a folder of such folders, or a file of benchmarks/results. The same
    run again is the same entry.
    """
    from stoker.history.results import read_results
    from stoker.history.runs import read_run
    from stoker.history.store import find_store, write_entries

    entries: list[Entry] = []
    for path in runs:
        if path.suffix == ".json" and path.is_file():
            entries += read_results(path)
            continue
        for folder in _run_folders(path):
            entry = read_run(folder)
            if entry is None:
                click.echo(f"{folder} still runs: left out", err=True)
            else:
                entries.append(entry)
    if entries:
        place = store or find_store()
        write_entries(place, entries)
        click.echo(f"{counted(len(entries), 'run')} in {place}")


@command.command()
@_store_option
@click.argument("figure", default="*")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a page instead.")
@click.option("--clean", is_flag=True, help="Only runs of committed code.")
@json_option
def show(store: Path | None, figure: str, html: Path | None, clean: bool, as_json: bool) -> None:
    """Show FIGURE over time, its changes marked.

    FIGURE is a name, a part of one, or a pattern as steps*.
    """
    from stoker.history.page import write_page
    from stoker.history.plot import series_lines
    from stoker.history.series import all_series, regressions

    entries = _entries(store)
    some = all_series(entries, pattern=figure, dirty=not clean)
    if not some:
        names = sorted({one.name for entry in entries for one in entry.figures})
        raise UsageError(f"no figure fits {figure!r}", hint=f"there are: {', '.join(names[:12]) or 'none'}")
    if html:
        title = "History" if figure == "*" else f"History of {figure}"
        write_page(some, html, bad=regressions(some), title=title)
        click.echo(html)
    elif as_json:
        click.echo(json.dumps([_series_facts(one) for one in some], indent=1))
    else:
        for number, one in enumerate(some):
            _say(["", *series_lines(one)] if number else series_lines(one))


@command.command()
@_store_option
@click.argument("figure", default="*")
@click.option("--fail", is_flag=True, help="Exit 1 where something became worse.")
@click.option("--recent", type=click.IntRange(min=1), default=10, show_default=True, help="Runs looked at.")
@click.option("--clean", is_flag=True, help="Only runs of committed code.")
@json_option
@click.pass_context
def check(
    ctx: click.Context, store: Path | None, figure: str, fail: bool, recent: int, clean: bool, as_json: bool
) -> None:
    """Say which figures became worse in the newest runs.

    By change points: a level that moved by more than the noise of its own series explains, on one kind of
    machine; no threshold. Fewer than 8 runs say nothing.
    """
    from stoker.history.plot import commit_of, day, moved, said
    from stoker.history.series import ENOUGH, all_series, regressions

    some = all_series(_entries(store), pattern=figure, dirty=not clean)
    bad = regressions(some, recent=recent)
    young = sum(len(one.points) < ENOUGH for one in some)
    if as_json:
        click.echo(
            json.dumps({"checked": len(some) - young, "young": young, "worse": _bad_facts(bad)}, indent=1)
        )
    else:
        for one in bad:
            unit = one.series.unit
            _say([
                f"worse: {one.series.title}: {one.series.name} {said(one.change.before, unit)} → "
                f"{said(one.change.after, unit)} ({moved(one.change.before, one.change.after)}, "
                f"chance {one.change.chance:.1g})",
                f"  since {day(one.first.at)}, commit {commit_of(one.first)}; last good "
                f"{commit_of(one.last_good)}; {one.series.machine}",
            ])  # fmt: skip
        few = f"; {counted(young, 'figure')} with fewer than {ENOUGH} runs not judged" if young else ""
        click.echo(f"{counted(len(some) - young, 'figure')} checked, {len(bad)} worse{few}")
    ctx.exit(1 if fail and bad else 0)


@command.command()
@_store_option
@click.argument("sides", metavar="MAIN..BRANCH")
@click.argument("figure", default="*")
@json_option
@click.pass_context
def compare(ctx: click.Context, store: Path | None, sides: str, figure: str, as_json: bool) -> None:
    """Compare a branch's runs with those of what it left.

    Exit code 1 where a figure is worse.
    """
    from stoker.history.compare import compare as compare_sides
    from stoker.history.plot import moved, said

    rows = compare_sides(_entries(store), sides, repository=Path.cwd(), pattern=figure)
    if as_json:
        facts = [
            {"figure": row.series.name, "case": row.series.case, "machine": row.series.machine,
             "before": row.before, "after": row.after, "ratio": None if math.isnan(row.ratio) else row.ratio,
             "verdict": row.verdict}
            for row in rows
        ]  # fmt: skip
        click.echo(json.dumps(facts, indent=1))
    else:
        import statistics

        for row in rows:
            before, after = (statistics.median(side) for side in (row.before, row.after))
            _say([
                f"{row.verdict}: {row.series.title}: {row.series.name} {said(before, row.series.unit)} → "
                f"{said(after, row.series.unit)} ({moved(before, after)}; {len(row.before)} and "
                f"{counted(len(row.after), 'run')})"
            ])  # fmt: skip
        if not rows:
            click.echo("no figure was measured on both sides on the same kind of machine")
    ctx.exit(1 if any(row.verdict == "worse" for row in rows) else 0)


@command.command()
@_store_option
@click.argument("job", required=False)
@click.option(
    "--runs", type=click.Path(path_type=Path, exists=True), help="Folder of run folders to look in."
)
@json_option
def goodput(store: Path | None, job: str | None, runs: Path | None, as_json: bool) -> None:
    """Say where the wall time of JOB's whole life went, restarts and all.

    JOB is a Slurm job's number, $STOKER_JOB, a checkpoint folder, or a run folder of it; without it jobs are
    listed. Runs of one job id, or with one checkpoint folder, are one story.
    """
    from dataclasses import asdict

    from stoker.history.goodput.account import account
    from stoker.history.goodput.attempts import same_job
    from stoker.history.goodput.lines import goodput_lines, name_of

    jobs = same_job(_attempts(store, runs))
    if job is None:
        for one in jobs:
            _say([f"{name_of(one)}: {counted(len(one), 'run')}"])
        return
    found = [one for one in jobs if _is_job(one, job)]
    if not found:
        known = ", ".join(name_of(one) for one in jobs[-8:])
        raise UsageError(f"no run of a job {job!r} is here", hint=f"there are: {known or 'none'}")
    for one in found:
        told = account(one)
        if as_json:
            click.echo(
                json.dumps({"job": name_of(one), "runs": [a.run for a in one], **asdict(told)}, indent=1)
            )
        else:
            _say(goodput_lines(one, told))


@command.command()
@_store_option
@click.argument("form", metavar="json|tensorboard|mlflow|wandb|sqlite",
                type=click.Choice(["json", "tensorboard", "mlflow", "wandb", "sqlite"]))  # fmt: skip
@click.argument("out", type=_PATH)
def export(store: Path | None, form: str, out: Path) -> None:
    """Write the history for other programs.

    Into the folder OUT; json and sqlite into a file of that name. What wandb writes are its offline runs:
    nothing is sent.
    """
    from stoker.history.export.feed import write_feed
    from stoker.history.export.mlflow import write_mlflow
    from stoker.history.export.tensorboard import write_tensorboard
    from stoker.history.store import write_single

    write: dict[str, Callable[[Any, Path], object]] = {
        "json": write_feed,
        "tensorboard": write_tensorboard,
        "mlflow": write_mlflow,
        "sqlite": lambda entries, path: write_single(path, entries),
    }
    writer = _wandb_writer() if form == "wandb" else write[form]
    writer(_entries(store), out)
    click.echo(out)


def _wandb_writer() -> Callable[[Any, Path], object]:
    # Read at its import: it would send reports of its errors, and looks their host up also without any.
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    require("wandb", extra="wandb")
    from stoker.history.export.wandb import write_wandb

    return write_wandb


# --- what they share ------------------------------------------------------------------------------


def _say(lines: Iterable[str], *, err: bool = False) -> None:
    """Titles and names are other people's text: theirs are no line breaks and no terminal's codes."""
    from stoker.doctor.examine import shown

    click.echo("\n".join(map(shown, lines)), err=err)


def _entries(store: Path | None) -> list[Entry]:
    """Everything in the store, oldest first; what is damaged is said on stderr."""
    from contextlib import suppress

    from stoker.errors import StokerError
    from stoker.history.store import LOOSE, compact, find_store, read_store

    place = store or (click.get_current_context().parent or click.get_current_context()).params.get("store")
    place = place or find_store()
    if not place.is_dir():
        raise UsageError(
            f"there is no history at {place}",
            hint="`stoker watch` records its runs; `stoker history import RUN…` brings in others",
        )
    found = read_store(place)
    for line in found.damaged:
        _say([f"stoker: left out, the rest is read: {line}"], err=True)
    if len(list(place.glob("*.db"))) > LOOSE:
        with suppress(OSError, StokerError):  # somebody else's store may be read and not written
            compact(place)
    return list(found.entries)


def _run_folders(path: Path) -> list[Path]:
    """The run folder itself, or those in it."""
    if not path.is_dir() or any(path.glob("node-*.json")):
        return [path]
    found = sorted({one.parent for one in path.glob("*/node-*.json")})
    if not found:
        raise UsageError(
            f"{path} holds no run", hint="give a folder that `stoker watch` wrote, or one of them"
        )
    return found


def _attempts(store: Path | None, runs: Path | None) -> list[Attempt]:
    """Of all run folders that can be read: those named, or those that the history knows."""
    from stoker.errors import StokerError
    from stoker.history.goodput.attempts import read_attempts
    from stoker.watch.runs import read_recording

    if runs is not None:
        folders = _run_folders(runs)
    else:
        known = {Path(one.run) for one in _entries(store) if one.kind == "watch" and one.run}
        folders = sorted(one for one in known if one.is_dir())
    found: list[Attempt] = []
    for folder in folders:
        try:
            found += read_attempts(folder, read_recording(folder))
        except (StokerError, OSError, ValueError, KeyError) as error:
            _say([f"stoker: left out: {folder}: {error}"], err=True)
    return found


def _is_job(attempts: list[Attempt], job: str) -> bool:
    names = {one.job for one in attempts} | {name for one in attempts for name in one.checkpoints}
    names |= {one.run for one in attempts} | {Path(one.run).name for one in attempts}
    names |= {
        name.partition(" ")[2] for name in names if name.startswith(("slurm ", "torchrun ", "kubernetes "))
    }
    return job in names - {""} or str(Path(job).absolute()) in names


def _series_facts(one: Series) -> dict[str, Any]:
    middle, low, high = one.spread()
    points = [
        {"at": e.at, "value": f.value, "commit": e.origin.commit, "dirty": e.origin.dirty, "run": e.run}
        for e, f in zip(one.entries, one.points, strict=True)
    ]
    changes = [
        {"index": c.index, "before": c.before, "after": c.after, "chance": c.chance, "worse": one.is_worse(c)}
        for c in one.changes
    ]
    return {
        "figure": one.name, "case": one.case, "machine": one.machine, "unit": one.unit, "better": one.better,
        "median": middle, "low": low, "high": high, "points": points, "changes": changes,
    }  # fmt: skip


def _bad_facts(bad: list[Regression]) -> list[dict[str, Any]]:
    return [
        {"figure": one.series.name, "case": one.series.case, "machine": one.series.machine,
         "before": one.change.before, "after": one.change.after, "chance": one.change.chance,
         "first_bad": one.first.origin.commit, "last_good": one.last_good.origin.commit,
         "since": one.first.at}
        for one in bad
    ]  # fmt: skip
