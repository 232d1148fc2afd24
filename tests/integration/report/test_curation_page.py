"""The curation report in a real browser: the funnel is drawn, nothing is cut off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import Page, browse

from stoker.manifest import read_manifest
from stoker.prepare.curate.recipe import read_recipe
from stoker.prepare.finish import read_statistics
from stoker.report.curation import page as curation_page

pytestmark = pytest.mark.integration

TEXTS = ["lorem ipsum " * 100, "<script>alert('coal')</script> " * 3, "too short"]


@pytest.fixture(scope="module")
def page(require_binary: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browse(require_binary("chromium-headless-shell"), tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def url(make: Any, write_jsonl: Any, tmp_path: Path) -> str:
    recipe = read_recipe("web")
    steps = tuple(ask for ask in recipe.curation.steps if ask.step != "fineweb")
    path = write_jsonl(tmp_path / "x.jsonl", [*TEXTS, *(f"{PROSE} It was day {day}." for day in DAYS)])
    make(path, curation=replace(recipe.curation, steps=steps), out=tmp_path / "out")
    made = str(tmp_path / "out")
    target = tmp_path / "report.html"
    target.write_text(curation_page(made, read_manifest(made), read_statistics(made)))
    return target.as_uri()


PROSE = (
    "The fireman shovels coal into the firebox while the driver watches the line ahead of the train. "
    "Without steam nothing moves, and without coal there is no steam, so the work never ends. "
    "In winter the cab is warm near the fire and freezing everywhere else, which everybody learns soon. "
    "At every stop they take water, oil the bearings and rake the ash from under the grate again."
)
DAYS = ("one", "two", "three")


@pytest.mark.parametrize("width", [1280, 420])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_funnel_is_drawn_and_fits(page: Page, url: str, width: int, dark: bool, tmp_path: Path) -> None:
    page.complaints.clear()
    page.open(url, width=width, dark=dark)
    page.picture(tmp_path / "page.png")
    rows = page.ask("[...document.querySelectorAll('#funnel tbody th')].map(e => e.innerText).join()")
    assert rows.split(",")[:3] == ["lengths", "normalise", "language"]
    assert rows.endswith("kept")
    assert page.ask("document.querySelectorAll('#funnel .piece').length") >= len(rows.split(","))
    assert "top_2_gram" in page.ask("document.querySelector('#funnel').innerText")
    assert "lorem ipsum" in page.ask("document.querySelector('#samples').innerText")
    assert page.ask("document.documentElement.scrollWidth <= innerWidth")
    assert page.complaints == []
