"""A card's events boiled down: busy and idle, kernels, copies and collectives hidden or exposed, launches.

Temporal and communication-overlap breakdowns are defined as HolisticTraceAnalysis defines them, so that both
give the same numbers: kernel time lasts from the first event of the card to the end of its last; compute is
the union of kernels that are neither collectives nor copies; overlap is the part of collectives that computes
meanwhile.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from stoker.intervals import Intervals, merged
from stoker.recording import WORK, Activity, Recording

TOP = 8  # kernels that are named
LATE_S = 1e-5  # a launch reaches the card some microseconds after its call began
LAUNCH_RUN = 10  # kernels in a row, each queued when the card had nothing left: the host does not keep up
# Kernels of cuBLAS, CUTLASS, cuDNN, Triton and FlashAttention that multiply on tensor cores, by their names.
_TENSOR = re.compile(
    r"tensorop|_s(884|1688|16816|161616|64x|88|16832)|hmma|imma|wgmma|[hi]884|[hi]1688|[hi]16816"
    r"|sm(80|86|89|90|100)_xmma|gemm_(bf16|f16|tf32|e4m3)|nvjet|bf16gemm|tf32f32|flash_(fwd|bwd)|fmha|cutlass_?3x",
    re.IGNORECASE,
)
# Of the same libraries, those that multiply in fp32 units: sm80_xmma_gemm_f32…_ffma_…, cutlass_80_simt_sgemm.
_PLAIN = re.compile(r"ffma|simt|dfma|(^|_)sgemm", re.IGNORECASE)
_MATRIX = re.compile(
    r"gemm|conv|cutlass|wgrad|dgrad|xmma|nvjet|matmul|flash|fmha|attention|_mm_", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """All runs of one kernel."""

    name: str
    count: int
    seconds: float
    share: float  # of all kernels' time
    matrix: bool  # multiplies matrices or convolves, by its name
    tensor: bool  # and does so on tensor cores


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """Copies of one direction, or collectives: their time, and how much of it no kernel hid."""

    kind: str
    count: int
    seconds: float
    exposed_s: float
    bytes: int

    @property
    def overlap(self) -> float:
        """The part of it that a kernel hid."""
        return 1 - self.exposed_s / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Worked:
    """What a card did in a window; seconds."""

    window_s: float
    kernel_s: float  # from its first event to the end of its last
    idle_s: float  # of that
    compute_s: float
    other_s: float  # busy with copies and collectives alone
    kernels: tuple[Kernel, ...]
    kernel_count: int
    moved: tuple[Moved, ...]
    tensor: float  # of the time in matrix kernels: the part on tensor cores; NaN without any
    plain: float  # of the kernels' time in matrices that are multiplied without tensor cores
    launch_runs: int
    gap_s: float  # from one kernel to the next that was queued by then; NaN where there were not enough
    launch_idle_s: float  # idle in runs of kernels that the host queued too late, each one

    @property
    def busy(self) -> float:
        """Share of the window."""
        return (self.kernel_s - self.idle_s) / self.window_s if self.window_s > 0 else 0.0


def last_look(recording: Recording) -> Worked | None:
    """The last window in which a profiler looked at a card, of the rank with most steps; None without any."""
    looked = [rank for rank in recording.ranks if rank.looks and len(rank.looks[-1].start)]
    rank = max(looked, key=lambda one: len(one.steps.end), default=None)
    return worked(rank.looks[-1]) if rank else None


def busy_of(activity: Activity) -> Intervals:
    """When the card did anything."""
    return merged(activity.start, activity.end)


def worked(activity: Activity) -> Worked:
    """Boil one window down."""
    busy = busy_of(activity)
    compute = _union(activity, "kernel")
    kernel_s = float(busy.end[-1] - busy.start[0]) if len(busy.start) else 0.0
    runs, idle_s = _launching(activity)
    kernels = _kernels(activity)
    return Worked(
        window_s=activity.end_s - activity.start_s,
        kernel_s=kernel_s,
        idle_s=kernel_s - busy.seconds,
        compute_s=compute.seconds,
        other_s=busy.seconds - compute.seconds,
        kernels=kernels[:TOP],
        kernel_count=sum(one.count for one in kernels),
        moved=tuple(_moved(activity, kind, compute) for kind in WORK[1:] if _of(activity, kind).any()),
        tensor=_tensor(kernels),
        plain=sum(one.share for one in kernels if one.matrix and not one.tensor),
        launch_runs=runs,
        launch_idle_s=idle_s,
        gap_s=_gap_s(activity),
    )


def _of(activity: Activity, kind: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = activity.kind == WORK.index(kind)
    return found


def _union(activity: Activity, kind: str) -> Intervals:
    which = _of(activity, kind)
    return merged(activity.start[which], activity.end[which])


def _kernels(activity: Activity) -> tuple[Kernel, ...]:
    which = _of(activity, "kernel") | _of(activity, "collective")
    took = (activity.end - activity.start)[which]
    count = np.bincount(activity.name[which], minlength=len(activity.names))
    seconds = np.bincount(activity.name[which], took, minlength=len(activity.names)).astype(float)
    total = float(seconds.sum())
    return tuple(
        Kernel(
            name=activity.names[at],
            count=int(count[at]),
            seconds=float(seconds[at]),
            share=float(seconds[at]) / total if total > 0 else 0.0,
            matrix=bool(_MATRIX.search(activity.names[at]) or _TENSOR.search(activity.names[at])),
            tensor=bool(_TENSOR.search(activity.names[at]) and not _PLAIN.search(activity.names[at])),
        )
        for at in np.argsort(-seconds, kind="stable").tolist()
        if count[at]
    )


def _tensor(kernels: tuple[Kernel, ...]) -> float:
    matrix = [one for one in kernels if one.matrix]
    total = sum(one.seconds for one in matrix)
    return sum(one.seconds for one in matrix if one.tensor) / total if total > 0 else float("nan")


def _moved(activity: Activity, kind: str, compute: Intervals) -> Moved:
    which, union = _of(activity, kind), _union(activity, kind)
    return Moved(
        kind=kind,
        count=int(which.sum()),
        seconds=union.seconds,
        exposed_s=union.seconds - union.shared(compute),
        bytes=int(activity.bytes[which].sum()),
    )


def _gap_s(activity: Activity) -> float:
    """How long the card takes from one kernel to the next where the host is not what it waits for."""
    which = _of(activity, "kernel")
    order = np.argsort(activity.start[which], kind="stable")
    start, end, launched = (
        column[which][order] for column in (activity.start, activity.end, activity.launched)
    )
    between = start[1:] - end[:-1]
    queued = (launched[1:] < end[:-1] - LATE_S) & (between >= 0) & (between < 10 * LATE_S)
    return float(np.median(between[queued])) if queued.sum() >= LAUNCH_RUN else math.nan


def _launching(activity: Activity) -> tuple[int, float]:
    """Runs of kernels that were queued only when the card had worked off everything before them."""
    order = np.argsort(activity.start, kind="stable")
    start, launched = activity.start[order], activity.launched[order]
    if len(start) < 2:
        return 0, 0.0
    done = np.concatenate([[np.inf], np.maximum.accumulate(activity.end[order])[:-1]])
    starved = launched >= done
    edge = np.diff(np.concatenate([[False], starved, [False]]).astype(np.int8))
    first, last = np.flatnonzero(edge == 1), np.flatnonzero(edge == -1)
    long = last - first >= LAUNCH_RUN
    idle = np.concatenate([[0.0], np.cumsum(np.where(starved, np.maximum(start - done, 0.0), 0.0))])
    return int(long.sum()), float((idle[last[long]] - idle[first[long]]).sum())
