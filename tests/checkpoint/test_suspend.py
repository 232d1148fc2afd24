"""Suspending a GPU process: the right calls in the right order, and clear refusals.

The driver here is made up after NVIDIA's documentation, not recorded: it shows the order of calls. The
real one suspends a training process in tests/gpu/test_checkpoint.py."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace

import pytest

from stoker.checkpoint.suspend import resume, suspend
from stoker.errors import CheckpointError, MissingPackageError, UsageError


class Driver:
    """Answers in the form of cuda.bindings.driver, and remembers what it was asked."""

    def __init__(self, *, fails: str = "", version: int = 13000) -> None:
        self.state, self.calls, self._fails, self._version = 0, [], fails, version

    def __getattr__(self, name: str):
        verbs = {"Lock": 1, "Checkpoint": 2, "Restore": 1, "Unlock": 0}
        verb = name.removeprefix("cuCheckpointProcess")
        if verb not in verbs:
            raise AttributeError(name)

        def call(pid: int, options: object) -> tuple[int]:
            self.calls.append(verb)
            if verb == self._fails:
                return (801,)
            self.state = verbs[verb]
            return (0,)

        return call

    def cuInit(self, flags: int) -> tuple[int]:
        return (0,)

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return 0, self._version

    def cuCheckpointProcessGetState(self, pid: int) -> tuple[int, int]:
        return 0, self.state

    def CUcheckpointLockArgs(self) -> SimpleNamespace:
        return SimpleNamespace(timeoutMs=0)


def test_a_process_is_suspended_and_resumed() -> None:
    driver = Driver()
    assert suspend(os.getpid(), driver=driver).state == "suspended"
    assert resume(os.getpid(), driver=driver).state == "running"
    assert driver.calls == ["Lock", "Checkpoint", "Restore", "Unlock"]


def test_a_process_that_cannot_be_suspended_goes_on() -> None:
    driver = Driver(fails="Checkpoint")
    with pytest.raises(CheckpointError, match="cuCheckpointProcessCheckpoint failed: 801") as caught:
        suspend(os.getpid(), driver=driver)
    assert driver.calls[-1] == "Unlock"
    assert "managed (UVM) memory" in caught.value.hint


def test_a_process_is_not_suspended_twice_nor_resumed_while_it_runs() -> None:
    driver = Driver()
    with pytest.raises(UsageError, match="is not suspended"):
        resume(os.getpid(), driver=driver)
    suspend(os.getpid(), driver=driver)
    with pytest.raises(UsageError, match="is suspended already"):
        suspend(os.getpid(), driver=driver)


def test_an_old_driver_is_refused_by_its_version() -> None:
    with pytest.raises(CheckpointError, match=r"supports CUDA 12\.4"):
        suspend(os.getpid(), driver=Driver(version=12040))


def test_old_bindings_are_refused() -> None:
    with pytest.raises(CheckpointError, match="bindings are too old"):
        suspend(os.getpid(), driver=SimpleNamespace())


def test_a_process_that_is_gone_is_named() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    with pytest.raises(UsageError, match=f"there is no process {process.pid}"):
        suspend(process.pid, driver=Driver())


def test_an_image_needs_criu(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    driver = Driver()
    with pytest.raises(MissingPackageError, match="criu is not installed"):
        suspend(os.getpid(), image=tmp_path / "image", driver=driver)
    assert driver.calls == []


def test_a_process_whose_image_fails_goes_on(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "criu").write_text("#!/bin/sh\necho cannot dump >&2\nexit 1\n")
    (tmp_path / "criu").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    driver = Driver()
    with pytest.raises(CheckpointError, match="criu dump failed with 1: cannot dump"):
        suspend(os.getpid(), image=tmp_path / "image", driver=driver)
    assert (driver.calls[-2:], driver.state) == (["Restore", "Unlock"], 0)


def test_without_the_bindings_the_pip_line_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.driver", None)
    with pytest.raises((MissingPackageError, CheckpointError), match="CUDA driver"):
        suspend(os.getpid())
