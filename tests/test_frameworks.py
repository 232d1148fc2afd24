"""docs/guides/your-framework.md: lines quoted from an example stand in it, and each example is named."""

from __future__ import annotations

import re

import pytest

from doc_blocks import ROOT, Block, blocks

PAGE = ROOT / "docs" / "guides" / "your-framework.md"
NO_FRAMEWORK = {"preemptible", "train_images"}  # about a scheduler, and about what is loaded
QUOTED = re.findall(
    r"<!-- lines of (examples/\S+\.py) -->\n```py\n(.*?)^```",
    PAGE.read_text("utf-8"),
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.parametrize(("example", "quoted"), QUOTED)
def test_the_lines_of_a_framework_stand_in_the_example_that_tests_kill(example: str, quoted: str) -> None:
    there = [line.strip() for line in (ROOT / example).read_text("utf-8").splitlines()]
    assert [line for line in quoted.splitlines() if line.strip() not in there] == []


def test_every_fragment_says_whose_it_is() -> None:
    assert len(QUOTED) == sum(block.language == "py" for block in blocks(PAGE)) == 8


@pytest.mark.parametrize("block", list(blocks(PAGE)), ids=lambda block: block.name)
def test_three_lines_suffice(block: Block) -> None:
    code = [line for line in block.text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(code) <= 6  # three to change, with what they stand in


def test_every_framework_of_the_table_has_its_section_and_its_program() -> None:
    text = PAGE.read_text("utf-8")
    rows = re.findall(r"^\| \[(.+?)\]\(#([\w-]+)\)", text, re.MULTILINE)
    headings = [
        re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-")
        for one in re.findall(r"^## (.+)$", text, re.MULTILINE)
    ]
    assert [anchor for _, anchor in rows] == headings
    named = set(re.findall(r"examples/(\w+)/train\.py", text))
    assert named == {path.parent.name for path in (ROOT / "examples").glob("*/train.py")} - NO_FRAMEWORK
