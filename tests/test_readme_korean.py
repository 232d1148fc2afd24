"""README.ko.md is the same page: headings, commands, code, tables and links are those of README.md."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENGLISH, KOREAN = ((ROOT / name).read_text("utf-8") for name in ("README.md", "README.ko.md"))
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TABLE = re.compile(r"<!-- table: \w+ -->\n.*?<!-- end -->", re.DOTALL)
_HANGUL = re.compile(r"[가-힣]")


def outline(text: str) -> list[str]:
    """Headings by their depth, blocks by their language, tables: in the order they stand in."""
    marks = re.findall(r"^(#+) |^```(\w*)$|(<!-- table: \w+ -->)", _prose_and_fences(text), re.MULTILINE)
    return ["".join(mark) or "```" for mark in marks]


def _prose_and_fences(text: str) -> str:
    return _FENCE.sub(lambda block: f"```{block[1]}\n```", text)


def code(text: str) -> list[tuple[str, str]]:
    """Blocks without what a comment says: comments are translated."""
    return [
        (language, re.sub(r" +# .*$", "", body, flags=re.MULTILINE))
        for language, body in _FENCE.findall(text)
    ]


def links(text: str) -> set[str]:
    return set(re.findall(r"\]\(([^)]+)\)", text)) - {"README.md", "README.ko.md"}


def test_headings_blocks_and_tables_stand_in_the_same_order() -> None:
    assert outline(KOREAN) == outline(ENGLISH)
    assert outline(ENGLISH).count("##") >= 4


def test_commands_and_code_are_the_same() -> None:
    assert code(KOREAN) == code(ENGLISH)


def test_tables_are_the_same() -> None:
    assert _TABLE.findall(KOREAN) == _TABLE.findall(ENGLISH)
    assert _TABLE.findall(ENGLISH)


def test_both_lead_to_the_same_pages_and_to_each_other() -> None:
    assert links(KOREAN) == links(ENGLISH)
    assert "](README.ko.md)" in ENGLISH
    assert "](README.md)" in KOREAN


def test_names_in_prose_are_the_same() -> None:
    """What stands in backquotes is typed as it is, in any language."""
    quoted = [
        set(re.findall(r"`([^`\n]+)`", _TABLE.sub("", _FENCE.sub("", text)))) for text in (ENGLISH, KOREAN)
    ]
    assert quoted[0] == quoted[1]


def test_every_heading_and_item_is_korean() -> None:
    prose = _TABLE.sub("", _FENCE.sub("", KOREAN))
    said = re.findall(r"^(?:## |- ).+$", prose, re.MULTILINE)
    assert [line for line in said if not _HANGUL.search(line)] == []
