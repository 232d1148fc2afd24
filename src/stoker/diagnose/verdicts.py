"""Verdicts: a rule answers with a finding and its price, or an abstention and its reason."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from stoker.diagnose.features import Features
from stoker.findings import Finding


@dataclass(frozen=True, kw_only=True, slots=True)
class Abstention:
    """A rule that does not speak: it saw no sign, or (`missing`) could not see."""

    kind: str
    why: str
    missing: tuple[str, ...] = ()


def priced(
    features: Features,
    kind: str,
    *,
    share: float,
    confidence: float,
    speedup: float | None = None,
    **said: object,
) -> Finding:
    """A finding that costs this share of the wall time on every card."""
    share = min(max(share, 0.0), 0.999)
    gain = speedup if speedup is not None else 1 / (1 - share)
    return Finding(
        kind=kind,
        share=round(share, 4),
        gpu_seconds=round(share * features.judged_s * features.cards, 2),
        speedup_if_gone=round(max(gain, 1.0), 3),
        confidence=confidence,
        **said,  # type: ignore[arg-type]
    )


def percent(share: float) -> str:
    return f"{100 * share:.3g}%" if share < 0.995 else f"{100 * share:.0f}%"


def listed(things: Iterable[object]) -> str:
    return ", ".join(map(str, things))


def known(value: float) -> bool:
    return not math.isnan(value)


def above(value: float, limit: float) -> bool:
    """Known and at least the limit."""
    return value >= limit


def below(value: float, limit: float) -> bool:
    """Known and under the limit."""
    return value < limit
