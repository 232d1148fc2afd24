"""What the ranks of a training write down of themselves for a test: their losses, who they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def losses(folder: Path, rank: int) -> list[str]:
    """A line a step."""
    path = folder / f"losses-{rank}"
    return path.read_text().splitlines() if path.exists() else []


def rank_pid(folder: Path, rank: int) -> int:
    return int((folder / f"pid-{rank}").read_text())
