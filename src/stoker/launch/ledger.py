"""What is done: one marker file per finished task, bound to the plan and to the files it made.

    FOLDER/plan.json                  what is being made
    FOLDER/done/STAGE-00012.json      the marker: plan digest, files with size and xxh3, the result
    FOLDER/failed/STAGE-00012.txt     why the last try failed; gone once a try succeeds
    FOLDER/logs/STAGE-00012.log       what the task said

A marker counts only if it names this plan and every file it lists still has its size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stoker.manifest import FileRecord
from stoker.storage import new_file


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """The done, failed and logged tasks of one plan."""

    folder: Path
    plan: str

    def result(self, stage: str, number: int) -> dict[str, Any] | None:
        """What a finished task reported, or None if it must (still, or again) be run."""
        try:
            marker = json.loads(self._path("done", stage, number, "json").read_bytes())
        except (OSError, ValueError):
            return None
        if marker.get("plan") != self.plan or not all(map(self._is_whole, marker["files"])):
            return None
        result: dict[str, Any] = marker["result"]
        return result

    def complete(
        self, stage: str, number: int, *, result: dict[str, Any], files: Sequence[FileRecord] = ()
    ) -> None:
        """Mark a task done. Call it last: its files must be in place under their names."""
        marker = {"plan": self.plan, "files": [asdict(file) for file in files], "result": result}
        with new_file(self._path("done", stage, number, "json")) as file:
            file.write(json.dumps(marker).encode())
        with suppress(FileNotFoundError):
            self._path("failed", stage, number, "txt").unlink()

    def fail(self, stage: str, number: int, reason: str) -> None:
        with new_file(self._path("failed", stage, number, "txt")) as file:
            file.write(reason.encode())

    def failure(self, stage: str, number: int) -> str:
        """Why the last try failed, or nothing."""
        try:
            return self._path("failed", stage, number, "txt").read_text()
        except FileNotFoundError:
            return ""

    def missing(self, stage: str, count: int) -> list[int]:
        return [number for number in range(count) if self.result(stage, number) is None]

    def log(self, stage: str, number: int) -> Path:
        return self._path("logs", stage, number, "log")

    def _path(self, kind: str, stage: str, number: int, suffix: str) -> Path:
        return self.folder / kind / f"{stage}-{number:05d}.{suffix}"

    def _is_whole(self, record: dict[str, Any]) -> bool:
        try:
            return bool((self.folder / record["name"]).stat().st_size == record["bytes"])
        except OSError:
            return False
