"""Flat recordings: JSON lines, a header first, then readings and steps as they came; read into Recordings.

Recordings come from other people's scripts: a missing column, a null, an unknown kind, a torn last line or a
gap must not matter. What could not be seen is said in `facts["unseen"]`: a loader's wait that was never
measured is not a wait of zero.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stoker.errors import UnreadableError
from stoker.formats.small_json import parse_json
from stoker.gpus import peaks_of
from stoker.recording import (
    KINDS,
    Floats,
    GpuRecord,
    HostRecord,
    RankRecord,
    Recording,
    Samples,
    Spans,
    Steps,
)

FORMAT = "stoker-flat-trace/"
ABSURD = 1e24  # beyond any byte, FLOP or second of a run: a reading gone wrong
LONGEST_S = 1e9
LARGEST = 2.0**62  # that a column of whole numbers takes
Line = dict[str, Any]  # one JSON object, as it was read

# The parts of a step in the order in which a loop spends them, with the names that they may have.
_PARTS = {
    "data": ("data_wait", "data"),
    "h2d": ("h2d", "copy"),
    "compute": ("compute",),
    "forward": ("forward",),
    "backward": ("backward",),
    "optimizer": ("optimizer",),
    "collective": ("collective", "comm", "allreduce"),
    "sync": ("sync",),
    "checkpoint": ("checkpoint",),
    "evaluation": ("evaluation", "eval"),
}
_NOT_READINGS = {"kind", "t", "gpu", "index", "rank", "node", "host", "cpu"}
_QUOTAS = ("quota_cores", "cpu_quota_cores", "cpu_quota", "cgroup_cpus")


def read_flat(path: Path) -> Recording:
    """Read a flat recording."""
    header, lines = _read(path)
    shift = _origin(lines)
    by_kind: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        by_kind[line["kind"]].append({**line, "t": line["t"] - shift})
    ranks = _ranks(by_kind["step"])
    return Recording(
        title=path.stem,
        wall_s=max((line["t"] for some in by_kind.values() for line in some), default=0.0),
        ended=str(header.get("ended") or ""),
        ranks=ranks or (_rank(0, "", []),),
        gpus=_gpus(header, by_kind["gpu"]),
        hosts=_hosts(header, by_kind["host"]),
        facts=_facts(header, by_kind["step"]),
    )


def _read(path: Path) -> tuple[Line, list[Line]]:
    """The header and every line of a known kind; a torn last line is left out."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableError(
            f"{path} cannot be read: {error}", hint="give a run folder or a flat recording (JSON lines)"
        ) from error
    rows = text.split("\n")
    found = [_parse(path, number, row, last=number == len(rows)) for number, row in enumerate(rows, 1)]
    objects = [one for one in found if one]
    header = objects[0] if objects and objects[0].get("kind") == "header" else {}
    if not str(header.get("format") or FORMAT).startswith(FORMAT):
        raise UnreadableError(
            f"{path} is of format {header['format']!r}", hint=f"this version reads {FORMAT}1"
        )
    lines = [one for one in objects if one.get("kind") in ("gpu", "host", "step") and _t(one) is not None]
    if not lines:
        raise UnreadableError(
            f"{path} holds no gpu, host or step line", hint="record a run: stoker watch -- python train.py"
        )
    return header, [{**line, "t": _t(line)} for line in sorted(lines, key=lambda line: float(line["t"]))]


def _parse(path: Path, number: int, row: str, *, last: bool) -> Line:
    if not row.strip():
        return {}
    try:
        found = parse_json(row)
    except ValueError as error:
        if last:  # the writer was killed in the middle of a line
            return {}
        raise UnreadableError(
            f"{path} line {number} is not JSON: {getattr(error, 'msg', error)}",
            hint="is it a recording, one JSON object a line?",
        ) from error
    return found if isinstance(found, dict) else {}


def _t(line: Line) -> float | None:
    t = _number(line.get("t"))
    return t if abs(t) < LONGEST_S else None


