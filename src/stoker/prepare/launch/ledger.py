"""Completion markers: one file per finished task, bound to the plan and to the files it made.

    FOLDER/plan.json                  what is being made
    FOLDER/done/STAGE-00012.json      the marker: plan digest, files with size and xxh3, the result
    FOLDER/failed/STAGE-00012.json    why the last try failed; gone once a try succeeds
    FOLDER/logs/STAGE-00012.log       what the task said

A marker counts only if it names this plan and every file it lists still has its size.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stoker import errors
from stoker.errors import StokerError
from stoker.formats.checksums import hash_file
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
            self._path("failed", stage, number, "json").unlink()

    def fail(self, stage: str, number: int, error: StokerError) -> None:
        facts = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
        with new_file(self._path("failed", stage, number, "json")) as file:
            file.write(json.dumps(facts).encode())

    def failure(self, stage: str, number: int) -> StokerError | None:
        """Why the last try failed."""
        try:
            facts = json.loads(self._path("failed", stage, number, "json").read_bytes())
        except FileNotFoundError:
            return None
        error: StokerError = getattr(errors, facts["kind"])(facts["message"], hint=facts["hint"])
        return error

    def failures(self, stage: str, numbers: Collection[int]) -> dict[int, tuple[int, int]]:
        """Those that have failed, and what tells one failure of a task from a later one."""
        found = {}
        for number in self._listed("failed", stage).intersection(numbers):
            with suppress(FileNotFoundError):  # forgotten meanwhile: it is being tried again
                facts = self._path("failed", stage, number, "json").stat()
                found[number] = (facts.st_ino, facts.st_mtime_ns)
        return found

    def forget_failures(self, stage: str, numbers: Sequence[int]) -> None:
        """These are about to be tried again: what is written from now on is news."""
        for number in numbers:
            with suppress(FileNotFoundError):
                self._path("failed", stage, number, "json").unlink()

    def recheck(self, stage: str, numbers: Sequence[int]) -> list[int]:
        """Hash the files of finished tasks again and take the markers of damaged ones away: a machine
        that went down may have kept a file's size and lost its content. Returns the damaged tasks."""
        with ThreadPoolExecutor() as threads:  # reading and hashing release the GIL
            sound = threads.map(lambda number: self._is_sound(stage, number), numbers)
            damaged = [number for number, is_sound in zip(numbers, sound, strict=True) if not is_sound]
        for number in damaged:
            self._path("done", stage, number, "json").unlink(missing_ok=True)
        return damaged

    def missing(self, stage: str, count: int) -> list[int]:
        finished = self.finished(stage, range(count))
        return [number for number in range(count) if number not in finished]

    def finished(self, stage: str, numbers: Collection[int]) -> set[int]:
        """Those that are done."""
        listed = self._listed("done", stage)
        return {number for number in listed.intersection(numbers) if self.result(stage, number) is not None}

    def ended(self, stage: str, numbers: Collection[int]) -> set[int]:
        """Those that are done or have failed."""
        return self.finished(stage, numbers) | self._listed("failed", stage).intersection(numbers)

    def log(self, stage: str, number: int) -> Path:
        return self._path("logs", stage, number, "log")

    def _listed(self, kind: str, stage: str) -> set[int]:
        """The tasks that have a file of this kind. Listing makes a network filesystem look again, while
        an open() by name may be told for half a minute that a file made elsewhere is not there."""
        try:
            names = os.listdir(self.folder / kind)
        except FileNotFoundError:
            return set()
        found = (re.fullmatch(rf"{stage}-(\d+)\.\w+", name) for name in names)
        return {int(match[1]) for match in found if match}

    def _path(self, kind: str, stage: str, number: int, suffix: str) -> Path:
        return self.folder / kind / f"{stage}-{number:05d}.{suffix}"

    def _is_sound(self, stage: str, number: int) -> bool:
        try:
            marker = json.loads(self._path("done", stage, number, "json").read_bytes())
            return all(_digest(self.folder / file["name"]) == file["xxh3"] for file in marker["files"])
        except OSError:  # gone meanwhile, or a disk that cannot read it any more
            return False

    def _is_whole(self, record: dict[str, Any]) -> bool:
        try:
            return bool((self.folder / record["name"]).stat().st_size == record["bytes"])
        except OSError:
            return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hash_file(file).digest()
