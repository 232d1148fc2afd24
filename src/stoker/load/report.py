"""Loader statistics: what a loader did and chose, for those who ask."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from stoker import spans
from stoker.load.assembly.rows import Batch
from stoker.load.media.av.sounds import ClipReport
from stoker.load.media.images import ImageReport
from stoker.load.prefetch.tune import Choice


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderReport:
    """What a loader did and chose so far."""

    batches: int
    samples_read: int  # by this process, in whole chunks; one that was still held is not read again
    skipped_samples: int
    left_out_samples: int  # of each epoch, because `skip=` named a document in them
    damaged_blocks: int
    damage: tuple[str, ...]
    healed: tuple[str, ...]
    mixed_samples: tuple[int, ...]  # of each dataset of a blend, on all ranks since the job began
    chunk_bytes_held: int
    read_alone: bool
    reader: str
    read_factor: float  # how often all ranks together read a sample; 1: each keeps to lanes of its own
    choices: tuple[Choice, ...]
    waited_s: float  # by the consumer for a batch, since the loader last began, in all
    images: ImageReport | None  # where images are decoded
    audio: ClipReport | None  # where sound is
    video: ClipReport | None  # where videos are
    limit: str  # what keeps it from reading more at once while reads are waited for; empty if nothing does


def emit_tokens(batch: Batch) -> None:
    """Say how many tokens are handed out now; nothing of a batch that has none, or is not ours any more."""
    tokens = batch.get("input_ids") if isinstance(batch, dict) else None
    if tokens is not None:
        now = time.monotonic()
        spans.emit("load.tokens", start=now, end=now, bytes=math.prod(tokens.shape))
