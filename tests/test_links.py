"""Links of all Markdown files lead somewhere: to files that are there, to headings that a page has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOT_OURS = {".venv", ".git", "build", "dist", "demo-out", "node_modules", ".pytest_cache"}
PAGES = [
    path
    for path in sorted([*ROOT.rglob("*.md"), ROOT / "llms.txt"])
    if not NOT_OURS & {*path.relative_to(ROOT).parts}
]
_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def dead_links(page: Path) -> list[str]:
    """Relative links of a page to no file, or to a heading that its file has not."""
    prose = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text("utf-8")))
    return [link for link in _LINK.findall(prose) if "://" not in link and not _leads(page, link)]


def _leads(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    return target.exists() and (not anchor or anchor in anchors(target.read_text("utf-8")))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them; a second one of a name gets a number."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.append(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return {f"{one}-{found[:at].count(one)}" if one in found[:at] else one for at, one in enumerate(found)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


def test_dead_links_and_anchors_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text(
        "# One `two`, three\n## Same\n## Same\n[good](#one-two-three) [second](#same-1) [no](b.md) "
        "[nor](#four)\n"
        "`[code](x.md)`\n```\n[block](y.md)\n# no heading\n```\n[web](https://a.org/z) [bad](#no-heading)\n"
    )
    assert dead_links(page) == ["b.md", "#four", "#no-heading"]
