"""One change put into a copy of the tree, and the tests of its room run there in a forked process."""

from __future__ import annotations

import compileall
import ctypes
import importlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from mutants import Mutant
from rooms import Room

# A change that makes a loop endless is noticed too: by then tests have taken ten times as long as unchanged.
LEAST_S, TIMES, MOST_S = 20.0, 10.0, 180.0
_HEAVY = (
    "click coverage hypothesis hypothesis.strategies numpy pyarrow pyarrow.parquet rich.console tokenizers "
    "torch torch.distributed.checkpoint torch.utils.data xxhash yaml"
)
_PR_SET_PDEATHSIG = 1
_now = time.monotonic  # tests put clocks of theirs into `time`: by one of them a test took -9,000 s
ALL = ""  # the context of what ran while a module was imported or a test set up: it concerns all tests


def preload() -> None:
    """Load what takes seconds, once: tests are forked from here. Nothing of stoker is among it."""
    os.environ.update(
        OMP_NUM_THREADS="1", CI="1", PYTHONDONTWRITEBYTECODE="1"
    )  # CI: the same examples each time
    sys.dont_write_bytecode = True
    for name in _HEAVY.split():
        importlib.import_module(name)
    assert "stoker" not in sys.modules


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A copy of the tree, with what was built in it."""

    folder: Path

    @classmethod
    def of(cls, root: Path, folder: Path) -> Copy:
        listed = subprocess.run(
            ["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            check=True,
            capture_output=True,
        ).stdout
        names = [name for name in listed.decode().split("\0") if name and (root / name).exists()]
        built = [str(path.relative_to(root)) for path in (root / "src").rglob("*.so")]
        for name in names + built:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
        compileall.compile_dir(folder / "src", quiet=2)
        return cls(folder=folder)

    def changed(self, one: Mutant) -> None:
        path = self.folder / one.module
        path.write_text(one.text, "utf-8")
        os.utime(path, (1, 1))  # other than what is compiled, whatever its size

    def mended(self, one: Mutant, root: Path) -> None:
        shutil.copy2(root / one.module, self.folder / one.module)


@dataclass
class Reach:
    """Which tests run a line, by module; the tests of a room, and how long each takes."""

    tests: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    took_s: dict[str, float] = field(default_factory=dict)

    def of(self, one: Mutant) -> list[str]:
        """The tests to try: quickest first; all of them, those that reach it first, where it ran outside."""
        reached = self.tests[one.module, one.line]
        near = sorted(reached - {ALL}, key=self._took)
        if reached and ALL not in reached:
            return near
        return near + [test for test in self.every() if test not in reached]

    def every(self) -> list[str]:
        return sorted(self.took_s, key=self._took)

    def _took(self, test: str) -> float:
        return self.took_s.get(test, 0.0)


class Following:
    """A pytest plugin: which test runs which line."""

    def __init__(self, coverage: Any) -> None:
        self._coverage = coverage
        self.took_s: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        began = _now()
        try:
            return (yield)
        finally:
            self.took_s[item.nodeid] = _now() - began
            self._coverage.switch_context(ALL)


class NoShrinking:
    """Hypothesis stops at the first example that fails."""

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        from hypothesis import Phase, settings

        config.addinivalue_line("markers", "flaky: tried again elsewhere; here once, as any other")
        settings.register_profile(
            "mutation", settings.get_profile("stoker"), phases=(Phase.explicit, Phase.generate)
        )
        settings.load_profile("mutation")


def reach_of(room: Room, copy: Copy) -> Reach:
    """Run the room's tests undisturbed: under coverage, and as they will be run: they must say nothing."""
    told = copy.folder / "reach.pickle"

    def follow() -> int:
        from coverage import Coverage

        coverage = Coverage(data_file=None, source=[str(copy.folder / "src")], messages=False)
        following = Following(coverage)
        coverage.start()
        code = pytest.main([*_OPTIONS, *_found(room, copy)], plugins=[following, NoShrinking()])
        coverage.stop()
        data, reach = coverage.get_data(), Reach(took_s=following.took_s)
        for path in data.measured_files():
            module = str(Path(path).relative_to(copy.folder))
            for line, contexts in data.contexts_by_lineno(path).items():
                reach.tests[module, line].update(contexts)
        told.write_bytes(pickle.dumps((dict(reach.tests), reach.took_s)))
        return int(code)

    code = _forked(copy, follow, limit_s=900)
    if code:
        said = (copy.folder / "said").read_text("utf-8", "replace")
        raise SystemExit(f"{said[-3000:]}\nerror: the tests of {room.name} fail before anything is changed")
    tests, took_s = pickle.loads(told.read_bytes())
    reach = Reach(took_s=took_s)
    reach.tests.update(tests)
    every = reach.every()
    if _tested(copy, every, limit_s=_limit_s(reach, every)):
        raise SystemExit(
            f"error: the tests of {room.name}, quickest first, notice a change where there is none"
        )
    return reach


def survives(room: Room, copy: Copy, one: Mutant, reach: Reach) -> bool:
    """Whether no test of the room fails with the change."""
    tests = reach.of(one)
    copy.changed(one)
    try:
        ended = _tested(copy, tests, limit_s=_limit_s(reach, tests))
        if ended == pytest.ExitCode.USAGE_ERROR:  # a module does not load, or names of tests hang on a draw
            ended = _tested(copy, _found(room, copy), limit_s=MOST_S)
        return ended == 0
    finally:
        copy.mended(one, Path(__file__).parent.parent.parent)


def _limit_s(reach: Reach, tests: list[str]) -> float:
    return min(LEAST_S + TIMES * sum(reach.took_s.get(test, 0.0) for test in tests), MOST_S)


def _tested(copy: Copy, tests: list[str], *, limit_s: float) -> int:
    return _forked(
        copy, lambda: int(pytest.main(["-x", *_OPTIONS, *tests], plugins=[NoShrinking()])), limit_s
    )


_QUICK = "not integration and not slow"
_LOADED = "ignore::pytest.PytestAssertRewriteWarning"  # of what is loaded before pytest could rewrite it
_OPTIONS = ["-p", "no:cacheprovider", "-p", "no:rerunfailures", "-m", _QUICK, "-W", _LOADED, "--no-header"]


def _found(room: Room, copy: Copy) -> list[str]:
    return [
        str(path.relative_to(copy.folder)) for one in room.tests for path in sorted(copy.folder.glob(one))
    ]


def _forked(copy: Copy, run: Callable[[], int], limit_s: float) -> int:
    """What `run` answers in a process of its own, in the copy; 1 if it takes too long."""
    pid = os.fork()
    if not pid:
        os._exit(_in_child(copy, run))
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            _end_group(pid)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    _end_group(pid)
    os.kill(pid, signal.SIGKILL)  # it may not have come to make its group
    os.waitpid(pid, 0)
    return 1


def _end_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _in_child(copy: Copy, run: Callable[[], int]) -> int:
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing goes on where the tool was killed
    os.chdir(copy.folder)
    said = os.open("said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(said, 1)
    os.dup2(said, 2)
    source = str(copy.folder / "src")
    sys.path[:] = [source, *(path for path in sys.path if not path.endswith(("/src", "/tests/mutation")))]
    os.environ["PYTHONPATH"] = source
    try:
        return run()
    except BaseException:
        import traceback

        traceback.print_exc()
        return 3
