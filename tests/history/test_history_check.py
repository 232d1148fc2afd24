"""Series, checks and comparisons: machines apart, directions respected, many figures corrected for."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from made_history import entries, quiet, slowed

from stoker.cli.history import command
from stoker.errors import UsageError
from stoker.history.compare import compare
from stoker.history.series import Series, all_series, fits, regressions
from stoker.history.store import write_entries


def series_of(values: Sequence[float] | np.ndarray, **given: Any) -> Series:
    (one,) = all_series(entries(values, **given))
    return one


def test_a_slowdown_is_a_regression_and_a_speedup_is_not() -> None:
    assert [one.change.index for one in regressions([series_of(slowed(60, 8, by=0.1))])] == [60]
    assert regressions([series_of(slowed(60, 8, by=-0.1))]) == []


def test_lower_is_better_turns_it_round() -> None:
    assert regressions([series_of(slowed(60, 8, by=0.1), better="lower")]) == []
    assert len(regressions([series_of(slowed(60, 8, by=-0.1), better="lower")])) == 1


def test_a_figure_without_a_direction_never_fails_a_check() -> None:
    one = series_of(slowed(60, 8, by=0.3), better="")
    assert one.changes
    assert regressions([one]) == []


def test_an_old_regression_does_not_fail_for_ever() -> None:
    values = quiet(80)
    values[40:] *= 0.8
    assert regressions([series_of(values)]) == []


def test_a_slower_machine_is_no_regression() -> None:
    """Thirty nights on one kind of machine, then on another, half as fast."""
    fast, slow = entries(quiet(30)), entries(quiet(10) / 2, machine="1 × NVIDIA L4", at=1_799_000_000.0)
    some = all_series([*fast, *slow])
    assert len(some) == 2
    assert regressions(some) == []


def test_other_commands_are_other_series() -> None:
    assert len(all_series([*entries(quiet(5)), *entries(quiet(5), title="other.py")])) == 2


def test_one_sure_regression_among_a_hundred_quiet_figures_is_found_alone() -> None:
    some = [series_of(quiet(60, seed), name=f"quiet {seed}") for seed in range(100)]
    bad = regressions([*some, series_of(slowed(54, 6, 1000, by=0.1), name="slow")])
    assert [one.series.name for one in bad] == ["slow"]


def test_names_are_found_by_parts_and_patterns() -> None:
    assert fits("steps", "train.py", "steps/s")
    assert fits("share*", "train.py", "share of wall: data")
    assert fits("train.py: steps/s", "train.py", "steps/s")
    assert fits("prepare/median", "prepare", "median_mb_per_s/stoker")
    assert not fits("mfu", "train.py", "steps/s")


# --- comparing ---


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Five commits on main, five more on a branch."""
    base = tmp_path / "repository"
    base.mkdir()

    def git(*words: str) -> str:
        given = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *given, *words], cwd=base, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q", "-b", "main")
    for number in range(10):
        if number == 5:
            git("checkout", "-q", "-b", "branch")
        git("commit", "-q", "--allow-empty", "-m", str(number))
    return base


def commits_of(repository: Path) -> list[str]:
    asked = ["git", "rev-list", "--reverse", "branch"]
    return subprocess.run(asked, cwd=repository, check=True, capture_output=True, text=True).stdout.split()


def test_a_branch_is_compared_with_what_it_left(repository: Path) -> None:
    commits = [one for one in commits_of(repository) for _ in range(2)]
    values = quiet(20)
    values[10:] *= 0.8
    (row,) = compare(entries(values, commits=commits), "main..branch", repository=repository)
    assert (len(row.before), len(row.after), row.verdict) == (10, 10, "worse")
    assert row.ratio == pytest.approx(0.8, abs=0.03)


def test_equal_branches_are_the_same_and_few_runs_say_nothing(repository: Path) -> None:
    commits = commits_of(repository)
    twice = [one for one in commits for _ in range(2)]
    (row,) = compare(entries(quiet(20), commits=twice), "main..branch", repository=repository)
    assert row.verdict == "the same"
    (few,) = compare(
        entries(quiet(2), commits=[commits[0], commits[9]]), "main..branch", repository=repository
    )
    assert few.verdict == "too few runs to tell"


def test_a_side_without_runs_is_said(repository: Path) -> None:
    commits = commits_of(repository)[:5]
    with pytest.raises(UsageError, match="no run of branch"):
        compare(entries(quiet(5), commits=commits), "main..branch", repository=repository)
    with pytest.raises(UsageError, match="names no two sides"):
        compare(entries(quiet(5), commits=commits), "main", repository=repository)


