"""The page of a benchmark: what was seen beside a figure is on it, in columns of its own."""

from __future__ import annotations

from stoker.bench.figures import Bench, Figure
from stoker.report.measured import measured_page


def test_a_figure_s_limit_and_what_was_seen_beside_it_are_on_the_page():
    figure = Figure(name="read <1>", value=3e9, unit="B/s", limit="the device", beside={"p50_s": 0.002})
    page = measured_page(Bench(verb="path", of="disk", figures=[figure]))
    assert "read &lt;1&gt;" in page
    assert "the device" in page
    assert "p50 2 ms" in page
    assert 'class="measured"' in page  # not `facts`, whose every cell is as wide as the page
    assert "facts" not in page.partition("<body")[2]
