"""The report: one file, whole by itself, small, safe, and readable whatever was not seen."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_runs import HEALTHY, STARVED, flat, job

from stoker.findings import Finding
from stoker.recording import Recording
from stoker.report.html import live_page, report, write_report
from stoker.report.summary import Summary, summarise
from stoker.report.units import percent, seconds

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&"
VOID = {"meta", "link"}


class Elements(HTMLParser):
    """The elements of a page, and the text of those that are read."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def test_the_verdict_comes_first_with_its_price_and_what_to_change(summary: Summary) -> None:
    text = "\n".join(Elements(report(summary)).text)
    first = text.index("The GPU waits for data")
    assert first < text.index("Where the time went")
    card = text[first : text.index("Where the time went")]
    for said in (percent(0.61), seconds(4932), "$3.43", "2.6×", *STARVED.remedy):
        assert said in card


def test_every_finding_shows_its_evidence_and_what_was_not_seen(summary: Summary) -> None:
    text = "\n".join(Elements(report(summary)).text)
    for finding in summary.findings:
        for said in (*finding.evidence, *finding.remedy, *finding.missing):
            assert said in text


def test_the_report_asks_nothing_of_the_network(summary: Summary) -> None:
    page = report(summary)
    elements = Elements(page)
    assert not elements.open
    links = [
        value
        for _, attributes in elements.tags
        for name, value in attributes.items()
        if name in ("src", "href")
    ]
    assert links == ["data:,"]
    assert "url(" not in page
    assert "@import" not in page


def test_text_of_a_run_never_becomes_markup(recording: Recording) -> None:
    finding = Finding(
        kind=HOSTILE,
        cause=HOSTILE,
        summary=HOSTILE,
        evidence=(HOSTILE,),
        remedy=(HOSTILE,),
        missing=(HOSTILE,),
    )
    hostile = replace(
        recording,
        title=HOSTILE,
        ended=HOSTILE,
        ranks=tuple(replace(rank, node=HOSTILE) for rank in recording.ranks),
        gpus=tuple(replace(gpu, node=HOSTILE, name=HOSTILE) for gpu in recording.gpus),
        hosts=tuple(replace(host, node=HOSTILE) for host in recording.hosts),
        facts={"argv": [HOSTILE], HOSTILE: HOSTILE, "missing": [HOSTILE]},
    )
    elements = Elements(report(summarise(hostile, [finding])))
    tame = Elements(report(summarise(recording, [replace(finding, kind="x")])))
    assert {tag for tag, _ in elements.tags} == {tag for tag, _ in tame.tags}
    assert sum(tag == "script" for tag, _ in elements.tags) == 1
    assert "".join(elements.text).count(HOSTILE) > 8


def test_a_long_run_of_many_cards_is_a_small_file() -> None:
    recording = job(ranks=4, steps=100, hz=20)
    many = replace(
        recording,
        ranks=tuple(replace(recording.ranks[i % 4], rank=i) for i in range(128)),
        gpus=tuple(replace(recording.gpus[i % 4], index=i) for i in range(256)),
    )
    assert len(report(summarise(many, [STARVED]))) < 1_000_000


def test_no_series_has_more_points_than_a_plot_can_show() -> None:
    page = report(summarise(job(ranks=1, steps=3000, late=None, hz=20), [STARVED]))
    paths = re.findall(r' d="([^"]*)"', page)
    assert max(len(re.findall("[ML]", path)) for path in paths) <= 2000


@pytest.mark.parametrize(
    "bare",
    [
        Recording(title="train.py", wall_s=3.0, ended="exit 1", ranks=(), gpus=(), hosts=()),
        replace(job(ranks=1, steps=5, late=None), gpus=(), hosts=(), facts={}),
        job(ranks=1, steps=0, late=None),
        replace(flat("fed"), hosts=()),
    ],
    ids=["nothing", "no machine", "no steps", "no host"],
)
def test_a_run_of_which_little_was_seen_still_has_a_report(bare: Recording) -> None:
    assert "stoker" in Elements(report(summarise(bare, []))).text


def test_pictures_say_in_words_what_they_show(summary: Summary) -> None:
    page = report(summary)
    pictures = len(re.findall(r"<svg[^>]*role=\"img\"", page))
    assert pictures == page.count("<svg") - page.count('aria-hidden="true"></svg>') - len(summary.gpus)
    assert pictures == len(re.findall(r'role="img"><title>', page))
    assert "Wall time, mean over ranks: compute 27%" in page


def test_a_healthy_run_is_told_its_pace_and_no_price() -> None:
    text = "\n".join(Elements(report(summarise(flat("fed"), [HEALTHY], price=2.5))).text)
    assert "of the time is compute" in text
    assert "lost" not in text


def test_only_the_live_page_asks_for_news(summary: Summary) -> None:
    assert 'data-live="1"' in live_page(summary)
    assert 'data-live="1"' not in report(summary)


def test_the_report_is_written_whole(summary: Summary, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.html"
    write_report(summary, path)
    assert path.read_text("utf-8") == report(summary)
    assert list(path.parent.iterdir()) == [path]
