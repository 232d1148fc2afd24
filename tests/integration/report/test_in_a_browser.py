"""The report and the live page in a real browser: nothing is asked of the network, nothing is cut off."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import Page, browse
from made_runs import STARVED, STRAGGLER, job, until

from stoker.report.html import write_report
from stoker.report.live import Live
from stoker.report.serve import Address
from stoker.report.summary import Summary, summarise

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def page(require_binary: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browse(require_binary("chromium-headless-shell"), tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def report_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(summarise(job(), [STARVED, STRAGGLER], price=2.5), path)
    return path.as_uri()


@pytest.mark.parametrize("width", [1280, 420])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_report_opens_from_a_file_and_fits(
    page: Page, report_url: str, width: int, dark: bool, tmp_path: Path
) -> None:
    page.complaints.clear()
    page.open(report_url, width=width, dark=dark)
    page.picture(tmp_path / "page.png")
    assert page.ask("document.querySelector('#verdict h2').innerText").startswith("The GPU waits for data")
    assert page.ask("document.documentElement.scrollWidth <= innerWidth")
    light = page.ask("getComputedStyle(document.body).backgroundColor") == "rgb(246, 245, 242)"
    assert light is not dark
    assert page.complaints == []


def test_text_has_enough_contrast(page: Page, report_url: str) -> None:
    for dark in (False, True):
        page.open(report_url, dark=dark)
        assert json.loads(page.ask(TOO_FAINT)) == []


def test_pointing_at_a_plot_tells_its_values(page: Page, report_url: str) -> None:
    page.open(report_url)
    page.point_at("#time .canvas", across=0.02)
    page.until("document.querySelector('.hint')")
    assert page.ask("document.querySelector('.hint').innerText").split("\n")[1:] == ["startup 100%"]
    page.point_at("#gpus .canvas", across=0.5)
    page.until("document.querySelector('#gpus .hint')")
    said = page.ask("document.querySelector('.hint').innerText")
    assert [line.rpartition(" ")[0] for line in said.split("\n")[1:]] == [
        "utilisation",
        "SM active",
        "tensor cores",
    ]
    page.point_at("h1", across=0.5)
    page.until("!document.querySelector('.hint')")


def test_the_live_page_follows_the_run_and_replaces_only_what_changed(page: Page) -> None:
    recording = job()
    seen = [summarise(until(recording, 30.0), [STARVED])]

    def look() -> Summary:
        return seen[0]

    with Live(look, page=Address(port=0)) as live:
        page.complaints.clear()
        page.open(live.page_url)
        page.until("document.querySelector('#verdict h2')?.innerText.startsWith('The GPU')")
        page.until("document.querySelector('#head .meta').innerText.includes('running for 30 s')")
        page.ask("window.kept = document.querySelector('#verdict h2'); window.scrollTo(0, 400)")
        seen[0] = summarise(until(recording, 60.0), [STARVED])
        page.until("document.querySelector('#head .meta').innerText.includes('running for 1 min')")
        assert page.ask("window.kept.isConnected && scrollY === 400")
        seen[0] = summarise(recording, [STRAGGLER])
        page.until("document.querySelector('#connection').innerText === 'The run has ended.'")
        assert (
            page.ask("document.querySelector('#verdict h2').innerText")
            == "Rank 3 is 21 ms late at every step"
        )
        assert page.complaints == []
    page.until("document.querySelector('#connection').innerText.includes('cannot be reached')")
    assert page.ask("document.querySelector('#verdict h2').innerText").startswith("Rank 3")


# Elements whose own text stands out less than 4.5 : 1 (3 : 1 where it is large) from what is behind it.
TOO_FAINT = """
(() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => numbers(colour).slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if ((numbers(colour)[3] ?? 1) > 0.5) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const faint = [];
  for (const element of document.querySelectorAll("main *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || element.closest("svg")) continue;
    const [a, b] = [light(getComputedStyle(element).color), light(behind(element))].sort((x, y) => y - x);
    const large = parseFloat(getComputedStyle(element).fontSize) >= 18;
    if ((a + 0.05) / (b + 0.05) < (large ? 3 : 4.5)) faint.push(element.className + ": " + element.innerText);
  }
  return JSON.stringify([...new Set(faint)]);
})()
"""
