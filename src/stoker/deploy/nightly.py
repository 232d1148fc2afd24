"""A nightly run: a fixed job and a check of its figures, by scrontab, a CronJob or a workflow. Pure."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from stoker.deploy.kubernetes import Object, literal
from stoker.deploy.slurm import Files
from stoker.deploy.write import filled
from stoker.errors import UsageError
from stoker.plan.documents import dump_yaml

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?").fullmatch
_AT = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)").fullmatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Nightly:
    """What is run every night, and where its figures are kept: on a disk that is there the night after."""

    command: tuple[str, ...]
    name: str = "nightly"
    at: str = "02:30"
    shared: str = "/shared/nightly"  # runs and the history lie in it
    folder: str = "."  # where the command is run
    also: tuple[str, ...] = ()  # commands of a shell, after the job: benchmarks
    gpus: int = 1
    time_limit: str = "01:00:00"
    partition: str = ""
    image: str = ""
    namespace: str = "default"
    claim: str = "shared"

    def __post_init__(self) -> None:
        if not self.command:
            raise UsageError(
                "there is no command to run every night", hint="give it after --: -- python train.py"
            )
        if not _NAME(self.name):
            raise UsageError(f"{self.name!r} cannot be a name", hint="use small letters, digits and -")
        if not _AT(self.at):
            raise UsageError(f"{self.at!r} is no time of day", hint="as 02:30")
        for text in (self.shared, self.folder, self.partition, self.time_limit):
            if "\n" in text:
                raise UsageError(f"{text!r} has a line break in it", hint="give it in one line")

    @property
    def cron(self) -> str:
        hour, minute = self.at.split(":")
        return f"{int(minute)} {int(hour)} * * *"


def script(one: Nightly) -> str:
    """What every kind of cluster runs."""
    return filled(
        "nightly.sh",
        store=shlex.quote(f"{one.shared}/history.db"),
        folder=shlex.quote(one.folder),
        title=one.name,
        runs=_in_double_quotes(f"{one.shared}/runs"),
        command=shlex.join(one.command),
        also="".join(f"{line} || code=$((code ? code : 1))\n" for line in one.also),
    )


def slurm_nightly(one: Nightly) -> Files:
    """The script, and the lines for `scrontab -e`: options above, then when and what."""
    options = [
        f"--job-name={one.name}",
        f"--time={one.time_limit}",
        f"--output={one.shared}/{one.name}-%j.log",
    ]
    options += [f"--gpus={one.gpus}"] if one.gpus else []
    options += [f"--partition={one.partition}"] if one.partition else []
    lines = [*(f"#SCRON {option}" for option in options), f"{one.cron} {shlex.quote(one.shared)}/nightly.sh"]
    return {"nightly.sh": script(one), "scrontab": "\n".join(lines) + "\n"}


def kubernetes_nightly(one: Nightly) -> Files:
    """A CronJob, one pod at a time; a night that failed is not tried again before the next."""
    if not one.image:
        raise UsageError("a CronJob runs an image", hint="give --image")
    limits = {"nvidia.com/gpu": str(one.gpus)} if one.gpus else {}
    container: Object = {
        "name": "nightly",
        "image": one.image,
        "command": ["/bin/bash", "-c", literal(script(one))],
        "volumeMounts": [{"name": "shared", "mountPath": one.shared}],
        **({"resources": {"limits": limits}} if limits else {}),
    }
    pod = {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": one.claim}}],
    }
    job = {"backoffLimit": 0, "activeDeadlineSeconds": _seconds(one.time_limit), "template": {"spec": pod}}
    spec = {"schedule": one.cron, "concurrencyPolicy": "Forbid", "jobTemplate": {"spec": job}}
    metadata = {"name": one.name, "namespace": one.namespace}
    made: Object = {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": metadata, "spec": spec}
    return {"nightly.yaml": dump_yaml([made])}


def github_nightly(one: Nightly) -> Files:
    """A workflow for a runner of one's own: its disk keeps the history."""
    steps: list[Object] = [
        {"uses": "actions/checkout@v4"},
        {"name": "nightly", "run": "bash .github/nightly.sh"},
        {
            "name": "page",
            "if": "always()",
            "run": "stoker history show --html history.html",
            "env": {"STOKER_HISTORY": f"{one.shared}/history.db"},
        },
        {
            "if": "always()",
            "uses": "actions/upload-artifact@v4",
            "with": {"name": "history", "path": "history.html"},
        },
    ]
    job = {"runs-on": ["self-hosted"], "timeout-minutes": -(-_seconds(one.time_limit) // 60), "steps": steps}
    flow: Object = {
        "name": one.name,
        "on": {"schedule": [{"cron": one.cron}], "workflow_dispatch": {}},
        "concurrency": one.name,
        "jobs": {"nightly": job},
    }
    return {".github/workflows/nightly.yml": dump_yaml([flow]), ".github/nightly.sh": script(one)}


def _seconds(limit: str) -> int:
    """Slurm's way to say a time: D-HH:MM:SS, HH:MM:SS, MM:SS or minutes."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if not found:
        raise UsageError(f"{limit!r} is no time limit", hint="as 01:00:00")
    days, *parts = (int(part) if part else None for part in found.groups())
    given = [part for part in parts if part is not None]
    if len(given) == 3 or days is not None:
        hours, minutes, seconds = [*given, 0, 0][:3]
    else:
        hours, minutes, seconds = 0, *[*given, 0][:2]
    return ((days or 0) * 24 + hours) * 3600 + minutes * 60 + seconds


def _in_double_quotes(word: str) -> str:
    return re.sub(r'([\\"$`])', r"\\\1", word)
