"""DCGM exporter: cards through its Prometheus page, read once a sample."""

from __future__ import annotations

import http.client
import re
import urllib.request
from typing import Any

from stoker.errors import StorageError

Readings = dict[str, float]
_TIMEOUT_S = 2.0
_TROUBLE = (OSError, http.client.HTTPException)  # nobody answers, or in another way than HTTP has it
_LINE = re.compile(r"^(DCGM_\w+)\{([^}]*)\}\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

# Field, our column, and what to multiply by: profiling fields are shares, throughputs bytes a second.
_FIELDS = {
    "DCGM_FI_DEV_GPU_UTIL": ("util", 1.0),
    "DCGM_FI_DEV_MEM_COPY_UTIL": ("mem_util", 1.0),
    "DCGM_FI_DEV_POWER_USAGE": ("power_w", 1.0),
    "DCGM_FI_DEV_GPU_TEMP": ("temp_c", 1.0),
    "DCGM_FI_DEV_SM_CLOCK": ("sm_mhz", 1.0),
    "DCGM_FI_DEV_MEM_CLOCK": ("mem_mhz", 1.0),
    "DCGM_FI_DEV_FB_USED": ("fb_used", float(1 << 20)),
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": ("event_reasons", 1.0),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": ("event_reasons", 1.0),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": ("energy_j", 1e-3),
    "DCGM_FI_DEV_POWER_VIOLATION": ("power_violation_s", 1e-9),
    "DCGM_FI_DEV_THERMAL_VIOLATION": ("thermal_violation_s", 1e-9),
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": ("graphics_util", 100.0),
    "DCGM_FI_PROF_SM_ACTIVE": ("sm_util", 100.0),
    "DCGM_FI_PROF_SM_OCCUPANCY": ("sm_occupancy", 100.0),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": ("any_tensor_util", 100.0),
    "DCGM_FI_PROF_DRAM_ACTIVE": ("dram_bw_util", 100.0),
    "DCGM_FI_PROF_PIPE_FP64_ACTIVE": ("fp64_util", 100.0),
    "DCGM_FI_PROF_PIPE_FP32_ACTIVE": ("fp32_util", 100.0),
    "DCGM_FI_PROF_PIPE_FP16_ACTIVE": ("fp16_util", 100.0),
    "DCGM_FI_PROF_PCIE_TX_BYTES": ("pcie_tx_mib", 1.0 / (1 << 20)),
    "DCGM_FI_PROF_PCIE_RX_BYTES": ("pcie_rx_mib", 1.0 / (1 << 20)),
    "DCGM_FI_PROF_NVLINK_TX_BYTES": ("nvlink_tx_mib", 1.0 / (1 << 20)),
    "DCGM_FI_PROF_NVLINK_RX_BYTES": ("nvlink_rx_mib", 1.0 / (1 << 20)),
}
_COUNTED = ("energy_j", "power_violation_s", "thermal_violation_s")
_LIMIT = "DCGM_FI_DEV_POWER_MGMT_LIMIT"
_FREE = "DCGM_FI_DEV_FB_FREE"
_INSTANCES = 1000


class Dcgm:
    """One exporter; a page that cannot be fetched leaves a gap in the samples."""

    def __init__(self, url: str) -> None:
        self._url = url if url.rstrip("/").endswith("/metrics") else f"{url.rstrip('/')}/metrics"
        try:
            self._first = parse(self._fetch())
        except _TROUBLE as error:
            raise StorageError(
                f"cannot read {self._url}: {error}", hint="give the exporter's address"
            ) from error
        self._began: dict[tuple[int, str], float] = {}

    @property
    def missing(self) -> list[str]:
        seen = {column for card in self._first.values() for column in card["readings"]}
        lacks = sorted({column for column, _ in _FIELDS.values()} - seen)
        return [f"the dcgm exporter does not export {', '.join(lacks)}"] if lacks else []

    def facts(self) -> list[dict[str, Any]]:
        return [
            {
                "index": index,
                "name": card["name"],
                "power_limit_w": card["power_limit_w"],
                "memory_bytes": int(card["free_bytes"] + card["readings"].get("fb_used", 0.0)),
            }
            for index, card in sorted(self._first.items())
        ]

    def read(self, t: float) -> dict[int, Readings]:
        try:
            cards = parse(self._fetch())
        except _TROUBLE:
            return {}
        return {index: self._since_the_first(index, card["readings"]) for index, card in cards.items()}

    def close(self) -> None: ...

    def _fetch(self) -> str:
        with urllib.request.urlopen(self._url, timeout=_TIMEOUT_S) as page:
            return str(page.read().decode("utf-8", "replace"))

    def _since_the_first(self, index: int, readings: Readings) -> Readings:
        counted = {name: readings[name] for name in _COUNTED if name in readings}
        began = {name: self._began.setdefault((index, name), value) for name, value in counted.items()}
        return {**readings, **{name: value - began[name] for name, value in counted.items()}}


def parse(page: str) -> dict[int, dict[str, Any]]:
    """Cards by their number: name, limits and readings under our columns' names."""
    cards: dict[int, dict[str, Any]] = {}
    for line in page.split("\n"):
        match = _LINE.match(line)
        if not match:
            continue
        field, labels, value = match[1], dict(_LABEL.findall(match[2])), _number(match[3])
        if value is None or not labels.get("gpu", "").isdigit():
            continue
        card = cards.setdefault(
            _index(labels), {"name": "", "power_limit_w": None, "free_bytes": 0.0, "readings": {}}
        )
        slice_of = f" MIG {labels['GPU_I_PROFILE']}" if labels.get("GPU_I_PROFILE") else ""
        card["name"] = labels["modelName"] + slice_of if "modelName" in labels else card["name"]
        if field in _FIELDS:
            column, factor = _FIELDS[field]
            card["readings"][column] = value * factor
        elif field == _LIMIT:
            card["power_limit_w"] = value
        elif field == _FREE:
            card["free_bytes"] = value * (1 << 20)
    return cards


def _index(labels: dict[str, str]) -> int:
    """The card's number; a MIG instance is a card of its own: instance 3 of card 1 is 2003."""
    card, instance = int(labels["gpu"]), labels.get("GPU_I_ID", "")
    return (card + 1) * _INSTANCES + int(instance) if instance.isdigit() else card


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
