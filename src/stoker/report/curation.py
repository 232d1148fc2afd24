"""Curation report: the funnel from documents in to tokens out, by step and source, as lines and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stoker.formats.sizes import counted
from stoker.manifest import Manifest
from stoker.prepare.curate.statistics import Statistics
from stoker.report.html import static_page
from stoker.report.page.markup import Html, join, tag
from stoker.report.page.tables import figures
from stoker.report.units import percent, size

_SOURCES_SHOWN, _LANGUAGES_SHOWN, _CLASSES_SHOWN = 50, 30, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """Documents that reach a step, and what it drops by reason."""

    step: str
    documents: int
    dropped: dict[str, int]

    @property
    def gone(self) -> int:
        return sum(self.dropped.values())


def funnel(statistics: Statistics) -> list[Level]:
    """The steps that dropped or changed something, in the order in which documents passed them."""
    dropped: dict[str, Counter[str]] = {}
    for (step, reason, _), count in statistics.funnel.items():
        dropped.setdefault(step, Counter())[reason] += count
    named = dict.fromkeys([*statistics.order, *dropped])
    levels, left = [], statistics.documents_in
    for step in named:
        left += statistics.found.get((step, "taken_again"), 0)
        reasons = dict(dropped.get(step, Counter()).most_common())
        levels.append(Level(step=step, documents=left, dropped=reasons))
        left -= sum(reasons.values())
    return levels


def lines(url: str, manifest: Manifest, statistics: Statistics) -> list[str]:
    """The report for a terminal."""
    told = [f"dataset  {url}", f"in       {_documents(statistics.documents_in)}, {size(statistics.bytes_in)}"]
    for level in funnel(statistics):
        told.append(f"{level.step:20} {level.gone:>12,} dropped of {level.documents:,}")
        told += [f"  {reason:30} {count:>10,}" for reason, count in level.dropped.items()]
    for (step, kind), count in sorted(statistics.found.items(), key=lambda item: (item[0][0], -item[1])):
        told.append(f"{step} found {kind}: {count:,}")
    told += [
        f"skipped  {counted(count, 'document')}: {reason}" for reason, count in sorted(statistics.bad.items())
    ]
    told += _media_lines(statistics)
    told.append(
        f"out      {_documents(statistics.documents_out)}, {statistics.tokens_out:,} tokens, "
        f"{counted(len(manifest.shards), 'shard')}"
    )
    told += [f"  {row[0]}: {row[5]} tokens, {row[6]} of all" for row in _source_rows(statistics)]
    return told


def _media_lines(statistics: Statistics) -> list[str]:
    """What samples of media hold."""
    told = []
    for what, rows in media_tables(statistics):
        some = ", ".join(f"{name} {count:,}" for name, count in rows[:_CLASSES_SHOWN])
        more = f", and {len(rows) - _CLASSES_SHOWN:,} more" if len(rows) > _CLASSES_SHOWN else ""
        told.append(f"{what:20} {some}{more}")
    return told


def media_tables(statistics: Statistics) -> list[tuple[str, list[tuple[str, int]]]]:
    """Formats, sizes, classes and changes of media, each with its counts."""
    tables: dict[str, Counter[str]] = {}
    for (what, name), count in statistics.media.items():
        tables.setdefault(what.replace("_", " "), Counter())[name] += count
    return [(what, _ordered(what, rows)) for what, rows in sorted(tables.items())]


def _ordered(what: str, rows: Counter[str]) -> list[tuple[str, int]]:
    if what == "longest side":
        return sorted(rows.items(), key=lambda row: int(row[0].partition("-")[0]))
    return sorted(rows.items(), key=lambda row: (-row[1], row[0]))


def page(url: str, manifest: Manifest, statistics: Statistics) -> str:
    """The report as a page of its own."""
    parts = {
        "head": join(tag("p", "stoker", class_="brand"), tag("h1", f"What became of the documents of {url}")),
        "figures": _figures(manifest, statistics),
        "funnel": _funnel(statistics),
        "sources": _sources(statistics),
        "languages": _languages(statistics),
        "lengths": _lengths(statistics),
        "found": _found(statistics),
        "media": _media(statistics),
        "samples": _samples(statistics),
    }
    return static_page(f"Curation of {url}", parts)


def _figures(manifest: Manifest, statistics: Statistics) -> Html:
    kept = statistics.documents_out / statistics.documents_in if statistics.documents_in else 0.0
    return figures(
        [
            ("documents in", f"{statistics.documents_in:,}"),
            ("documents out", f"{statistics.documents_out:,}"),
            ("kept", percent(kept)),
            ("text in", size(statistics.bytes_in)),
            ("tokens out", f"{statistics.tokens_out:,}"),
            ("shards", f"{len(manifest.shards):,}"),
            ("unreadable", f"{sum(statistics.bad.values()):,}"),
        ]
    )


def _funnel(statistics: Statistics) -> Html:
    rows = []
    for level in funnel(statistics):
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in level.dropped.items())
        rows.append(
            (level.step, _bar(level, statistics.documents_in), f"{level.gone:,}", reasons or "nothing")
        )
    out = Level(step="out", documents=statistics.documents_out, dropped={})
    rows.append(
        ("kept", _bar(out, statistics.documents_in), "", counted(statistics.documents_out, "document"))
    )
    return join(
        tag("h2", "Documents left before each step"),
        _table(("step", "documents", "dropped", "for"), rows, class_="ranks"),
    )


def _bar(level: Level, total: int) -> Html:
    """What stays, and what this step takes, of all documents."""
    whole = max(1, total)
    pieces = (("compute", level.documents - level.gone), ("data", level.gone))
    return tag(
        "div",
        *(
            tag(
                "span",
                tag("b", f"{count:,}"),
                class_=f"piece s-{colour}",
                style=f"width:{100 * count / whole:.3f}%",
            )
            for colour, count in pieces
            if count
        ),
        class_="bar",
    )


def _sources(statistics: Statistics) -> Html:
    rows = _source_rows(statistics)
    columns = ("source", "documents in", "documents out", "text in", "text out", "tokens", "share of tokens")
    shown = _table(columns, rows[:_SOURCES_SHOWN])
    more = len(rows) - _SOURCES_SHOWN
    note = tag("p", f"and {counted(more, 'more source')}", class_="note") if more > 0 else Html()
    return join(tag("h2", "Tokens by source"), shown, note)


def _source_rows(statistics: Statistics) -> list[tuple[str, ...]]:
    names = sorted({source for _, source in statistics.sources})
    tokens = max(1, statistics.tokens_out)

    def row(name: str) -> tuple[str, ...]:
        sums = {which: statistics.sources[which, name] for which in _SUMS}
        return (
            name,
            f"{sums['documents_in']:,}",
            f"{sums['documents_out']:,}",
            size(sums["bytes_in"]),
            size(sums["bytes_out"]),
            f"{sums['tokens_out']:,}",
            percent(sums["tokens_out"] / tokens),
        )

    return [row(name) for name in names]


_SUMS = ("documents_in", "documents_out", "bytes_in", "bytes_out", "tokens_out")


def _languages(statistics: Statistics) -> Html:
    found = Counter({kind: count for (step, kind), count in statistics.found.items() if step == "language"})
    if not found:
        return Html()
    total = sum(found.values())
    rows = [
        (name, f"{count:,}", percent(count / total)) for name, count in found.most_common(_LANGUAGES_SHOWN)
    ]
    return join(tag("h2", "Languages"), _table(("language", "documents", "share"), rows))


def _lengths(statistics: Statistics) -> Html:
    if not statistics.lengths:
        return Html()
    most = max(statistics.lengths.values())
    rows = [
        (
            f"{1 << power:,} to {(2 << power) - 1:,} tokens",
            _bar(Level(step="", documents=count, dropped={}), most),
        )
        for power, count in sorted(statistics.lengths.items())
    ]
    return join(tag("h2", "Documents by length"), _table(("length", "documents"), rows, class_="ranks"))


def _found(statistics: Statistics) -> Html:
    rows = [
        (step, kind, f"{count:,}")
        for (step, kind), count in sorted(statistics.found.items())
        if step != "language"
    ]
    return join(tag("h2", "Found on the way"), _table(("step", "what", "how many"), rows)) if rows else Html()


def _media(statistics: Statistics) -> Html:
    return join(
        *(
            join(
                tag("h2", f"Media: {what}"),
                _table((what, "samples"), [(name, f"{count:,}") for name, count in rows]),
            )
            for what, rows in media_tables(statistics)
        )
    )


def _samples(statistics: Statistics) -> Html:
    articles = [
        tag(
            "article",
            tag("h3", reason),
            *(join(tag("p", one["text"]), tag("p", one["where"], class_="meta")) for one in some),
        )
        for reason, some in sorted(statistics.examples.items())
    ]
    return join(tag("h2", "Samples of what was dropped"), *articles) if articles else Html()


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, class_: str = "") -> Html:
    head = tag("thead", tag("tr", *(tag("th", column, scope="col") for column in columns)))
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row"),
            *(
                tag("td", cell, class_="wide" if class_ and place == 0 else None)
                for place, cell in enumerate(row[1:])
            ),
        )
        for row in rows
    ]
    return tag("div", tag("table", head, tag("tbody", *body), class_=class_ or None), class_="scroll")


def _documents(count: int) -> str:
    return counted(count, "document")
