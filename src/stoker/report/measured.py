"""HTML page of a benchmark: its figures as bars beside one another, what limits each, and what to set."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.bench.figures import Bench, Figure, beside, say
from stoker.report.html import static_page
from stoker.report.page.markup import Html, join, tag


def measured_page(bench: Bench) -> str:
    """The whole page, in the report's design."""
    parts = {"head": join(tag("p", f"stoker bench {bench.verb}", class_="brand"), tag("h1", bench.of))}
    if bench.advice:
        state = "good" if bench.passed else "bad"
        parts["verdict"] = tag(
            "div", tag("p", "What to set", class_="kind"), _list(bench.advice), class_=f"card {state}"
        )
    for unit in dict.fromkeys(one.unit for one in bench.figures):
        parts[f"figures-{unit.replace('/', '-')}"] = _table(
            [one for one in bench.figures if one.unit == unit]
        )
    if bench.notes:
        parts["unknown"] = join(tag("h2", "Not measured"), _list(bench.notes))
    return static_page(f"bench {bench.verb}: {bench.of}", parts)


_TITLES = {"B/s": "Rates", "s": "Times", "1/s": "Rates", "share": "Shares", "B": "Sizes", "count": "Counts"}


def _table(figures: list[Figure]) -> Html:
    most = max(one.value for one in figures) or 1.0
    rows = [
        tag(
            "tr",
            tag("th", one.name),
            tag("td", say(one.value, one.unit)),
            tag("td", tag("meter", value=one.value / most, title=one.name)),
            tag("td", *([tag("p", one.limit)] if one.limit else []), _seen(one)),
        )
        for one in figures
    ]
    table = tag("table", tag("tbody", *rows), class_="measured")
    return join(tag("h2", _TITLES[figures[0].unit]), tag("div", table, class_="scroll"))


def _seen(figure: Figure) -> Html:
    """What was seen beside it: latencies, cores."""
    return tag("p", beside(figure), class_="seen") if figure.beside else Html()


def _list(lines: Sequence[str]) -> Html:
    return tag("ul", *(tag("li", line) for line in lines))
