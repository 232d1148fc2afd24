"""What the tests of launchers share: a corpus of several tasks, a filter that makes trouble on demand."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import stoker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FILES = 5  # each of FILE_BYTES, which is enough to be a map task of its own
FILE_BYTES = 3_200_000
MARK = "and then the boiler burst"  # stands in one document, of the file that MARKED_TASK reads
MARKED_TASK = 3

# Meets the marked document only, so that one task has trouble and the others none. The paths are in the
# source, not in the environment: what a scheduler passes on is not what these tests are about.
_FILTER = """\
import os, signal, time
from pathlib import Path

MARK, FLAG, STARTED = {mark!r}, Path({flag!r}), Path({started!r})

def fail(text):
    if MARK in text and FLAG.exists():
        raise RuntimeError("the flag is up")
    return True

def block(text):
    if MARK in text:
        STARTED.write_text(str(os.getpid()))
        while FLAG.exists():
            time.sleep(0.02)
    return True

def die_once(text):
    if MARK in text and FLAG.exists():
        FLAG.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return True
"""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A folder to work in; runs `stoker prepare` there."""

    folder: Path
    corpus: Path
    tokenizer: Path

    @property
    def flag(self) -> Path:
        """While this file exists, the filter makes trouble."""
        return self.folder / "flag"

    @property
    def started(self) -> Path:
        """Holds the process id of the task that blocks."""
        return self.folder / "started"

    def command(self, out: str, *options: str) -> list[str]:
        fixed = ["--tokenizer", str(self.tokenizer), "--shard-size", "4MiB", "--out", out]
        return [sys.executable, "-m", "stoker.cli", "prepare", str(self.corpus), *fixed, *options]

    def environment(self, outer: dict[str, str]) -> dict[str, str]:
        source = Path(stoker.__file__).parents[1]
        return {**outer, "PYTHONPATH": f"{source}{os.pathsep}{self.folder}"}

    def run(
        self, out: str, *options: str, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return self.run_python(*self.command(out, *options)[1:], environment=environment or dict(os.environ))

    def run_python(self, *arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment(environment),
            capture_output=True,
            text=True,
            timeout=150,
        )

    @contextmanager
    def started_run(
        self, out: str, *options: str, environment: dict[str, str]
    ) -> Iterator[subprocess.Popen[bytes]]:
        """The same without waiting; what it says goes to `OUT.err`. Killed if still there at the end."""
        with (self.folder / f"{out}.err").open("wb") as said:
            process = subprocess.Popen(
                self.command(out, *options),
                cwd=self.folder,
                env=self.environment(environment),
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def said(self, out: str) -> str:
        return (self.folder / f"{out}.err").read_text()

    def done(self, out: str) -> int:
        """How many map tasks are done."""
        return len(list((self.folder / out).glob(".stoker-*/done/map-*.json")))

    def dataset(self, out: str) -> dict[str, bytes]:
        """The files that a reader of the dataset sees."""
        return {path.name: path.read_bytes() for path in (self.folder / out).iterdir() if path.name[0] != "."}

    def made_here(self, *options: str) -> dict[str, bytes]:
        """The same dataset, made by processes of this machine; once for all tests that ask for it; those with
        filters have their own."""
        said = "".join(Path(option).name for option in options)
        home = self.folder / "reference" if "--filter" in options else self.corpus
        out = home.with_name(f"{home.name}-made-here{said}")
        if not (out / "manifest.json").exists():
            done = self.run(str(out), *options)
            assert done.returncode == 0, done.stderr
        return self.dataset(str(out))


def write_corpus(folder: Path) -> Path:
    """Documents that are all different, one of them marked."""
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghijklmnop", k=chance.randint(2, 9))) for _ in range(3000)]
    for number in range(FILES):
        with (folder / f"part-{number}.jsonl").open("w") as file:
            file.write(json.dumps({"text": MARK if number == MARKED_TASK else "no mark"}) + "\n")
            while file.tell() < FILE_BYTES:
                file.write(json.dumps({"text": " ".join(chance.choices(words, k=500))}) + "\n")
    return folder


def make_bench(folder: Path, *, corpus: Path, tokenizer: Path) -> Bench:
    """Write the filter."""
    bench = Bench(folder=folder, corpus=corpus, tokenizer=tokenizer)
    source = _FILTER.format(mark=MARK, flag=str(bench.flag), started=str(bench.started))
    (folder / "trouble.py").write_text(source)
    return bench


def wait_until(condition: Callable[[], bool], what: str, *, seconds: float = 90.0) -> None:
    """Return once the condition holds; fail the test if it does not within the time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain until {what}"
        time.sleep(0.05)