# --- the command ---


@pytest.fixture
def history(tmp_path: Path) -> Callable[..., Any]:
    def run(*arguments: object) -> Any:
        words = [*map(str, arguments)]
        return CliRunner().invoke(command, [words[0], "--store", str(tmp_path / "h"), *words[1:]])

    return run


def test_check_fails_only_when_asked_to(tmp_path: Path, history: Callable[..., Any]) -> None:
    write_entries(tmp_path / "h", entries(slowed(40, 8, by=0.1)))
    ran = history("check")
    assert (ran.exit_code, "1 worse" in ran.output) == (0, True)
    assert history("check", "--fail").exit_code == 1
    told = json.loads(history("check", "--json").output)
    assert told["worse"][0]["first_bad"] == f"{40:040x}"
    assert told["worse"][0]["last_good"] == f"{39:040x}"


def test_check_of_quiet_and_of_young_figures_passes(tmp_path: Path, history: Callable[..., Any]) -> None:
    write_entries(tmp_path / "h", [*entries(quiet(40)), *entries(quiet(3), name="young")])
    ran = history("check", "--fail")
    assert ran.exit_code == 0
    assert "1 figure checked, 0 worse; 1 figure with fewer than 8 runs not judged" in ran.output


def test_show_plots_marks_and_names_commits(tmp_path: Path, history: Callable[..., Any]) -> None:
    write_entries(tmp_path / "h", entries(slowed(40, 20, by=0.2)))
    ran = history("show", "steps")
    assert ran.exit_code == 0
    assert "▲" in ran.output
    assert f"{40:040x}"[:7] in ran.output
    assert "worse" in ran.output


def test_show_of_nothing_says_what_there_is(tmp_path: Path, history: Callable[..., Any]) -> None:
    write_entries(tmp_path / "h", entries(quiet(3)))
    ran = history("show", "nonsense")
    assert isinstance(ran.exception, UsageError)
    assert "steps/s" in ran.exception.hint


def test_without_a_history_the_hint_says_how_to_get_one(history: Callable[..., Any]) -> None:
    error = history("show").exception
    assert isinstance(error, UsageError)
    assert "stoker history import" in error.hint


def test_a_damaged_file_is_said_on_stderr_and_the_rest_is_shown(
    tmp_path: Path, history: Callable[..., Any]
) -> None:
    write_entries(tmp_path / "h", entries(quiet(3)))
    (tmp_path / "h" / "torn.db").write_bytes(b"torn")
    ran = history("show", "steps/s")
    assert ran.exit_code == 0
    assert "torn.db" in ran.stderr
    assert "3 runs" in ran.stdout


def test_the_list_shows_the_newest_runs(tmp_path: Path) -> None:
    write_entries(tmp_path / "h", entries(quiet(30)))
    ran = CliRunner().invoke(command, ["--store", str(tmp_path / "h")])
    assert ran.exit_code == 0
    assert "10 older runs not shown" in ran.output
    everything = CliRunner().invoke(command, ["--store", str(tmp_path / "h"), "--json"])
    assert len(json.loads(everything.output)) == 30


@pytest.mark.parametrize(
    ("before", "after", "better", "verdict"),
    [
        (0.0, 0.3, "lower", "worse"),
        (0.0, 0.3, "higher", "better"),
        (0.3, 0.0, "lower", "better"),
        (-2.0, -1.0, "higher", "better"),
        (-2.0, -1.0, "lower", "worse"),
    ],
)
def test_from_nothing_and_below_it_the_direction_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: float, after: float, better: str, verdict: str
) -> None:
    """A branch that waits for data 30% of the time, and not at all before, was called better."""
    some = entries([before] * 12 + [after + 0.001 * n for n in range(12)], better=better, unit="ratio")
    sides = [
        replace(one, origin=replace(one.origin, branch="main" if number < 12 else "new"))
        for number, one in enumerate(some)
    ]
    (row,) = compare(sides, "main..new", repository=tmp_path)
    assert row.verdict == verdict
    write_entries(tmp_path / "h", sides)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(command, ["compare", "main..new", "--store", str(tmp_path / "h")])
    assert done.exit_code == (verdict == "worse"), done.output
    assert "nan" not in done.output
    done = CliRunner().invoke(command, ["compare", "main..new", "--json", "--store", str(tmp_path / "h")])
    assert "NaN" not in done.output
