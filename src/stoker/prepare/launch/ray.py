"""Ray tasks, on a cluster that runs already or on one started here for the session.

Ray tries a task again when its worker or its node dies. Tasks meet in the work folder, so every node of
the cluster must mount it under the same path.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.errors import StokerError, TaskError, require
from stoker.prepare.launch.ledger import Ledger
from stoker.prepare.launch.worker import load_entry, run_task

_RETRIES = 3  # after the first try, for workers and nodes that die; a task that fails is not repeated
_CANCEL_S = 10.0
_ANSWER_S = 5.0
_JOIN_HINT = (
    "check --ray-address (as HOST:6379); the cluster must run our versions of Ray and Python, "
    "and if it asks for a token, set RAY_AUTH_MODE=token here"
)

LOCAL = "local"  # Ray's word for a cluster of this machine alone, started by ray.init


class RayCluster:
    """A connection to a Ray cluster; close() leaves it, which ends what is under way."""

    def __init__(self, *, entry: str, address: str = "", at_once: int = 0) -> None:
        self._entry, self._at_once = entry, at_once
        # Any: ray has a home here only, and its types are as optional as itself.
        self._ray: Any = require("ray", extra="ray")
        self._joined_before = self._ray.is_initialized()
        if not self._joined_before:
            self._join(address)

    def run(self, ledger: Ledger, stage: str, numbers: Sequence[int], on_done: Callable[[int], None]) -> None:
        """Run the tasks; each that ends, well or not, is passed to `on_done`."""
        remote = self._ray.remote(num_cpus=1, max_retries=_RETRIES)(_run_there)
        call = _Call(entry=self._entry, ledger=ledger, stage=stage, directory=Path.cwd())
        ledger.forget_failures(stage, numbers)
        todo = deque(numbers)
        running: dict[Any, int] = {}
        try:
            while todo or running:
                while todo and (not self._at_once or len(running) < self._at_once):
                    number = todo.popleft()
                    running[remote.remote(call, number)] = number
                for ended in self._ray.wait(list(running))[0]:
                    self._settle(ended, ledger, stage, running[ended])
                    on_done(running.pop(ended))
        finally:
            self._take_back(list(running))

    def close(self) -> None:
        """Leave the cluster; one that was started here ends with it."""
        if not self._joined_before:
            self._ray.shutdown()

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join(self, address: str) -> None:
        chosen = choose_address(address)
        options = {"log_to_driver": False, "logging_level": logging.ERROR}
        if chosen == LOCAL:
            options["include_dashboard"] = False
            for name, value in _private_settings().items():
                os.environ.setdefault(name, value)
        try:
            self._ray.init(chosen, **options)
        except (ConnectionError, RuntimeError, ValueError, self._ray.exceptions.RayError) as error:
            raise StokerError(
                f"cannot join the Ray cluster {chosen or 'of this machine'}: {error}", hint=_JOIN_HINT
            ) from error

    def _settle(self, ended: Any, ledger: Ledger, stage: str, number: int) -> None:
        """Write down why a task could not be run; one that ran has written its own story."""
        try:
            stranger = self._ray.get(ended)
        except self._ray.exceptions.RayError as error:
            ledger.fail(stage, number, TaskError(f"Ray could not run it: {self._reason(error)}"))
            return
        if stranger:
            raise StokerError(
                f"the Ray node {stranger} does not see {ledger.folder}",
                hint="name a folder that every node mounts under the same path with --work",
            )

    def _reason(self, error: Exception) -> str:
        """Ray's sentence comes first, unless an error of the worker's own ends a printed trace."""
        lines = str(error).strip().splitlines() or [""]
        own = isinstance(error, self._ray.exceptions.RayTaskError)
        return f"{type(error).__name__}: {lines[-1 if own else 0]}"

    def _take_back(self, running: list[Any]) -> None:
        """Nothing may go on writing once we are gone. Leaving the cluster ends our workers, so cancelling
        is for a connection that stays; and never by force, which aborts the whole process when a task
        ends at that moment (seen with Ray 2.60: "Tried to complete task that was not pending")."""
        if self._joined_before and running:
            for each in running:
                self._ray.cancel(each)
            self._ray.wait(running, num_returns=len(running), timeout=_CANCEL_S)


def choose_address(address: str) -> str | None:
    """The cluster to join: the one named, here or in RAY_ADDRESS; None, which means the one that `ray
    start` left a note of on this machine, if it is still there; else a new one. Ray would choose the
    same, but it knocks for a quarter of an hour on the door of a cluster that is gone."""
    named = address or os.environ.get("RAY_ADDRESS", "")
    if named and not _answers(named):
        raise StokerError(f"no Ray cluster answers at {named}", hint=_JOIN_HINT)
    if named:
        return named
    noted = _noted_address()
    # Not by its address: only to a cluster it found by itself does Ray show the token of this machine.
    return None if noted and _answers(noted) else LOCAL


def _private_settings() -> dict[str, str]:
    """For a cluster that lives as long as we do: it reports to nobody, and its token is not kept. Left
    to itself Ray would write one into the home folder, and from then on ask for it on every cluster."""
    return {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _noted_address() -> str:
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        return (Path(folder) / "ray" / "ray_current_cluster").read_text().strip()
    except OSError:
        return ""


def _answers(address: str) -> bool:
    """Whether someone listens at HOST:PORT; names that only Ray understands (auto, local) pass."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator or not port.isdigit():
        return True
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except OSError:
        return False
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """What all tasks of a stage share."""

    entry: str
    ledger: Ledger
    stage: str
    directory: Path


def _run_there(call: _Call, number: int) -> str:
    """Run a task in a Ray worker; returns the name of a node that does not see the work folder."""
    if not call.ledger.folder.is_dir():
        return socket.gethostname()
    with suppress(OSError):  # a worker starts elsewhere, and the paths of sources may be relative
        os.chdir(call.directory)
    run_task(load_entry(call.entry), call.ledger, call.stage, number)
    return ""
