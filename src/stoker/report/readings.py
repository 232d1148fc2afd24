"""The readings of cards and hosts that are shown: which column they come from, in which base unit.

Metrics, plots and the panel take names and units from here: a reading added to a table appears everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A reading in its base unit: the column's value times `scale`."""

    name: str
    unit: str  # ratio, watts, celsius, hertz, bytes, bytes_per_second
    column: str
    scale: float = 1.0
    help: str


GPU = (
    Reading(
        name="utilization",
        unit="ratio",
        column="util",
        scale=0.01,
        help="Share of time in which any kernel ran; a spinning kernel counts too.",
    ),
    Reading(
        name="sm_active",
        unit="ratio",
        column="sm_util",
        scale=0.01,
        help="Share of the multiprocessors that had work.",
    ),
    Reading(
        name="tensor_active",
        unit="ratio",
        column="any_tensor_util",
        scale=0.01,
        help="Share of time in which tensor cores worked.",
    ),
    Reading(
        name="dram_active",
        unit="ratio",
        column="dram_bw_util",
        scale=0.01,
        help="Share of the memory bandwidth in use.",
    ),
    Reading(name="power", unit="watts", column="power_w", help="Power drawn."),
    Reading(name="temperature", unit="celsius", column="temp_c", help="Temperature of the chip."),
    Reading(name="sm_clock", unit="hertz", column="sm_mhz", scale=1e6, help="Clock of the multiprocessors."),
    Reading(name="memory_used", unit="bytes", column="fb_used", help="Device memory in use."),
    Reading(
        name="pcie_received",
        unit="bytes_per_second",
        column="pcie_rx_mib",
        scale=2**20,
        help="Bytes per second from the host over PCIe.",
    ),
)

HOST = (
    Reading(name="cpu_busy", unit="ratio", column="cpu", scale=0.01, help="Mean use of the allowed cores."),
    Reading(
        name="cpu_iowait",
        unit="ratio",
        column="iowait",
        scale=0.01,
        help="Share of time in which cores idled while reads or writes were under way.",
    ),
    Reading(name="shm_used", unit="bytes", column="shm_used", help="Bytes in use in /dev/shm."),
    Reading(name="shm_size", unit="bytes", column="shm_total", help="Size of /dev/shm."),
    Reading(name="memory_available", unit="bytes", column="mem_avail", help="Memory that can still be had."),
    Reading(
        name="disk_read", unit="bytes_per_second", column="disk_read", help="Bytes per second from disks."
    ),
    Reading(
        name="disk_written", unit="bytes_per_second", column="disk_write", help="Bytes per second to disks."
    ),
)
