"""Nothing in the repository needs what lies beside it: a clone alone in an empty folder is whole."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BESIDE = (ROOT / os.pardir).resolve()
PARTS = ("src", "tests", "benchmarks", "examples", "docs", "deploy", ".ci")
TEXT = {".py", ".c", ".h", ".md", ".sh", ".toml", ".txt", ".json", ".jsonl", ".yaml", ".css", ".js", ""}
_CLIMBS = re.compile(r"""(?<![\w%./])(\.\./(?:\.\./)*)""")
_PARENTS = re.compile(r"__file__\)((?:\.parents\[\d+\]|\.parent\b|\.resolve\(\)|\.absolute\(\))+)")
_BESIDE = re.compile(r"\bROOT\.parents?\b")
_STEP = re.compile(r"\.parents\[(\d+)\]|\.parent\b")


def files() -> Iterator[Path]:
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*")):
            if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts:
                yield path
    yield from (path for path in sorted(ROOT.iterdir()) if path.is_file() and path.suffix in TEXT)


def depth(path: Path) -> int:
    return len(path.relative_to(ROOT).parts) - 1


def outside(path: Path, text: str) -> Iterator[str]:
    """Places outside of the clone that a file names: by climbing too high, or by this machine's paths."""
    for climb in _CLIMBS.finditer(text):
        if climb[1].count("..") > depth(path):
            yield text[climb.start() : climb.end() + 20]
    for climb in _PARENTS.finditer(text):
        if sum(int(number) + 1 if number else 1 for number in _STEP.findall(climb[1])) > depth(path) + 1:
            yield climb[0]
    yield from _BESIDE.findall(text)
    for place in places_of_this_machine():
        yield from re.findall(rf"(?<![\w.$}}%]){re.escape(place)}(?:/[\w.-]+)?(?![\w-])", text)


def places_of_this_machine() -> Iterator[str]:
    """Where this clone and its owner live; roots that every machine has say nothing."""
    everywhere = {Path(name) for name in ("/", "/tmp", "/home", "/var/tmp")}
    for place in (ROOT, BESIDE, Path.home()):
        if place not in everywhere:
            yield str(place)


def test_no_file_names_a_place_outside_of_the_clone() -> None:
    seen = list(files())
    assert len(seen) > 300
    named = {str(path.relative_to(ROOT)): [*outside(path, path.read_text("utf-8"))] for path in seen}
    assert {name: found for name, found in named.items() if found} == {}


@pytest.mark.parametrize(
    "text",
    [
        'TRACES = "..' + '/shared"',
        "[a](.." + "/.." + "/../x.md)",
        "Path(__file__)" + ".parents[2] / 'shared'",
        "Path(__file__).resolve()" + ".parent.parent.parent",
        "ROOT" + ".parent / 'shared'",
        f"open('{BESIDE}/recordings/run.jsonl')",
    ],
)
def test_a_place_outside_of_the_clone_is_seen(text: str) -> None:
    assert list(outside(ROOT / "Makefile" if "shared" in text else ROOT / "docs" / "page.py", text))


def test_places_inside_are_not_taken_for_others() -> None:
    text = "Path(__file__).parents[1] / 'recordings', [plan](../README.md), 's3://bucket/../../etc', 'a/../b'"
    assert list(outside(ROOT / "tests" / "test_x.py", text)) == []


def test_the_scripts_of_ci_are_right_as_shell() -> None:
    for script in (ROOT / ".ci" / "run", ROOT / "tests" / "install-debian.sh"):
        subprocess.run(["bash", "-n", script], check=True)
