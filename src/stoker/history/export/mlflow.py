"""MLflow's file store, written by hand: folders of small text files.

An experiment for each title, a run for each entry: figures are metrics, machine and commit are tags.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from stoker.history.figures import Entry
from stoker.storage import new_file

_FINISHED, _FAILED = 3, 4  # as mlflow numbers them


def write_mlflow(entries: Sequence[Entry], folder: Path) -> list[Path]:
    """Written again, the same run is the same folder."""
    written = []
    for title in sorted({one.title for one in entries}):
        number = str(int(hashlib.sha256(title.encode()).hexdigest()[:15], 16))
        home = folder / number
        _meta(
            home,
            {"experiment_id": number, "name": title, "artifact_location": "", "lifecycle_stage": "active"},
        )
        written += [_run(home, number, one) for one in entries if one.title == title]
    return written


def _run(home: Path, experiment: str, entry: Entry) -> Path:
    run = hashlib.md5(entry.id.encode(), usedforsecurity=False).hexdigest()
    at = int(entry.at * 1000)
    failed = entry.facts.get("ended", "exit 0") != "exit 0"
    _meta(
        home / run,
        {
            "artifact_uri": "", "end_time": at + int(1000 * float(entry.facts.get("wall_s", 0))),
            "entry_point_name": "", "experiment_id": experiment, "lifecycle_stage": "active", "run_id": run,
            "run_name": f"{entry.kind} {entry.origin.commit[:7]}".strip(), "run_uuid": run, "source_name": "",
            "source_type": 4, "source_version": "", "start_time": at,
            "status": _FAILED if failed else _FINISHED, "tags": [], "user_id": "",
        },
    )  # fmt: skip
    for folder in ("metrics", "params", "tags"):
        (home / run / folder).mkdir(exist_ok=True)
    for figure in entry.figures:
        _put(home / run / "metrics" / _safe(figure.name), f"{at} {figure.value!r} 0\n")
    tags = {"machine": entry.origin.machine, "mlflow.source.git.commit": entry.origin.commit,
            "mlflow.runName": entry.title, "command": " ".join(entry.command)}  # fmt: skip
    for name, value in tags.items():
        _put(home / run / "tags" / name, value)
    return home / run


def _meta(folder: Path, facts: Mapping[str, object]) -> None:
    """YAML that is also JSON, line by line."""
    folder.mkdir(parents=True, exist_ok=True)
    _put(folder / "meta.yaml", "".join(f"{name}: {json.dumps(value)}\n" for name, value in facts.items()))


def _put(path: Path, text: str) -> None:
    with new_file(path) as file:
        file.write(text.encode())


def _safe(name: str) -> str:
    """Names that mlflow takes: letters, digits, _ - . space and slash."""
    return re.sub(r"[^\w\-. /]+", "_", name).strip("/.") or "figure"
