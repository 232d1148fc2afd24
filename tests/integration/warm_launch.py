"""Starts ranks that are forked from a process which has imported their packages already (warm_ranks.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Warm:
    """A process to fork from."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @contextmanager
    def ranks(self, size: int, script: Path, *arguments: object, log: Path) -> Iterator[list[int]]:
        """So many ranks of a script while the block runs; after it their exit codes."""
        job = {"size": size, "script": str(script), "arguments": list(map(str, arguments)), "log": str(log)}
        codes: list[int] = []
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(job), file=self._process.stdin, flush=True)
        yield codes
        codes += json.loads(self._process.stdout.readline())

    def run(self, size: int, script: Path, *arguments: object, log: Path) -> None:
        """So many ranks of a script, to a good end."""
        with self.ranks(size, script, *arguments, log=log) as codes:
            pass
        assert codes == [0] * size, log.read_text()[-3000:]


@contextmanager
def warm(*packages: str, environ: dict[str, str]) -> Iterator[Warm]:
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("warm_ranks.py")), *packages],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield Warm(process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # and the ranks that a failed test has left
