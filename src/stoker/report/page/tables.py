"""HTML tables, figures and lists of the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from stoker.diagnose.timeline import STATES
from stoker.formats.sizes import counted
from stoker.report.devices import DeviceSummary
from stoker.report.page.charts import bar, spark
from stoker.report.page.markup import Html, join, tag
from stoker.report.summary import RankSummary, Summary
from stoker.report.units import percent, quantity, seconds, size, words

RANKS_SHOWN = 64
ACTIVITY = (("utilization", "utilisation"), ("sm_active", "SM active"), ("tensor_active", "tensor cores"))


def figures(pairs: Iterable[tuple[str, str]]) -> Html:
    return tag(
        "dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs), class_="figures"
    )


def states_list(state_s: Sequence[float]) -> Html:
    total = sum(state_s) or 1.0
    entries = [
        tag(
            "li",
            tag("i", class_=f"swatch s-{state}"),
            tag("span", words(state)),
            tag("b", percent(value / total)),
            tag("small", seconds(value)),
        )
        for state, value in zip(STATES, state_s, strict=True)
        if value / total > 0.0005
    ]
    return tag("ul", *entries, class_="states")


def listed(title: str, items: Sequence[str], *, ordered: bool = False) -> Html:
    if not items:
        return Html()
    listed = tag("ol" if ordered else "ul", *(tag("li", item) for item in items))
    return tag("div", tag("h4", title), listed, class_="listed")


def cards_table(summary: Summary) -> Html:
    columns = (*ACTIVITY, ("power", "power"), ("temperature", "temperature"), ("memory_used", "memory"))
    rows = [
        tag(
            "tr",
            tag("th", f"{gpu.node} / {gpu.index}" if gpu.node else f"GPU {gpu.index}", scope="row"),
            tag(
                "td", spark(gpu.read("utilization"), wall_s=summary.wall_s, colour="utilization", ceiling=1.0)
            ),
            *(tag("td", _mean(gpu, name)) for name, _ in columns[:-1]),
            tag("td", f"{_mean(gpu, 'memory_used')} of {size(gpu.memory_bytes)}"),
        )
        for gpu in summary.gpus
    ]
    return _table(("card", "", *(title for _, title in columns)), rows)


def hosts_table(summary: Summary) -> Html:
    rows = [
        tag(
            "tr",
            tag("th", host.node or "this one", scope="row"),
            tag("td", f"{host.cores:g}"),
            tag("td", _mean(host, "cpu_busy")),
            tag("td", _mean(host, "cpu_iowait")),
            tag("td", _last(host, "memory_available")),
            tag("td", f"{_last(host, 'shm_used')} of {_last(host, 'shm_size')}"),
            tag("td", _mean(host, "disk_read")),
            tag("td", _mean(host, "disk_written")),
        )
        for host in summary.hosts
    ]
    titles = (
        "node",
        "cores",
        "CPU",
        "waiting for I/O",
        "memory left",
        "/dev/shm",
        "disk read",
        "disk written",
    )
    return _table(titles, rows)


def ranks_table(ranks: Sequence[RankSummary]) -> Html:
    """Who is late: the ranks whose own part of a step is longest come first."""
    order = sorted(ranks, key=lambda rank: (-_known(rank.late_s), rank.rank))
    titles = ("rank", "node", "states", "own time a step", "later than the middle")
    left = len(order) - RANKS_SHOWN
    return join(
        _table(titles, [_rank_row(rank) for rank in order[:RANKS_SHOWN]], class_="ranks"),
        tag("p", f"Not shown: {counted(left, 'rank')} more.", class_="note") if left > 0 else Html(),
    )


def _rank_row(rank: RankSummary) -> Html:
    return tag(
        "tr",
        tag("th", str(rank.rank), scope="row"),
        tag("td", rank.node),
        tag("td", bar(rank.state_s, title=f"Rank {rank.rank}"), class_="wide"),
        tag("td", seconds(rank.own_s)),
        tag("td", f"+{seconds(rank.late_s)}" if _known(rank.late_s) > 0 else "–"),
    )


def _table(titles: Sequence[str], rows: Sequence[Html], *, class_: str | None = None) -> Html:
    header = tag("thead", tag("tr", *(tag("th", title, scope="col") for title in titles)))
    return tag("div", tag("table", header, tag("tbody", *rows), class_=class_), class_="scroll", tabindex="0")


def _mean(device: DeviceSummary, name: str) -> str:
    series = device.read(name)
    return quantity(series.average, series.unit) if series else "–"


def _last(device: DeviceSummary, name: str) -> str:
    series = device.read(name)
    return quantity(series.last, series.unit) if series else "–"


def _known(value: float) -> float:
    return value if math.isfinite(value) else 0.0
