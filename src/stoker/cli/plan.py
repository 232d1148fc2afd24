"""`stoker plan`: what a job needs, before it runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.values import given_path
from stoker.formats.sizes import say_binary, say_size

if TYPE_CHECKING:
    from stoker.plan.arithmetic import Plan
    from stoker.plan.scene import Cluster, Course


def _flags(function: Callable[..., None]) -> Callable[..., None]:
    """A flag for each thing a job has."""
    from stoker.plan.job import FIELDS

    for name, field in reversed(FIELDS.items()):
        kind, help = field.metadata["kind"], field.metadata["help"]
        default = f"  [default: {as_written(kind, field.default)}]" if field.default else ""
        flag = click.option(
            f"--{name.replace('_', '-')}",
            name,
            metavar=kind.upper(),
            help=f"{help[0].upper()}{help[1:]}.{default}",
        )
        function = flag(function)
    return function


def as_written(kind: str, value: Any) -> str:  # of any kind a job has
    """A value as one would write it on the command line."""
    if kind == "bytes":
        return say_binary(value).replace(" ", "")
    if kind == "rate":
        return f"{say_size(value)}/s".replace(" ", "")
    if kind == "number" and value >= 1e12:
        return f"{value / 1e12:g}T"
    return str(value) if isinstance(value, str) else f"{value:g}"


@click.command()
@click.argument("job", required=False, type=given_path(dir_okay=False))
@click.option(
    "--measured",
    multiple=True,
    type=given_path(exists=True),
    metavar="PATH",
    help="A recorded run, or a benchmark's result: replaces what the job guesses.",
)
@click.option("--simulate", is_flag=True, help="Play the first epochs through, under several policies.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON, for doctor and deploy.")
@click.option("--html", type=given_path(dir_okay=False), metavar="FILE", help="Write a page.")
@_flags
def command(
    job: Path | None,
    measured: tuple[Path, ...],
    simulate: bool,
    as_json: bool,
    html: Path | None,
    **given: Any,
) -> None:
    """Size a JOB: bandwidth, memory, cache, checkpoints, waiting.

    \b
    stoker plan job.yaml --simulate
    stoker plan --nodes 9 --read-rate 200MB/s --dataset 20TB --store-rate 10GB/s --nvme 3.5TB

    JOB is a YAML or JSON file with the same names as the flags, which count more. Bytes are written 3.1MB or
    2TiB, times 500ms or 2h, numbers 8B.
    """
    from stoker.plan.arithmetic import make_plan
    from stoker.plan.job import read_job
    from stoker.plan.measured import read_measured
    from stoker.plan.text import say_plan

    found = [read_measured(path) for path in measured]
    seen = {name: value for one in found for name, value in one.values.items()}
    machines = {name: value for one in found for name, value in one.machines.items()}
    said = {name: value for name, value in given.items() if value is not None}
    plan = make_plan(read_job(job, unless_said=machines, **{**seen, **said}))
    courses = _courses(plan) if simulate else []
    if html:
        html.write_text(_page(plan, courses), "utf-8")
    if as_json:
        sources = [one.source for one in found]
        facts = {**plan.as_plain(), "measured": sources, "courses": [course.as_plain() for course in courses]}
        click.echo(json.dumps(facts, indent=1))
    else:
        click.echo(say_plan(plan, courses))


def _courses(plan: Plan) -> list[Course]:
    from stoker.plan.scene import cluster_of
    from stoker.plan.simulate import play, usual_policies

    cluster = cluster_of(plan)
    return [play(cluster, policy) for policy in usual_policies(cluster)]


def _page(plan: Plan, courses: list[Course]) -> str:
    from stoker.plan.page import plan_page
    from stoker.plan.simulate import sweep

    if not courses:
        return plan_page(plan)
    cluster = courses[0].cluster
    counts = _counts(cluster)
    return plan_page(plan, courses, [sweep(cluster, course.policy, counts) for course in courses])


def _counts(cluster: Cluster) -> list[int]:
    """Powers of ten up to ten jobs like this, and the job itself."""
    powers = {10**power for power in range(6) if 10**power <= max(1000, 10 * cluster.nodes)}
    return sorted(powers | {cluster.nodes})
