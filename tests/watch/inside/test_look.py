"""Deep looks: a window of steps under torch's profiler. Here on the CPU; no test has run one on a card."""

from __future__ import annotations

import stat
import sys
from typing import TYPE_CHECKING, Any

import pytest

from stoker.diagnose.activity import last_look
from stoker.watch import runs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PROGRAM = """
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def steps(count):
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
"""
LOOKED_AT = "steps(60)\nprint('done')\n"
OWN_PROFILER = """
from torch.profiler import ProfilerActivity, profile
steps(21)  # a look has begun
with profile(activities=[ProfilerActivity.CPU]) as mine:
    steps(2)
assert any('addmm' in one.key for one in mine.key_averages())
steps(60)
print('done')
"""


def looked(run_stoker: Callable[..., Any], tmp_path: Path, program: str, *look: str) -> Any:
    (tmp_path / "program.py").write_text(PROGRAM + program)
    command = (sys.executable, "program.py")
    done = run_stoker("watch", "--gpu", "none", "--out", "run", "--look", *look, "--", *command)
    assert (done.rc, done.stdout) == (0, "done\n"), done.stderr
    assert "USDT" not in done.stderr, "the profiler's own words do not reach the terminal"
    return runs.read_recording(tmp_path / "run")


def test_a_look_names_what_was_computed_and_its_steps_do_not_count(
    run_stoker: Callable[..., Any], tmp_path: Path
) -> None:
    run = looked(run_stoker, tmp_path, LOOKED_AT, "20")
    rank = run.ranks[0]
    assert [event.text for event in rank.events if event.what == "look"] == [
        "steps 20 to 23",
        "steps 40 to 43",
    ]
    assert len(rank.looks) == 2
    for look in rank.looks:
        assert 0 < look.start_s < look.end_s < run.wall_s
        assert ((look.start >= look.start_s) & (look.end <= look.end_s)).all(), "on the run's own clock"
        apart = (rank.steps.end <= look.start_s) | (rank.steps.start >= look.end_s)
        assert apart.all(), "steps under the profiler are no measure of the job's pace"
    assert any("deep looks" in line for line in run.facts["missing"])
    seen = last_look(run)
    assert seen is not None
    assert any("linear" in one.name or "Addmm" in one.name for one in seen.kernels)
    for path in (tmp_path / "run").glob("look-*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_profiler_of_the_programs_own_comes_first(run_stoker: Callable[..., Any], tmp_path: Path) -> None:
    run = looked(run_stoker, tmp_path, OWN_PROFILER, "100")
    assert [event.what for event in run.ranks[0].events if event.what in ("look", "hook off")] == ["look"]


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)"])
def test_a_program_that_ends_inside_a_window_ends_as_it_would(
    run_stoker: Callable[..., Any], tmp_path: Path, end: str
) -> None:
    run = looked(run_stoker, tmp_path, f"steps(21)\nprint('done')\n{end}\n", "100")
    assert run.ended == "exit 0"
    assert run.ranks[0].looks == ()


def test_without_the_option_nothing_is_looked_at(run_stoker: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM + LOOKED_AT)
    run_stoker("watch", "--gpu", "none", "--out", "run", "--", sys.executable, "program.py")
    assert runs.read_recording(tmp_path / "run").ranks[0].looks == ()


@pytest.mark.parametrize("told", ["often", "0", "-5", "1.5"])
def test_a_look_that_means_nothing_is_refused(run_stoker: Callable[..., Any], told: str) -> None:
    done = run_stoker("watch", f"--look={told}", "--", "true")
    assert done.rc == 2
    assert "hint:" in done.stderr
