"""Device summaries: cards and hosts, what they are, and their readings in base units, thinned for plots."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from stoker.recording import Floats, HostRecord, Recording
from stoker.report.readings import GPU, HOST, Reading
from stoker.report.series import Series, bin_edges, series_of


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSummary:
    """A card or a host: what it is and what was read of it, one series per reading that was taken."""

    node: str
    name: str
    series: tuple[Series, ...]
    index: int = -1  # a host has none
    power_limit_w: float = math.nan
    memory_bytes: float = math.nan
    cores: float = math.nan

    def read(self, name: str) -> Series | None:
        """A reading by its name; None where it was never taken."""
        return next((series for series in self.series if series.name == name), None)


def gpus_of(recording: Recording) -> tuple[DeviceSummary, ...]:
    """Every card that was read."""
    edges = bin_edges(recording.wall_s, _points(len(recording.gpus)))
    return tuple(
        DeviceSummary(
            node=gpu.node,
            index=gpu.index,
            name=gpu.name,
            power_limit_w=gpu.power_limit_w,
            memory_bytes=float(gpu.memory_bytes),
            series=_readings(GPU, gpu.samples.t, gpu.samples.columns, edges),
        )
        for gpu in recording.gpus
    )


def hosts_of(recording: Recording) -> tuple[DeviceSummary, ...]:
    """Every machine that was read."""
    edges = bin_edges(recording.wall_s, _points(len(recording.hosts)))
    return tuple(
        DeviceSummary(
            node=host.node,
            name=host.node,
            cores=min(float(host.cpus), host.quota_cores),
            series=_readings(HOST, host.samples.t, _with_cpu(host), edges),
        )
        for host in recording.hosts
    )


def _with_cpu(host: HostRecord) -> dict[str, Floats]:
    """A host's columns; where only single cores were read, their mean is the CPU's."""
    columns = host.samples.columns
    cores = [
        column
        for name, column in columns.items()
        if name.startswith(("cpu_", "core.")) and name[-1].isdigit()
    ]
    return columns if "cpu" in columns or not cores else {**columns, "cpu": np.mean(cores, axis=0)}


def _points(devices: int) -> int:
    """Points of a series: fewer the more devices there are, so that a report of a cluster stays small."""
    return max(100, 1000 // max(1, devices))


def _readings(
    table: Iterable[Reading], t: Floats, columns: dict[str, Floats], edges: Floats
) -> tuple[Series, ...]:
    return tuple(
        series_of(
            reading.name, unit=reading.unit, t=t, values=columns[reading.column] * reading.scale, edges=edges
        )
        for reading in table
        if reading.column in columns and not np.isnan(columns[reading.column]).all()
    )
