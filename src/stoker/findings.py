"""A finding: what is wrong (or right), what shows it, what it costs, what to change."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One verdict with its price. "healthy" is a finding too."""

    kind: str
    summary: str
    evidence: tuple[str, ...] = ()
    remedy: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    cause: str = ""
    share: float = 0.0
    gpu_seconds: float = 0.0
    speedup_if_gone: float = 1.0
    confidence: float = 1.0
    at_most: bool = False  # the price is the most that can be gained: how much of it is was not seen

    def __post_init__(self) -> None:
        for name in ("share", "confidence"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie between 0 and 1, not {getattr(self, name)}")
        if self.speedup_if_gone < 1.0 or self.gpu_seconds < 0.0:
            raise ValueError("a finding costs nothing or something, never less than nothing")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def worst_first(findings: list[Finding]) -> list[Finding]:
    """The order of a report: most GPU time lost first, then the surer one, then by name."""
    return sorted(findings, key=lambda f: (-f.share, -f.gpu_seconds, -f.confidence, f.kind))
