"""Process checkpoint (CUDA): suspend a whole GPU process and bring it back, through the driver's own calls.

Suspended, a process keeps its host memory, to which the driver moved what was on the card; the card is free
for another job. With an image, CRIU (where it is installed) writes the process itself to disk too.

    running ─lock─▶ locked ─checkpoint─▶ checkpointed ─restore─▶ locked ─unlock─▶ running
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.errors import CheckpointError, MissingPackageError, UsageError, require

_STATES = {0: "running", 1: "locked", 2: "suspended", 3: "failed"}  # CUprocessState
_LOCK_TIMEOUT_MS = 60_000
_OLDEST_DRIVER = 12080  # CUDA 12.8, driver 570: the first with all four calls


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspended:
    """How a process was left."""

    pid: int
    state: str
    seconds: float
    image: str = ""


def suspend(pid: int, *, image: Path | None = None, driver: Any = None) -> Suspended:
    """Free the GPU memory of a process; what it held waits in host memory, or in a CRIU image."""
    started = time.monotonic()
    calls = _Driver(driver)
    _check_process(pid)
    criu = _criu() if image else ""
    state = calls.state(pid)
    if state == "suspended":
        raise UsageError(f"process {pid} is suspended already", hint=f"stoker checkpoint resume {pid}")
    if state == "running":
        calls.lock(pid)
    try:
        calls.checkpoint(pid)
    except CheckpointError:
        calls.unlock(pid)  # it goes on as if nothing had been
        raise
    if image:
        try:
            _dump(criu, pid, image)
        except CheckpointError:
            calls.restore(pid)
            calls.unlock(pid)
            raise
    return Suspended(
        pid=pid, state="suspended", seconds=time.monotonic() - started, image=str(image) if image else ""
    )


def resume(pid: int, *, image: Path | None = None, driver: Any = None) -> Suspended:
    """Bring a suspended process back onto its GPU."""
    started = time.monotonic()
    calls = _Driver(driver)
    if image:
        _undump(_criu(), image)
    _check_process(pid)
    state = calls.state(pid)
    if state == "running":
        raise UsageError(f"process {pid} is not suspended", hint=f"stoker checkpoint suspend {pid}")
    if state == "suspended":
        calls.restore(pid)
    calls.unlock(pid)
    return Suspended(pid=pid, state="running", seconds=time.monotonic() - started)


class _Driver:
    """The process calls of the CUDA driver, through NVIDIA's own bindings."""

    def __init__(self, bindings: Any = None) -> None:
        self._cuda = bindings or _bindings()
        missing = [
            name
            for name in ("Lock", "Checkpoint", "Restore", "Unlock", "GetState")
            if not hasattr(self._cuda, f"cuCheckpointProcess{name}")
        ]
        if missing:
            raise CheckpointError(
                "these CUDA bindings are too old to suspend a process",
                hint="pip install 'cuda-bindings>=12.8'",
            )
        self._check("cuInit", self._cuda.cuInit(0))
        (version,) = self._check("cuDriverGetVersion", self._cuda.cuDriverGetVersion())
        if int(version) < _OLDEST_DRIVER:
            raise CheckpointError(
                f"the CUDA driver supports CUDA {int(version) // 1000}.{int(version) % 1000 // 10}, "
                "which cannot suspend a process",
                hint="install driver 570 or newer",
            )

    def state(self, pid: int) -> str:
        (state,) = self._check("cuCheckpointProcessGetState", self._cuda.cuCheckpointProcessGetState(pid))
        return _STATES.get(int(state), "failed")

    def lock(self, pid: int) -> None:
        options = self._cuda.CUcheckpointLockArgs()
        options.timeoutMs = _LOCK_TIMEOUT_MS
        self._check("cuCheckpointProcessLock", self._cuda.cuCheckpointProcessLock(pid, options))

    def checkpoint(self, pid: int) -> None:
        self._call("Checkpoint", pid)

    def restore(self, pid: int) -> None:
        self._call("Restore", pid)

    def unlock(self, pid: int) -> None:
        self._call("Unlock", pid)

    def _call(self, verb: str, pid: int) -> None:
        name = f"cuCheckpointProcess{verb}"
        self._check(name, getattr(self._cuda, name)(pid, None))

    def _check(self, name: str, answer: Any) -> tuple[Any, ...]:
        error, *values = answer
        if int(error):
            raise CheckpointError(
                f"{name} failed: {getattr(error, 'name', int(error))}",
                hint="a process with managed (UVM) memory or CUDA IPC memory cannot be suspended; it must "
                "run as the same user on this machine, and hold a CUDA context",
            )
        return tuple(values)


def _bindings() -> Any:
    try:
        return require("cuda.bindings.driver", extra="cuda")
    except MissingPackageError as error:
        raise MissingPackageError(
            "suspending a process needs NVIDIA's bindings to the CUDA driver",
            hint=error.hint,
        ) from error
    except RuntimeError as error:  # the bindings are there, the driver is not
        raise CheckpointError(
            f"this machine has no usable CUDA driver: {error}", hint="run it where the GPU is"
        ) from error


def _check_process(pid: int) -> None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        raise UsageError(f"there is no process {pid}", hint="`nvidia-smi` lists those on the GPU") from None
    except PermissionError:
        raise UsageError(f"process {pid} belongs to another user", hint="run as that user") from None


# --- CRIU ---------------------------------------------------------------------------------------------


def _criu() -> str:
    found = shutil.which("criu")
    if not found:
        raise MissingPackageError(
            "criu is not installed, and an image needs it", hint="apt-get install criu, or leave --image out"
        )
    return found


def _dump(criu: str, pid: int, image: Path) -> None:
    image.mkdir(parents=True, exist_ok=True)
    options = ["--tree", str(pid), "--images-dir", str(image), "--shell-job", "--tcp-established"]
    _run([criu, "dump", *options], image)


def _undump(criu: str, image: Path) -> None:
    options = ["--images-dir", str(image), "--shell-job", "--tcp-established", "--restore-detached"]
    _run([criu, "restore", *options], image)


def _run(command: list[str], image: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise CheckpointError(
            f"{' '.join(command[:2])} failed with {done.returncode}: {' '.join(said)}",
            hint=f"its log is in {image}; it needs root and a kernel with CONFIG_CHECKPOINT_RESTORE",
        )
