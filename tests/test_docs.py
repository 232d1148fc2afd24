"""What the documents say is what the code and the measurements say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from stoker.cli.diagnose import command as diagnose

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\[[^\]]+\]\(([^)#]+)[^)]*\)")


def test_the_command_reference_is_the_commands_own_help() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "docs" / "reference" / "make.py", "--check"], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr


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
