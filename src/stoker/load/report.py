"""What a loader did and chose, for those who ask."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.load.tune import Choice


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderReport:
    """What a loader did and chose so far."""

    batches: int
    skipped_samples: int
    damaged_blocks: int
    damage: tuple[str, ...]
    healed: tuple[str, ...]
    chunk_bytes_held: int
    read_alone: bool
    reader: str
    choices: tuple[Choice, ...]
