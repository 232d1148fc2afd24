"""Job folder: a plan and the folder its tasks work in, who finds what where."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from stoker.errors import TaskError
from stoker.formats.sizes import counted
from stoker.manifest import FileRecord
from stoker.prepare.launch.ledger import Ledger
from stoker.prepare.plan import Plan, read_plan
from stoker.prepare.shuffle import Run
from stoker.prepare.tokens import Tokenizer
from stoker.prepare.writer import Shard
from stoker.storage import is_local, join_url, local_path, open_store

TOKENIZER_NAME = "tokenizer.json"


def again(number: int) -> str:
    """The side of documents that are taken for the so-manieth time more."""
    return f"+{number}"


@lru_cache(maxsize=1)  # a worker runs many tasks of one plan, and a large plan takes a while to read
def open_job(folder: Path) -> Job:
    return Job(plan=read_plan(folder), folder=folder)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A plan in its folder."""

    plan: Plan
    folder: Path

    @property
    def ledger(self) -> Ledger:
        return Ledger(folder=self.folder, plan=self.plan.digest)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer(**json.loads((self.folder / TOKENIZER_NAME).read_text("utf-8")))

    def results(self, stage: str) -> list[dict[str, Any]]:
        """What every task of an earlier stage reported; all must be done."""
        count = self.plan.stages.get(stage, 0)
        results = [self.ledger.result(stage, number) for number in range(count)]
        missing = [number for number, result in enumerate(results) if result is None]
        if missing:
            raise TaskError(
                f"{len(missing)} of {counted(count, f'{stage} task')} not done, the first is {missing[0]}",
                hint=f"see {self.ledger.log(stage, missing[0])}, then run the same command again",
            )
        return [result for result in results if result is not None]

    def runs(self, epoch: int, *sides: str) -> list[Run]:
        """Every spilled run of these sides, in the order of the sources."""
        runs, first, results = [], 0, self.results("map")
        for side in sides or ("",):
            for number, result in enumerate(results):
                row = 0
                for run in result["runs"].get(side, ()):
                    path = self.spill(number, side).with_name(
                        f"{self.spill(number, side).name}.e{epoch}.tokens"
                    )
                    runs.append(Run(path=path, row=row, first=first, **run))
                    row += run["documents"]
                    first += run["text_bytes" if self.plan.media else "tokens"]
        return runs

    def all_runs(self) -> list[Run]:
        """The runs of all documents, each once."""
        return self.runs(0, "", *(name for name, _ in self.plan.holdout))

    def trained_runs(self, epoch: int) -> list[Run]:
        """The runs of what is trained on, also those of documents that are taken again."""
        return self.runs(epoch, "", *(again(number) for number in range(1, self.plan.most_times)))

    def spill(self, number: int, side: str = "") -> Path:
        return self.folder / "spill" / f"map-{number:05d}{side and '-'}{side}"

    def listing(self, source: int) -> Path:
        """What a folder of media holds (media/sources/listing.py)."""
        return self.folder / "listings" / f"{source:05d}"

    def drops(self, stage: str, number: int) -> Path:
        return self.folder / "drops" / f"{stage}-{number:05d}.u64"

    @property
    def bands(self) -> int:
        return self.plan.sketch.bands if self.plan.sketch else 0

    @property
    def target(self) -> Path:
        """Where shards are written: on the output's filesystem, but out of sight until all are there."""
        if is_local(self.plan.out):
            return local_path(self.plan.out).resolve() / f".stoker-{self.plan.digest[:16]}" / "shards"
        return self.folder / "upload"

    def deliver(self, shards: list[Shard], folder: str = "") -> list[FileRecord]:
        """Upload shards bound for an object store; returns the files that stay here."""
        files = [file for shard in shards for file in shard.record.files]
        target = self.target / folder
        if is_local(self.plan.out):
            return [replace(file, name=os.path.relpath(target / file.name, self.folder)) for file in files]
        store = open_store(join_url(self.plan.out, folder) if folder else self.plan.out)
        for file in files:
            store.write(file.name, target / file.name)
            (target / file.name).unlink()
        return []
