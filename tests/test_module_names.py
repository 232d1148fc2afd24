"""The test modules share one namespace: of two with one name, pytest refuses the run or imports the wrong."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
PROGRAMS = {"programs", "foreign"}  # run as scripts, never imported by a test


def test_no_two_modules_of_the_tests_have_one_name() -> None:
    modules = [path for path in HERE.rglob("*.py") if not PROGRAMS & {*path.parts}]
    names = Counter(path.stem for path in modules if path.stem != "conftest")
    assert {name: count for name, count in names.items() if count > 1} == {}
