"""What `stoker prepare` says when it is done."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from stoker.formats.sizes import counted

if TYPE_CHECKING:
    from stoker.manifest import Manifest
    from stoker.prepare.finish import Prepared
    from stoker.prepare.run import Submitted


def report_prepared(prepared: Prepared, *, as_json: bool) -> None:
    """Say what came of it."""
    statistics, manifest = prepared.statistics, prepared.manifest
    facts = {
        "dataset": prepared.url,
        **sizes(manifest),
        "stage_seconds": prepared.stage_seconds,
        "statistics": statistics.to_plain(),
    }
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    click.echo(facts_lines({"dataset": prepared.url, **sizes(manifest)}))
    for word, counts in (("dropped", statistics.dropped), ("skipped", statistics.bad)):
        for reason, count in sorted(counts.items()):
            click.echo(f"{word}  {counted(count, 'document')}: {reason}")


def report_submitted(submitted: Submitted, *, as_json: bool) -> None:
    """Say what is on its way."""
    from stoker.prepare.launch.slurm import merge_log

    ids = ",".join(job for jobs in submitted.jobs.values() for job in jobs)
    facts = {
        "dataset": submitted.url,
        "jobs": submitted.jobs,
        "look": f"squeue --job {ids}",
        "work": str(submitted.folder),
        "log": str(merge_log(submitted.folder)),
    }
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    jobs = ", then ".join(f"{stage} {' '.join(jobs)}" for stage, jobs in submitted.jobs.items())
    click.echo(facts_lines({**facts, "jobs": jobs}))


def sizes(manifest: Manifest) -> dict[str, Any]:
    """What a dataset comes to."""
    return {
        "shards": len(manifest.shards),
        "samples": manifest.samples,
        "tokens": manifest.tokens,
        "bytes": manifest.bytes,
    }


def facts_lines(facts: dict[str, Any]) -> str:
    """A fact a line."""
    return "\n".join(f"{k:8} {v:,}" if isinstance(v, int) else f"{k:8} {v}" for k, v in facts.items())
