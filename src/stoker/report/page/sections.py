"""Page sections, in the order a reader asks: what is wrong, where did time go, who, what else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

import numpy as np

from stoker.diagnose.timeline import STATES
from stoker.findings import Finding
from stoker.formats.sizes import counted
from stoker.report.devices import DeviceSummary
from stoker.report.page.charts import Line, bar, lines, stack
from stoker.report.page.markup import Html, join, tag
from stoker.report.page.tables import (
    ACTIVITY,
    cards_table,
    figures,
    hosts_table,
    listed,
    ranks_table,
    states_list,
)
from stoker.report.phrases import kind_of, sentence
from stoker.report.series import Series, combined
from stoker.report.summary import Summary
from stoker.report.units import amount, money, percent, seconds, times, words
from stoker.symptoms import page_of

MARKS_SHOWN = 40


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
        f"{counted(len(summary.ranks), 'rank')} on {counted(len(nodes), 'node')}" if summary.ranks else "",
        f"{len(summary.gpus)} × {', '.join(cards)}" if cards else "no GPU seen",
        f"{'running for' if summary.running else 'ran'} {seconds(summary.dropped_s + summary.wall_s)}",
        f"the last {seconds(summary.wall_s)} are kept" if summary.dropped_s else "",
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
        tag("p", kind_of(finding), class_="kind"),
        tag("h2", sentence(finding.summary)),
        figures(_prices(summary, finding) if finding.kind != "healthy" else _health(summary)),
        listed("What to change", finding.remedy, ordered=True),
        listed("More", [page] if (page := page_of(finding)) else []),
        class_=f"card {'good' if finding.kind == 'healthy' else 'bad'}",
    )


def time(summary: Summary) -> Html:
    if not any(summary.state_s):
        return Html()
    return join(
        tag("h2", "Where the time went"),
        bar(summary.state_s, title="Wall time, mean over ranks"),
        states_list(summary.state_s),
        tag("h3", "Over time"),
        stack(summary.over_time, wall_s=summary.wall_s),
    )


def steps(summary: Summary) -> Html:
    if not summary.steps.count:
        return join(tag("h2", "Steps"), tag("p", "No step has ended.", class_="note"))
    line = Line(name="step", colour="compute", series=summary.step_times)
    return join(
        tag("h2", "Steps"),
        figures(_pace(summary)),
        tag("h3", "A mean step"),
        bar(summary.step_state_s, title="A mean step"),
        states_list(summary.step_state_s),
        tag("h3", "Step time"),
        lines([line], unit="seconds", wall_s=summary.wall_s, title="Step time"),
    )


def gpus(summary: Summary) -> Html:
    if not summary.gpus:
        return join(tag("h2", "GPU"), tag("p", "No GPU was read during this run.", class_="note"))
    activity = _lines_of(summary.gpus, ACTIVITY)
    power = _lines_of(summary.gpus, (("power", "power"),))
    limit = max(gpu.power_limit_w for gpu in summary.gpus)
    return join(
        tag("h2", "GPU"),
        tag("h3", "Activity" + _over(summary.gpus)),
        lines(activity, unit="ratio", wall_s=summary.wall_s, title="GPU activity", top=1.0),
        tag("h3", "Power" + _over(summary.gpus)),
        lines(power, unit="watts", wall_s=summary.wall_s, title="GPU power", limit=limit),
        cards_table(summary),
    )


def ranks(summary: Summary) -> Html:
    if len(summary.ranks) < 2:
        return Html()
    said = "Own time is what a step takes without waiting for other ranks: the latest comes first."
    return join(tag("h2", "Ranks"), tag("p", said, class_="note"), ranks_table(summary.ranks))


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
        lines(plots, unit="ratio", wall_s=summary.wall_s, title="CPU", top=1.0),
        hosts_table(summary),
    )


def facts(summary: Summary) -> Html:
    rows = [tag("tr", tag("th", words(key), scope="row"), tag("td", value)) for key, value in summary.facts]
    marks = [
        tag("li", tag("b", seconds(mark.t)), f" rank {mark.rank}, {words(mark.what)}: {mark.text}")
        for mark in summary.marks[:MARKS_SHOWN]
    ]
    return join(
        tag("h2", "Facts") if rows or marks or summary.missing else Html(),
        listed("What was not seen", summary.missing),
        tag("div", tag("table", tag("tbody", *rows), class_="facts"), class_="scroll") if rows else Html(),
        join(tag("h3", "Events"), tag("ul", *marks, class_="marks")) if marks else Html(),
    )


# --- parts ---------------------------------------------------------------------------------------


def _prices(summary: Summary, finding: Finding) -> list[tuple[str, str]]:
    dollars = summary.dollars(finding)
    return [
        ("of the time", percent(finding.share)),
        ("of GPU time lost", seconds(finding.gpu_seconds)),
        *([("lost so far" if summary.running else "lost", money(dollars))] if dollars is not None else []),
        ("as fast without it", times(finding.speedup_if_gone)),
        ("sure", percent(finding.confidence)),
    ]


def _health(summary: Summary) -> list[tuple[str, str]]:
    computing = summary.state_s[STATES.index("compute")] / (sum(summary.state_s) or 1.0)
    pace = dict(_pace(summary))
    named = ("median step", "tokens/s", "MFU (bf16 peak)")
    return [
        ("of the time is compute", percent(computing)),
        *((name, pace[name]) for name in named if name in pace),
    ]


def _pace(summary: Summary) -> list[tuple[str, str]]:
    pace = summary.steps
    rates = [
        ("tokens/s", amount(pace.tokens_per_s)),
        ("FLOP/s", amount(pace.flops_per_s)),
        ("MFU (bf16 peak)", percent(summary.mfu)),
    ]
    return [
        ("steps", f"{pace.count:,}"),
        ("median step", seconds(pace.median_s)),
        ("95% are below", seconds(pace.p95_s)),
        ("slowest", seconds(pace.slowest_s)),
        *((name, value) for name, value in rates if value != "–"),
    ]


def _finding(summary: Summary, finding: Finding) -> Html:
    return tag(
        "article",
        tag("p", kind_of(finding), class_="kind"),
        tag("h3", sentence(finding.summary)),
        figures(_prices(summary, finding)) if finding.kind != "healthy" else Html(),
        tag(
            "div",
            listed("Evidence", finding.evidence),
            listed("What to change", finding.remedy, ordered=True),
            listed("What was not seen", finding.missing),
            class_="columns",
        ),
        class_="good" if finding.kind == "healthy" else "bad",
    )


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


def _over(devices: Sequence[DeviceSummary]) -> str:
    return f", mean of {len(devices)} cards, band from lowest to highest" if len(devices) > 1 else ""
