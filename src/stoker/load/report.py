"""What a loader did and chose, for those who ask."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from stoker import spans
from stoker.load.rows import Batch
from stoker.load.tune import Choice


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderReport:
    """What a loader did and chose so far."""

    batches: int
    samples_read: int  # by this process, in whole chunks; one that was still held is not read again
    skipped_samples: int
    damaged_blocks: int
    damage: tuple[str, ...]
    healed: tuple[str, ...]
    chunk_bytes_held: int
    read_alone: bool
    reader: str
    choices: tuple[Choice, ...]


def emit_tokens(batch: Batch) -> None:
    """Say how many tokens are handed out now; nothing of a batch that has none, or is not ours any more."""
    tokens = batch.get("input_ids") if isinstance(batch, dict) else None
    if tokens is not None:
        now = time.monotonic()
        spans.emit("load.tokens", start=now, end=now, bytes=math.prod(tokens.shape))
