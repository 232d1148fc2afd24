"""The sections of the page, in the order a reader asks: what is wrong, where the time went, who, what else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

import numpy as np

from stoker.findings import Finding
from stoker.report.charts import Line, bar, lines, spark, stack
from stoker.report.lanes import STATES
from stoker.report.markup import Html, join, tag
from stoker.report.series import Series, combined
from stoker.report.summary import DeviceSummary, RankSummary, Summary
from stoker.report.units import amount, money, percent, quantity, seconds, size, times, words

RANKS_SHOWN = 64
MARKS_SHOWN = 40
_ACTIVITY = (("utilization", "utilisation"), ("sm_active", "SM active"), ("tensor_active", "tensor cores"))


def sections(summary: Summary) -> dict[str, Html]:
    """Each section by its id; one with nothing to show is empty."""
    return {
        "head": head(summary),
        "verdict": verdict(summary),
        "time": time(summary),
        "steps": steps(summary),
        "gpus": gpus(summary),
        "ranks": ranks(summary),
        "findings": findings(summary),
        "hosts": hosts(summary),
        "facts": facts(summary),
    }


def head(summary: Summary) -> Html:
    nodes = {rank.node for rank in summary.ranks} | {gpu.node for gpu in summary.gpus}
    cards = sorted({gpu.name for gpu in summary.gpus})
    said = [
        f"{_count(len(summary.ranks), 'rank')} on {_count(len(nodes), 'node')}" if summary.ranks else "",
        f"{len(summary.gpus)} × {', '.join(cards)}" if cards else "no GPU seen",
        f"{'running for' if summary.running else 'ran'} {seconds(summary.wall_s)}",
        "" if summary.running else summary.ended,
        f"{datetime.fromtimestamp(summary.started, timezone.utc):%d %b %Y %H:%M} UTC"
        if math.isfinite(summary.started)
        else "",
    ]
    return join(
        tag("p", "stoker", class_="brand"),
        tag("h1", summary.title or "a run"),
        tag("p", " · ".join(filter(None, said)), class_="meta"),
    )


def verdict(summary: Summary) -> Html:
    finding = summary.verdict
    if finding is None:
        return tag("div", tag("h2", "Nothing to say yet: too little was seen"), class_="card quiet")
    return tag(
        "div",
        tag("p", _kind(finding), class_="kind"),
        tag("h2", _sentence(finding.summary)),
        _figures(_prices(summary, finding) if finding.kind != "healthy" else _pace(summary)),
        _listed("What to change", finding.remedy, ordered=True),
        class_=f"card {'good' if finding.kind == 'healthy' else 'bad'}",
    )


def time(summary: Summary) -> Html:
    if not any(summary.state_s):
        return Html()
    return join(
        tag("h2", "Where the time went"),
        bar(summary.state_s, title="Wall time, mean over ranks"),
        _states_table(summary.state_s),
        tag("h3", "Over time"),
        stack(summary.timeline, wall_s=summary.wall_s),
    )


def steps(summary: Summary) -> Html:
    if not summary.steps.count:
        return join(tag("h2", "Steps"), tag("p", "No step has ended.", class_="note"))
    line = Line(name="step", colour="compute", series=summary.step_times)
    return join(
        tag("h2", "Steps"),
        _figures(_pace(summary)),
        tag("h3", "A mean step"),
        bar(summary.step_state_s, title="A mean step"),
        _states_table(summary.step_state_s),
        tag("h3", "Step time"),
        lines([line], unit="seconds", wall_s=summary.wall_s, title="Step time"),
    )


def gpus(summary: Summary) -> Html:
    if not summary.gpus:
        return join(tag("h2", "GPU"), tag("p", "No GPU was read during this run.", class_="note"))
    activity = _lines_of(summary.gpus, _ACTIVITY)
    power = _lines_of(summary.gpus, (("power", "power"),))
    limit = max(gpu.power_limit_w for gpu in summary.gpus)
    return join(
        tag("h2", "GPU"),
        tag("h3", "Activity" + _over(summary.gpus)),
        lines(activity, unit="ratio", wall_s=summary.wall_s, title="GPU activity", top=1.0) if activity else Html(),
        tag("h3", "Power" + _over(summary.gpus)),
        lines(power, unit="watts", wall_s=summary.wall_s, title="GPU power", limit=limit) if power else Html(),
        _cards_table(summary),
    )


def ranks(summary: Summary) -> Html:
    """Who is late: the ranks whose own part of a step is longest come first."""
    if len(summary.ranks) < 2:
        return Html()
    order = sorted(summary.ranks, key=lambda rank: (-_known(rank.late_s), rank.rank))
    rows = [_rank_row(rank) for rank in order[:RANKS_SHOWN]]
    left = len(order) - len(rows)
    return join(
        tag("h2", "Ranks"),
        tag("p", "Own time is what a step takes without waiting for other ranks: the latest comes first.", class_="note"),
        _table(("rank", "node", "states", "own time a step", "later than the middle"), rows, class_="ranks"),
        tag("p", f"{left} more ranks are not shown.", class_="note") if left else Html(),
    )


def findings(summary: Summary) -> Html:
    if not summary.findings:
        return Html()
    return join(tag("h2", "Findings"), *(_finding(summary, finding) for finding in summary.findings))


def hosts(summary: Summary) -> Html:
    if not summary.hosts:
        return Html()
    plots = _lines_of(summary.hosts, (("cpu_busy", "CPU"), ("cpu_iowait", "waiting for I/O")))
    return join(
        tag("h2", "Host"),
        lines(plots, unit="ratio", wall_s=summary.wall_s, title="CPU", top=1.0) if plots else Html(),
        _hosts_table(summary),
    )


def facts(summary: Summary) -> Html:
    known = [(key, value) for key, value in summary.facts if key != "started"]
    rows = [tag("tr", tag("th", words(key), scope="row"), tag("td", value)) for key, value in known]
    marks = [
        tag("li", tag("b", seconds(mark.t)), f" rank {mark.rank}, {words(mark.what)}: {mark.text}")
        for mark in summary.marks[:MARKS_SHOWN]
    ]
    return join(
        tag("h2", "Facts") if rows or marks else Html(),
        tag("div", tag("table", tag("tbody", *rows), class_="facts"), class_="scroll") if rows else Html(),
        join(tag("h3", "Events"), tag("ul", *marks, class_="marks")) if marks else Html(),
    )


# --- parts ----------------------------------------------------------------------------------------


def _prices(summary: Summary, finding: Finding) -> list[tuple[str, str]]:
    dollars = summary.dollars(finding)
    return [
        ("of the time", percent(finding.share)),
        ("of GPU time lost", seconds(finding.gpu_seconds)),
        *([("lost so far" if summary.running else "lost", money(dollars))] if dollars is not None else []),
        ("as fast without it", times(finding.speedup_if_gone)),
        ("sure", percent(finding.confidence)),
    ]


def _pace(summary: Summary) -> list[tuple[str, str]]:
    pace = summary.steps
    rates = [("tokens/s", amount(pace.tokens_per_s)), ("FLOP/s", amount(pace.flops_per_s))]
    return [
        ("steps", f"{pace.count:,}"),
        ("median step", seconds(pace.median_s)),
        ("95% are below", seconds(pace.p95_s)),
        ("slowest", seconds(pace.slowest_s)),
        *((name, value) for name, value in rates if value != "–"),
    ]


def _figures(pairs: Iterable[tuple[str, str]]) -> Html:
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs), class_="figures")


def _states_table(state_s: Sequence[float]) -> Html:
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


def _finding(summary: Summary, finding: Finding) -> Html:
    return tag(
        "article",
        tag("p", _kind(finding), class_="kind"),
        tag("h3", _sentence(finding.summary)),
        _figures(_prices(summary, finding)) if finding.kind != "healthy" else Html(),
        tag(
            "div",
            _listed("Evidence", finding.evidence),
            _listed("What to change", finding.remedy, ordered=True),
            _listed("What was not seen", finding.missing),
            class_="columns",
        ),
        class_="good" if finding.kind == "healthy" else "bad",
    )


def _listed(title: str, items: Sequence[str], *, ordered: bool = False) -> Html:
    if not items:
        return Html()
    listed = tag("ol" if ordered else "ul", *(tag("li", item) for item in items))
    return tag("div", tag("h4", title), listed, class_="listed")


def _lines_of(devices: Sequence[DeviceSummary], named: Iterable[tuple[str, str]]) -> list[Line]:
    found = []
    for name, title in named:
        series = combined([one for device in devices if (one := device.read(name)) is not None])
        if series is not None:
            found.append(Line(name=title, colour=name, series=series, gap_s=_silence_s(series)))
    return found


def _silence_s(series: Series) -> float:
    """Readings come at a steady pace: five of them missing is a hole, not a slope."""
    return 5 * float(np.median(np.diff(series.t))) if len(series.t) > 1 else math.inf


def _cards_table(summary: Summary) -> Html:
    columns = (*_ACTIVITY, ("power", "power"), ("temperature", "temperature"), ("memory_used", "memory"))
    rows = [
        tag(
            "tr",
            tag("th", f"{gpu.node} / {gpu.index}", scope="row"),
            tag("td", spark(gpu.read("utilization"), wall_s=summary.wall_s, colour="utilization", ceiling=1.0)),
            *(tag("td", _mean(gpu, name)) for name, _ in columns[:-1]),
            tag("td", f"{_mean(gpu, 'memory_used')} of {size(gpu.memory_bytes)}"),
        )
        for gpu in summary.gpus
    ]
    return _table(("card", "", *(title for _, title in columns)), rows)


def _hosts_table(summary: Summary) -> Html:
    rows = [
        tag(
            "tr",
            tag("th", host.node, scope="row"),
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
    titles = ("node", "cores", "CPU", "waiting for I/O", "memory left", "/dev/shm", "disk read", "disk written")
    return _table(titles, rows)


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
    return tag("div", tag("table", header, tag("tbody", *rows), class_=class_), class_="scroll")


def _mean(device: DeviceSummary, name: str) -> str:
    series = device.read(name)
    return quantity(series.average, series.unit) if series else "–"


def _last(device: DeviceSummary, name: str) -> str:
    series = device.read(name)
    return quantity(series.last, series.unit) if series else "–"


def _kind(finding: Finding) -> str:
    return words(f"{finding.kind} · {finding.cause}" if finding.cause else finding.kind)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _over(devices: Sequence[DeviceSummary]) -> str:
    return f", mean of {len(devices)} cards, band from lowest to highest" if len(devices) > 1 else ""


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _known(value: float) -> float:
    return value if math.isfinite(value) else 0.0
