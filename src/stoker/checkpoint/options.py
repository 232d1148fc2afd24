"""What a Checkpointer can be told, and what it tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal

from stoker.checkpoint.storm import Limits
from stoker.errors import UsageError
from stoker.saved.layout import CHUNK_BYTES
from stoker.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointOptions:
    """How to save. `docs/guides/checkpoint.md` says when to use which.

    every: save at multiples of this step, or "auto": as often as measured costs and `mtbf_s` advise
    keep: how many checkpoints to keep in each tier; 0 keeps all
    overlap: copy during the next forward and backward; the optimizer's next step waits for the copy
    max_host_bytes: host memory for a snapshot; a larger state is copied and written in waves
    when_busy: what to do when a save is due while one is still being written
    on_failure: what to do at the next step when a save failed in the background
    timeout_s: how long ranks wait for each other, and a drain for a store that is away
    board: HOST:PORT of rank 0, for several nodes whose checkpoint folder is not shared
    busy: says when something needs the network more than a drain; a saved stoker loader says so itself
    mtbf_s: seconds between failures of the whole job, if you know better than the default for its size
    """

    every: int | Literal["auto"] = 0
    keep: int = 0
    overlap: bool = False
    max_host_bytes: int = 0
    when_busy: Literal["wait", "skip"] = "wait"
    on_failure: Literal["raise", "warn"] = "raise"
    timeout_s: float = 600.0
    limits: Limits = field(default_factory=Limits)
    board: str = ""
    busy: Callable[[], bool] | None = None
    mtbf_s: float = 0.0
    chunk_bytes: int = CHUNK_BYTES
    world: World = field(default_factory=World.from_environ)

    def __post_init__(self) -> None:
        if self.every != "auto" and not _is_count(self.every):
            raise UsageError(f"every={self.every!r} is no interval", hint='give steps, 0 or "auto"')
        for name in ("keep", "max_host_bytes"):
            if not _is_count(getattr(self, name)):
                raise UsageError(f"{name}={getattr(self, name)!r} cannot work", hint="give a count, or 0")
        for name, allowed in (("when_busy", ("wait", "skip")), ("on_failure", ("raise", "warn"))):
            if getattr(self, name) not in allowed:
                raise UsageError(
                    f"{name}={getattr(self, name)!r} is unknown", hint=f"use {' or '.join(allowed)}"
                )
        if self.chunk_bytes <= 0 or self.chunk_bytes % 4096:
            raise UsageError(
                f"chunk_bytes={self.chunk_bytes} is not a multiple of 4096", hint="leave it at its default"
            )


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and int(value) >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointReport:
    """What a checkpointer did so far."""

    saves: int = 0
    skipped: int = 0
    failed: int = 0
    drained: int = 0
    bytes: int = 0  # of the last save, on this rank
    host_bytes: int = 0
    stall_s: float = 0.0  # how long the loop stood still for the last save, before an optimizer's step too
    durable_s: float = 0.0  # from the call of the last save until it was durable
    last: str = ""
