"""Shown readings of cards and hosts: which column they come from, in which base unit.

Metrics, plots and the panel take names and units from here: a reading added to a table appears everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reading:
    """A reading in its base unit: the column's value times `scale`."""

    name: str
    unit: str  # ratio, watts, celsius, hertz, bytes, bytes_per_second
    column: str
    help: str
    scale: float = 1.0


GPU = (
    Reading(
        "utilization",
        "ratio",
        "util",
        "Share of time in which any kernel ran; a spinning kernel counts too.",
        0.01,
    ),
    Reading("sm_active", "ratio", "sm_util", "Share of the multiprocessors that had work.", 0.01),
    Reading("tensor_active", "ratio", "any_tensor_util", "Share of time in which tensor cores worked.", 0.01),
    Reading("dram_active", "ratio", "dram_bw_util", "Share of the memory bandwidth in use.", 0.01),
    Reading("power", "watts", "power_w", "Power drawn."),
    Reading("temperature", "celsius", "temp_c", "Temperature of the chip."),
    Reading("sm_clock", "hertz", "sm_mhz", "Clock of the multiprocessors.", 1e6),
    Reading("memory_used", "bytes", "fb_used", "Device memory in use."),
    Reading(
        "pcie_received", "bytes_per_second", "pcie_rx_mib", "Bytes per second from the host over PCIe.", 2**20
    ),
)

HOST = (
    Reading("cpu_busy", "ratio", "cpu", "Mean use of the allowed cores.", 0.01),
    Reading(
        "cpu_iowait",
        "ratio",
        "iowait",
        "Share of time in which cores idled while reads or writes were under way.",
        0.01,
    ),
    Reading("shm_used", "bytes", "shm_used", "Bytes in use in /dev/shm."),
    Reading("shm_size", "bytes", "shm_total", "Size of /dev/shm."),
    Reading("memory_available", "bytes", "mem_avail", "Memory that can still be had."),
    Reading("disk_read", "bytes_per_second", "disk_read", "Bytes per second from disks."),
    Reading("disk_written", "bytes_per_second", "disk_write", "Bytes per second to disks."),
)
