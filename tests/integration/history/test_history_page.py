"""The page of the history in a real browser, wide and narrow, light and dark: nothing is cut off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import Page, browse
from made_history import entries, quiet, slowed

from stoker.history.page import history_page, write_page
from stoker.history.series import all_series, regressions

pytestmark = pytest.mark.integration
HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def page(require_binary: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browse(require_binary("chromium-headless-shell"), tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    long = "median/stoker / sixteen files of a very long name without any place to break_it_" + "x" * 60
    some = all_series(
        [
            *entries(slowed(50, 8, by=0.1)),
            *entries(quiet(30, 1), name="step time", unit="s", better="lower"),
            *entries(quiet(12, 2) * 1e6, name=long, unit="tokens/s"),
            *entries([0.31] * 9, name="mfu", unit="ratio"),
            *entries([5.0], name="one run", better=""),
            *entries(quiet(20, 3), name=HOSTILE, title=HOSTILE),
        ]
    )
    path = tmp_path_factory.mktemp("page") / "history.html"
    write_page(some, path, bad=regressions(some), title="History")
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_nothing_is_cut_off_and_nothing_is_asked_of_the_network(
    page: Page, written: Path, width: int, dark: bool
) -> None:
    page.open(written.as_uri(), width=width, dark=dark)
    assert page.ask("document.documentElement.scrollWidth") <= width
    assert page.ask("document.querySelectorAll('.trend').length") == 6
    cut = "[...document.querySelectorAll('.trend text')].filter((one) => one.getBBox().x < 0).length"
    assert page.ask(cut) == 0
    assert page.ask("performance.getEntriesByType('resource').length") == 0
    assert page.complaints == []
    page.picture(written.with_name(f"history-{width}-{'dark' if dark else 'light'}.png"))


def test_each_dot_has_its_run_and_commit_behind_it(page: Page, written: Path) -> None:
    page.open(written.as_uri())
    dots = page.ask("[...document.querySelectorAll('.trend circle title')].map((one) => one.textContent)")
    assert len(dots) == 58 + 30 + 12 + 9 + 1 + 20
    assert all("/runs/" in dot and "0000000" in dot for dot in dots)


def test_a_regression_comes_first_and_is_marked(page: Page, written: Path) -> None:
    page.open(written.as_uri())
    assert page.ask("document.querySelector('.card.bad h2').textContent") == "1 figure became worse"
    assert page.ask("document.querySelector('figure .cut.worse') !== null")
    assert page.ask("document.querySelector('figure b').textContent") == "steps/s"


def test_text_never_becomes_markup(page: Page, written: Path) -> None:
    page.open(written.as_uri())
    assert page.ask("document.querySelectorAll('script, img').length") == 0


def test_many_figures_are_no_endless_page() -> None:
    some = [one for number in range(70) for one in all_series(entries(quiet(3), name=f"n{number}"))]
    assert "Not shown: 10 figures more" in history_page(some, bad=[], title="t")