def _number(value: object) -> float:
    """A reading as a float; what is no number is NaN, as a reading that could not be taken."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return math.nan
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return math.nan
    return number if abs(number) < ABSURD else math.nan


def _origin(lines: Sequence[Line]) -> float:
    """When the recording began: a piece cut out of the middle of a run starts where it was cut."""
    begins = [line["t"] - max(_total(line), 0.0) for line in lines]
    first = min(begins)
    return first if first < 0.0 or first > 1.0 else 0.0


# --- steps ----------------------------------------------------------------------------------------


def _ranks(lines: Sequence[Line]) -> tuple[RankRecord, ...]:
    by_rank: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        by_rank[_whole(line.get("rank"))].append(line)
    return tuple(_rank(rank, _node(some[0]), some) for rank, some in sorted(by_rank.items()))


def _rank(rank: int, node: str, lines: Sequence[Line]) -> RankRecord:
    ends = np.array([line["t"] for line in lines], float)
    totals = np.array([_total(line) for line in lines], float)
    before = np.concatenate([[0.0], ends[:-1]])
    # A step without a length of its own began where the one before it ended.
    starts = np.maximum(np.where(np.isnan(totals), before, ends - totals), 0.0)
    steps = Steps(
        number=np.array([_whole(line.get("step"), i + 1) for i, line in enumerate(lines)], np.int64),
        start=starts,
        end=ends,
        tokens=_column(lines, "tokens"),
        flops=_column(lines, "flops"),
    )
    nothing = Samples(t=np.zeros(0), columns={})
    gpu = _whole(lines[0].get("gpu"), rank) if lines else rank
    return RankRecord(rank=rank, node=node, gpu=gpu, spans=_spans(lines, steps), steps=steps, memory=nothing)


def _total(line: Line) -> float:
    if line["kind"] != "step":
        return 0.0
    total = _number(line.get("total"))
    if math.isnan(total):
        parts = [_part(line, names) for names in _PARTS.values()]
        known = [part for part in parts if not math.isnan(part)]
        total = sum(known) if known else math.nan
    return total


def _part(line: Line, names: Iterable[str]) -> float:
    return next((_number(line[name]) for name in names if line.get(name) is not None), math.nan)


def _spans(lines: Sequence[Line], steps: Steps) -> Spans:
    """The parts of every step one after another; what is left at its end is explained by nothing."""
    rows: list[tuple[int, float, float, int, int]] = []
    for line, start, end, number in zip(
        lines, steps.start.tolist(), steps.end.tolist(), steps.number.tolist(), strict=True
    ):
        at = start
        for kind, names in _PARTS.items():
            seconds = _part(line, names)
            if seconds > 0.0:
                size = _number(line.get("bytes")) if kind == "h2d" else 0.0
                until = min(at + seconds, end)
                rows.append((KINDS.index(kind), at, until, number, _whole(size)))
                at = until
    columns = list(zip(*rows, strict=True)) if rows else [(), (), (), (), ()]
    return Spans(
        kind=np.array(columns[0], np.uint8),
        start=np.array(columns[1], float),
        end=np.array(columns[2], float),
        step=np.array(columns[3], np.int64),
        bytes=np.array(columns[4], np.int64),
    )


# --- readings -------------------------------------------------------------------------------------


def _gpus(header: Line, lines: Sequence[Line]) -> tuple[GpuRecord, ...]:
    by_card: dict[tuple[str, int], list[Line]] = defaultdict(list)
    for line in lines:
        by_card[_node(line), _whole(line.get("gpu", line.get("index")))].append(line)
    return tuple(_gpu(header, node, index, some) for (node, index), some in sorted(by_card.items()))


def _gpu(header: Line, node: str, index: int, lines: Sequence[Line]) -> GpuRecord:
    name = str(_of_card(header.get("gpu"), index) or "")
    peaks = peaks_of(name)
    limit = _number(_of_card(header.get("power_limit_w"), index))
    memory = _number(_of_card(header.get("mem_total"), index))
    if math.isnan(limit) and peaks:
        limit = peaks.power_w
    if math.isnan(memory):
        memory = peaks.memory_gb * 1e9 if peaks else 0.0
    samples = _samples(lines)
    _in_mib(samples.columns)
    return GpuRecord(
        node=node, index=index, name=name, power_limit_w=limit, memory_bytes=int(memory), samples=samples
    )


def _in_mib(columns: dict[str, Floats]) -> None:
    """The slow PCIe counter is in kB/s; it stands in where the quick one is missing."""
    for slow, quick in (("pcie_rx_kbs", "pcie_rx_mib"), ("pcie_tx_kbs", "pcie_tx_mib")):
        if slow in columns and quick not in columns:
            columns[quick] = columns.pop(slow) / 1024


def _hosts(header: Line, lines: Sequence[Line]) -> tuple[HostRecord, ...]:
    by_node: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        by_node[_node(line)].append(line)
    return tuple(_host(header, node, some) for node, some in sorted(by_node.items()))


def _host(header: Line, node: str, lines: Sequence[Line]) -> HostRecord:
    samples = _samples(lines)
    cores = max((len(line["cpu"]) for line in lines if isinstance(line.get("cpu"), list)), default=0)
    for core in range(cores):
        samples.columns[f"core.{core}"] = np.array([_core(line.get("cpu"), core) for line in lines])
    if not cores and any("cpu" in line for line in lines):
        samples.columns["cpu"] = _column(lines, "cpu")
    for name in ("disk_read", "disk_write", "disk_reads", "net_rx", "net_tx", "nfs_read"):
        if name in samples.columns:  # since the last line: a rate says the same at any pace
            samples.columns[name] = samples.columns[name] / _gaps(samples.t)
    known = _number(header.get("cpus"))
    quotas = [quota for quota in (_number(header.get(name)) for name in _QUOTAS) if quota > 0]
    return HostRecord(
        node=node,
        cpus=int(known) if known > 0 else max(cores, 1),
        quota_cores=min(quotas, default=math.inf),
        samples=samples,
    )


def _gaps(t: Floats) -> Floats:
    gaps = np.diff(t, prepend=0.0)
    return np.maximum(gaps, 1e-3)


def _core(cpu: object, core: int) -> float:
    return _number(cpu[core]) if isinstance(cpu, list) and core < len(cpu) else math.nan


def _samples(lines: Sequence[Line]) -> Samples:
    names = {name for line in lines for name in line} - _NOT_READINGS
    columns = {name: _column(lines, name) for name in sorted(names)}
    seen = {name: column for name, column in columns.items() if not np.isnan(column).all()}
    return Samples(t=np.array([line["t"] for line in lines], float), columns=seen)


def _column(lines: Sequence[Line], name: str) -> Floats:
    return np.array([_number(line.get(name)) for line in lines], float)


def _of_card(value: object, index: int) -> object:
    """A header's fact about a card: one for all, or a list of one each."""
    if isinstance(value, list):
        return value[index] if index < len(value) else (value[0] if value else None)
    return value


def _node(line: Line) -> str:
    return str(line.get("node") or line.get("host") or "")


def _whole(value: object, otherwise: int = 0) -> int:
    number = _number(value)
    return int(number) if abs(number) < LARGEST else otherwise


def _facts(header: Line, steps: Sequence[Line]) -> dict[str, Any]:
    """What the header says of the machine and the loader; never what it says of the verdict."""
    told = {"label", "cause", "note", "scenario", "kind", "format"}
    facts = {name: value for name, value in header.items() if name not in told and value is not None}
    parts = ("data", "h2d", "compute", "checkpoint")
    facts["unseen"] = [
        part
        for part in parts
        if not any(line.get(name) is not None for line in steps for name in _PARTS[part])
    ]
    return facts
