"""Offline files of Weights & Biases, which only its own package writes: the extra `wandb`.

A run for each entry, in a project for each title, grouped by machine; `wandb sync OUT/wandb/offline-run-*`
sends them, when and if somebody runs it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import wandb

from stoker.history.figures import Entry

_LONGEST = 100  # characters of a project's name that its server takes


def write_wandb(entries: Sequence[Entry], folder: Path) -> list[Path]:
    """Nothing of this process or this machine is told, and nothing is sent: offline mode has no key."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_run(entry, folder) for entry in entries]


def _run(entry: Entry, folder: Path) -> Path:
    origin = entry.origin
    with tempfile.TemporaryDirectory() as home:  # its caches and settings: those of the user are not read
        run = wandb.init(
            project=project_of(entry.title),
            id=entry.id,
            name=f"{entry.kind} {origin.commit[:7]}".strip(),
            group=_cut(origin.machine),
            job_type=entry.kind,
            dir=folder,
            mode="offline",
            config={
                "machine": origin.machine, "gpus": list(origin.gpus), "commit": origin.commit,
                "branch": origin.branch, "dirty": origin.dirty, "command": " ".join(entry.command),
                "at": entry.at, **{f"version/{name}": value for name, value in origin.versions.items()},
            },
            settings=_settings(home),
        )  # fmt: skip
        place = Path(run.dir).parent
        try:
            run.log(metrics_of(entry), step=0)
        finally:
            failed = entry.facts.get("ended", "exit 0") != "exit 0"
            run.finish(exit_code=int(failed))
    return place


def project_of(title: str) -> str:
    """Names that its server takes: no slashes, no question marks and the like."""
    return re.sub(r"[/\\#?%:]+", "_", title)[:_LONGEST].strip() or "stoker"


def metrics_of(entry: Entry) -> Mapping[str, float]:
    """Under their names; the time is that of the run, not of the export."""
    return {**{one.name: one.value for one in entry.figures}, "_timestamp": entry.at}


def _settings(home: str) -> wandb.Settings:
    return wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        save_code=False,
        x_disable_meta=True,
        x_disable_stats=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
        host="stoker",
        settings_system=str(Path(home, "settings")),
    )


def _cut(text: str) -> str:
    return text[:_LONGEST]
