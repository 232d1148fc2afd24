"""What the documents say is what the code and the measurements say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import stoker
from doc_blocks import RUN, all_blocks
from stoker.cli.diagnose import command as diagnose
from stoker.cli.plan import command as plan
from stoker.doctor.examine import CHECKS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.long
def test_the_reference_is_what_commands_signatures_and_checks_say() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "docs" / "reference" / "make.py", "--check"], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text("utf-8")
    assert re.findall(r"^## stoker\.(\w+)$", page, re.MULTILINE) == stoker.__all__


def test_tables_come_from_the_results() -> None:
    checked = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "tables.py", "--check"], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").read_text("utf-8").count("\n") <= 120


def test_the_readme_shows_the_verdict_that_its_command_gives() -> None:
    shown = (ROOT / "README.md").read_text("utf-8").partition("$ stoker diagnose ")[2].partition("```")[0]
    command, _, verdict = shown.partition("\n")
    recording = ROOT / command.split()[0]
    ran = CliRunner().invoke(diagnose, [str(recording)], env={"COLUMNS": "100"})
    assert verdict
    assert ran.output.startswith(verdict)


def shown_outputs(verb: str) -> list[tuple[str, str]]:
    """Commands of the pages with the output that stands below them."""
    blocks = [block for block in all_blocks() if block.language == "console"]
    parts = [part for block in blocks for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)]
    split = [part.partition("\n") for part in parts if part.startswith(f"stoker {verb}")]
    return [(command, output) for command, _, output in split if output.strip()]


def test_pages_show_what_plans_say() -> None:
    shown = shown_outputs("plan")
    assert shown
    for command, output in shown:
        said = " ".join(CliRunner().invoke(plan, command.split()[2:]).output.split())
        for piece in re.split(r"^(?:\.\.\.|…)$", output, flags=re.MULTILINE):
            assert " ".join(piece.split()) in said, command


def test_pages_show_checks_that_doctor_makes() -> None:
    shown = shown_outputs("doctor")
    rows = [
        re.findall(r"^  (?:ok|warn|fail|unknown) +(\S.*?)  ", output, re.MULTILINE) for _, output in shown
    ]
    assert sum(map(len, rows)) > 5
    assert {name for row in rows for name in row} <= {check.name for check in CHECKS}


def test_counts_that_pages_name_are_true() -> None:
    machines = (ROOT / "docs" / "reference" / "gate.md").read_text("utf-8").count(
        "\n| "
    ) - 1  # without its head
    counts = {r"(\d+) machines before four jobs": machines, r"(\d+) checks of a machine": len(CHECKS)}
    for pattern, count in counts.items():
        said = [int(one) for page in PAGES for one in re.findall(pattern, page.read_text("utf-8"))]
        assert set(said) == {count}, pattern


# --- blocks: tests/integration/test_doc_blocks.py runs them ---

NOT_RUN = (
    23  # what needs a cluster, a card, an index, users or things of yours; each names the test that stands in
)


def test_blocks_that_cannot_run_here_say_why_and_are_few() -> None:
    left_out = [block for block in all_blocks() if block.why_not]
    assert len(left_out) == NOT_RUN, [block.name for block in left_out]
    named = [re.search(r"tests/[\w/]+\.py", block.why_not) for block in left_out]
    assert all(name and (ROOT / name[0]).exists() for name in named)


def test_commands_stand_in_blocks_that_are_run() -> None:
    quiet = [block for block in all_blocks() if block.language not in RUN]
    assert [block.name for block in quiet if re.match(r"(\$ )?(stoker|make|pip|python) ", block.text)] == []


def test_blocks_of_python_compile() -> None:
    for block in all_blocks():
        if block.language == "python":
            compile(block.text, block.name, "exec")
