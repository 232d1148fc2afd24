"""Options and report of a Checkpointer: what it can be told, and what it tells."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, Literal

from stoker.checkpoint.leave import signal_number
from stoker.checkpoint.saved.keep import KeepRules
from stoker.checkpoint.saved.layout import CHUNK_BYTES
from stoker.checkpoint.storm import Limits
from stoker.errors import UsageError
from stoker.options import check_choices
from stoker.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOutcome:
    """How a save ended: durable as `name`, or failed with `error`."""

    step: int
    name: str = ""
    seconds: float = 0.0  # from its call
    error: BaseException | None = None


def _to_stderr(line: str) -> None:
    print(f"stoker: {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointOptions:
    """The options of `Checkpointer`: to add one, add a field. Its guide says when to use which."""

    root: Annotated[str | Path, "the folder of checkpoints, on this node or shared by all"] = field(
        kw_only=False
    )
    remote: Annotated[str, "a store to which every checkpoint is copied: s3://bucket/run1"] = ""
    every: Annotated[
        int | Literal["auto"],
        'save at multiples of this step; "auto": as often as measured costs and `mtbf_s` advise; 0: only '
        "when `save` is called",
    ] = 0
    keep: Annotated[int, "how many good checkpoints to keep in each tier; 0 keeps all"] = 0
    max_local_bytes: Annotated[
        int,
        "how much room checkpoints may take here; where one more would take more, the oldest go, also of "
        "those that `keep` keeps, never the newest that was read back; 0: no limit",
    ] = 0
    keep_best: Annotated[int, "keep so many with the best `metric`, too: `save(step, metric=...)`"] = 0
    best: Annotated[Literal["min", "max"], "which metric is the best one"] = "min"
    keep_every_s: Annotated[float, "keep one in every so many seconds, too, say 3600"] = 0.0
    overlap: Annotated[
        bool, "copy during the next forward and backward; the optimizer's next step waits for the copy"
    ] = False
    max_host_bytes: Annotated[
        int, "host memory for a snapshot; a larger state is copied and written in waves; 0: no limit"
    ] = 0
    when_busy: Annotated[
        Literal["wait", "skip"], "what to do when a save is due while one is still being written"
    ] = "wait"
    on_failure: Annotated[
        Literal["raise", "warn"], "what to do at the next step when a save failed in the background"
    ] = "raise"
    on_drain_failure: Annotated[
        Literal["raise", "warn"], "the same for one that is saved here and did not get to the remote tier"
    ] = "warn"
    on_tidy_failure: Annotated[
        Literal["raise", "warn"], "the same for older checkpoints that could not be deleted"
    ] = "warn"
    timeout_s: Annotated[
        float,
        "how long ranks wait for each other while nothing moves, and a store may be away before the loop is "
        "told; no request to a store takes longer, nor than a minute",
    ] = 600.0
    limits: Annotated[Limits, "how many ranks write at once, and how fast: see Limits"] = field(
        default_factory=Limits
    )
    board: Annotated[str, "HOST:PORT of rank 0, for several nodes whose checkpoint folder is not shared"] = ""
    replicas: Annotated[
        Literal["check", "first"],
        "where ranks say that they hold a DTensor alike and do not: refuse, or take the first one's",
    ] = "check"
    busy: Annotated[
        Callable[[], bool] | None,
        "says when something needs the network more than a drain; a saved stoker loader says so itself",
    ] = None
    mtbf_s: Annotated[
        float, "seconds between failures of the whole job, if you know better than the default for its size"
    ] = 0.0
    save_on_signal: Annotated[
        Sequence[str],
        'signals that mean "leave soon", say ("SIGTERM", "SIGUSR1"), to whichever rank they come: all save '
        "after the same step, and `should_leave` says so",
    ] = ()
    grace_s: Annotated[float, "seconds from such a signal to the end of the job"] = (
        30.0  # what Kubernetes and Slurm give when nothing else was said
    )
    on_save: Annotated[
        Callable[[SaveOutcome], None] | None,
        "called when a save is durable or has failed, on every rank, from a thread of its own",
    ] = None
    say: Annotated[
        Callable[[str], None], "takes the lines that rank 0 has for the log; by default they go to stderr"
    ] = _to_stderr
    chunk_bytes: Annotated[int, "of a file that are hashed and written at once, a multiple of 4096"] = (
        CHUNK_BYTES
    )
    world: Annotated[
        World, "which rank of how many this is; as torch.distributed or the launcher's environment says"
    ] = field(default_factory=World.here)

    def __post_init__(self) -> None:
        if self.every != "auto" and not _is_count(self.every):
            raise UsageError(f"every={self.every!r} is no interval", hint='give steps, 0 or "auto"')
        for name in ("keep", "keep_best", "max_host_bytes", "max_local_bytes"):
            if not _is_count(getattr(self, name)):
                raise UsageError(f"{name}={getattr(self, name)!r} cannot work", hint="give a count, or 0")
        check_choices(self)
        if isinstance(self.save_on_signal, str):
            raise UsageError(
                f"save_on_signal={self.save_on_signal!r} is one word",
                hint=f"give several: ({self.save_on_signal!r},)",
            )
        for name in self.save_on_signal:
            signal_number(name)
        if self.grace_s <= 0:
            raise UsageError(f"grace_s={self.grace_s} is no time to save in", hint="give seconds, say 30")
        if self.mtbf_s < 0 or math.isnan(self.mtbf_s):
            raise UsageError(
                f"mtbf_s={self.mtbf_s} is no time between failures", hint="give seconds, say 86400"
            )
        if self.chunk_bytes <= 0 or self.chunk_bytes % 4096:
            raise UsageError(
                f"chunk_bytes={self.chunk_bytes} is not a multiple of 4096", hint="leave it at its default"
            )

    @property
    def rules(self) -> KeepRules:
        return KeepRules(best=self.keep_best, best_is=self.best, every_s=self.keep_every_s)

    @property
    def remote_timeout_s(self) -> float:
        """The deadline of every request to the remote tier."""
        return min(self.timeout_s, 60.0)


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and int(value) >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointReport:
    """What a checkpointer did so far."""

    saves: int = 0
    skipped: int = 0
    failed: int = 0
    drained: int = 0
    owed: str = ""  # the newest checkpoint that is here, and not in the remote tier
    bytes: int = 0  # of the last save, on this rank
    host_bytes: int = 0
    stall_s: float = 0.0  # how long the loop stood still for the last save, before an optimizer's step too
    check_s: float = (
        0.0  # of the stalls so far, to compare what ranks hold alike and to prove an overlapped copy
    )
    lost_s: float = (
        0.0  # what the last save cost the loop: its stall, and the slower steps while it was written
    )
    durable_s: float = 0.0  # from the call of the last save until it was durable
    last: str = ""


def as_metric(metric: object) -> float | None:
    """A metric as a number: also from a tensor or numpy's, of which there is one."""
    if metric is None:
        return None
    try:
        return float(metric)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise UsageError(f"metric={metric!r} is no number", hint="give one number, say a loss") from error


def telling(tell: Callable[[SaveOutcome], None], step: int) -> Callable[[Future[Any]], None]:
    """Tells a user's function how a save ended; what that raises is no failure of the save."""

    def told(done: Future[Any]) -> None:
        error = done.exception()
        ended = SaveOutcome(step=step, error=error)
        if error is None:
            ended = SaveOutcome(step=step, name=done.result().name, seconds=done.result().durable_s)
        try:
            tell(ended)
        except Exception as wrong:
            warnings.warn(f"on_save failed after step {step}: {wrong!r}", RuntimeWarning, stacklevel=2)

    return told
