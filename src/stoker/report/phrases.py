"""One-line phrases for a finding or a run, the same words on every surface."""

from __future__ import annotations

from stoker.findings import Finding
from stoker.formats.sizes import counted
from stoker.report.summary import Summary
from stoker.report.units import amount, money, percent, seconds, times, words

ENDINGS = ("crashed", "preempted", "interrupted")  # they end a job: they have no price


def sentence(text: str) -> str:
    """With a capital, as a heading."""
    return text[:1].upper() + text[1:]


def kind_of(finding: Finding) -> str:
    """Kind and cause in words."""
    return words(f"{finding.kind} · {finding.cause}" if finding.cause else finding.kind)


def price_of(summary: Summary, finding: Finding) -> str:
    """What a finding costs, in one line."""
    dollars = summary.dollars(finding)
    if finding.kind in ENDINGS:
        return " · ".join([pace_of(summary), f"{percent(finding.confidence)} sure"])
    parts = [
        f"{percent(finding.share)} of the time",
        f"{seconds(finding.gpu_seconds)} of GPU time lost",
        money(dollars) if dollars is not None else "",
        f"{'at most ' if finding.at_most else ''}{times(finding.speedup_if_gone)} as fast without it",
        f"{percent(finding.confidence)} sure",
    ]
    return " · ".join(filter(None, parts))


def pace_of(summary: Summary) -> str:
    """How steps go, in one line."""
    pace = summary.steps
    if not pace.count:
        return "no step yet" if summary.running else "no step"
    rate = amount(pace.tokens_per_s, "tokens/s")
    return " · ".join(
        [
            counted(pace.count, "step"),
            f"{seconds(pace.median_s)} a step",
            *([rate] if not rate.startswith("–") else []),
        ]
    )
