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

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\[[^\]]+\]\(([^)#]+)[^)]*\)")


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = [link for link in LINK.findall(page.read_text("utf-8")) if "://" not in link]
    assert [link for link in targets if not (page.parent / link).exists()] == []


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").read_text("utf-8").count("\n") <= 120


def test_the_readme_shows_the_verdict_that_its_command_gives() -> None:
    shown = (ROOT / "README.md").read_text("utf-8").partition("$ stoker diagnose ")[2].partition("```")[0]
    command, _, verdict = shown.partition("\n")
    recording = ROOT / command.split()[0]
    ran = CliRunner().invoke(diagnose, [str(recording)], env={"COLUMNS": "100"})
    assert verdict
    assert ran.output.startswith(verdict)


# --- blocks: tests/integration/test_doc_blocks.py runs them ---

NOT_RUN = (
    19  # what needs a cluster, a card, an index, users or things of yours; each names the test that stands in
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
