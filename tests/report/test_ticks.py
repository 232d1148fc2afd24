"""Axes are labelled with round numbers."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.cli import run
from stoker.plan.arithmetic import make_plan
from stoker.plan.job import read_job
from stoker.plan.page import plan_page
from stoker.plan.scene import cluster_of
from stoker.plan.simulate import play, sweep, usual_policies
from stoker.report.page.ticks import round_times, round_up, tick
from stoker.report.summary import fact

TRACE = Path(__file__).parents[2] / "examples" / "starved_cpu.jsonl"


@pytest.fixture
def page(tmp_path: Path) -> str:
    """The report of a flat recording."""
    assert run(["report", str(TRACE), "--out", str(tmp_path / "page.html")]) == 0
    return (tmp_path / "page.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("end_s", "said"),
    [
        (12.2, ["0", "5 s", "10 s"]),
        (0.9, ["0", "200 ms", "400 ms", "600 ms", "800 ms"]),
        (61, ["0", "15 s", "30 s", "45 s", "1 min"]),
        (6300, ["0", "30 min", "1 h", "90 min"]),
        (200_000, ["0", "12 h", "24 h", "36 h", "48 h"]),
    ],
)
def test_times_are_those_of_a_clock(end_s: float, said: list[str]) -> None:
    assert [tick(at) for at in round_times(end_s)] == said


@given(st.floats(1e-6, 1e9))
def test_ticks_are_few_even_and_within_the_axis(end_s: float) -> None:
    ticks = round_times(end_s)
    assert 2 <= len(ticks) <= 7
    assert 0 == ticks[0] <= ticks[-1] <= end_s * (1 + 1e-6)
    assert all(math.isclose(b - a, ticks[1]) for a, b in pairwise(ticks))


def test_bytes_are_rounded_in_the_unit_they_are_said_in() -> None:
    assert round_up(13.2 * 2**30, "bytes") == 15 * 2**30
    assert round_up(0.181, "seconds") == pytest.approx(0.2)


def test_the_report_has_round_ticks_at_their_places(page: str) -> None:
    ticks = re.findall(r'<span style="left:([\d.]+)%">([^<]+)</span>', page)
    assert [label for _, label in ticks[:3]] == ["0", "5 s", "10 s"]
    assert float(ticks[1][0]) == pytest.approx(100 * 5 / 12.2, abs=1)


def test_a_flat_recording_names_its_card_and_says_its_memory(page: str) -> None:
    assert "> / 0<" not in page
    assert ">GPU 0<" in page
    assert "150754820096" not in page
    assert "140 GiB" in page
    assert "700 W" in page


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("mem_total", 150754820096, ("mem_total", "140 GiB")),
        ("batch_bytes", 1 << 20, ("batch", "1 MiB")),
        ("power_limit_w", 700.0, ("power_limit", "700 W")),
        ("cpus", 16, ("cpus", "16")),
        ("torch", "2.11", ("torch", "2.11")),
    ],
)
def test_a_fact_is_said_in_its_unit(key: str, value: object, said: tuple[str, str]) -> None:
    assert fact(key, value) == said


def test_the_plan_page_has_the_reports_design_axis_titles_and_labels_that_do_not_touch() -> None:
    plan = make_plan(
        read_job(None, nodes="9", read_rate="200MB/s", dataset="20TB", store_rate="10GB/s", nvme="3.5TB")
    )
    cluster = cluster_of(plan)
    policy = usual_policies(cluster)[0]
    page = plan_page(plan, [play(cluster, policy)], [sweep(cluster, policy, [1, 9, 10, 100])])
    assert "--ground" in page  # the report's style sheet
    assert page.count("GPU idle share</text>") == 2
    for across in ("time since the start", "nodes (logarithmic)"):
        assert f">{across}</text>" in page
    counts = page.partition("By number of nodes")[2]
    labels = {name: float(x) for x, name in re.findall(r'<text x="([\d.]+)" y="270"[^>]*>([\d,]+)<', counts)}
    assert labels.keys() == {"1", "9", "100"}  # 10 would touch 9, which is the job's own
