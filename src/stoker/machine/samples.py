"""NVML samples: what cards do, read again and again. What a card lacks is asked for once, then left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker.machine.nvml import handles_of, open_nvml, text_of

Readings = dict[str, float]
_SLOW_S = 5.0  # energy takes 2.4 ms a call, violation counters 0.4: they are exact however seldom read

# Percent, except the throughputs, which NVML gives in MiB/s.
_SAME_NAME = (
    "graphics_util", "sm_util", "sm_occupancy", "any_tensor_util", "dram_bw_util", "fp64_util", "fp32_util",
    "fp16_util", "integer_util",
)  # fmt: skip
_GPM = {
    **{name: name.upper() for name in _SAME_NAME},
    "pcie_tx_mib": "PCIE_TX_PER_SEC",
    "pcie_rx_mib": "PCIE_RX_PER_SEC",
    "nvlink_tx_mib": "NVLINK_TOTAL_TX_PER_SEC",
    "nvlink_rx_mib": "NVLINK_TOTAL_RX_PER_SEC",
}


class Nvml:
    """All cards of the machine; opened and read in one thread."""

    def __init__(self) -> None:
        self._nvml = nvml = open_nvml()
        handles = handles_of(nvml)
        self._cards = [_Card(nvml, handle) for handle in handles]
        self._xids = _Xids(nvml, handles)

    @property
    def missing(self) -> list[str]:
        without = [str(index) for index, card in enumerate(self._cards) if not card.has_gpm]
        return [f"no GPM metrics (SM, tensor, DRAM activity) of GPU {', '.join(without)}"] if without else []

    def facts(self) -> list[dict[str, Any]]:
        """What each card is, for the node's meta file."""
        driver = self._nvml.nvmlSystemGetDriverVersion()
        return [
            {"index": index, "driver": text_of(driver), **one.facts()}
            for index, one in enumerate(self._cards)
        ]

    def read(self, t: float) -> dict[int, Readings]:
        xids = self._xids.read()
        return {index: {**card.read(t), "xid": xids} for index, card in enumerate(self._cards)}

    def close(self) -> None:
        for card in self._cards:
            card.close()
        self._nvml.nvmlShutdown()


class _Card:
    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._quick, self._slow = self._plain_looks(), self._counter_looks()
        self._slow_due = 0.0
        self._began: Readings = {}
        self._kept: Readings = {}
        self._gpm = _Gpm.of(nvml, handle)

    @property
    def has_gpm(self) -> bool:
        return self._gpm is not None

    def facts(self) -> dict[str, Any]:
        nvml, handle = self._nvml, self._handle
        limit_mw = self._tried(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
        return {
            "name": text_of(nvml.nvmlDeviceGetName(handle)),
            "power_limit_w": limit_mw / 1e3 if limit_mw else None,
            "memory_bytes": int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        }

    def read(self, t: float) -> Readings:
        found = self._look(self._quick)
        if t >= self._slow_due:
            self._slow_due = t + _SLOW_S
            counters = self._look(self._slow)
            self._began = {**counters, **self._began}
            self._kept = {name: value - self._began[name] for name, value in counters.items()}
        gpm = self._gpm.read() if self._gpm is not None else {}
        return {**found, **self._kept, **gpm}

    def close(self) -> None:
        if self._gpm is not None:
            self._gpm.close()

    def _plain_looks(self) -> dict[str, Callable[[], Any]]:
        nvml, card = self._nvml, self._handle
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        reasons = reasons or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        return {
            "util": lambda: nvml.nvmlDeviceGetUtilizationRates(card).gpu,
            "mem_util": lambda: nvml.nvmlDeviceGetUtilizationRates(card).memory,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(card) / 1e3,
            "temp_c": lambda: nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU),
            "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM),
            "mem_mhz": lambda: nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_MEM),
            "event_reasons": lambda: reasons(card),
            "fb_used": lambda: nvml.nvmlDeviceGetMemoryInfo(card).used,
        }

    def _counter_looks(self) -> dict[str, Callable[[], Any]]:
        nvml, card = self._nvml, self._handle

        def violated_s(policy: int) -> float:
            return float(nvml.nvmlDeviceGetViolationStatus(card, policy).violationTime) / 1e9

        return {
            "energy_j": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(card) / 1e3,
            "power_violation_s": lambda: violated_s(nvml.NVML_PERF_POLICY_POWER),
            "thermal_violation_s": lambda: violated_s(nvml.NVML_PERF_POLICY_THERMAL),
        }

    def _look(self, looks: dict[str, Callable[[], Any]]) -> Readings:
        """Each reading by itself. One the card does not support is not asked for again; one that failed
        this time (a reset, a timeout) leaves a gap."""
        found = {}
        for name, look in list(looks.items()):
            try:
                found[name] = float(look())
            except self._nvml.NVMLError as error:
                if getattr(error, "value", None) in self._lacking():
                    del looks[name]
        return found

    def _lacking(self) -> tuple[int, ...]:
        """Answers that stay the same however often one asks."""
        nvml = self._nvml
        return (
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_NO_PERMISSION,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_INVALID_ARGUMENT,
        )

    def _tried(self, look: Callable[[], Any]) -> Any:
        try:
            return look()
        except self._nvml.NVMLError:
            return None


class _Gpm:
    """Activity between two samples of the card's own counters; no daemon, no privileges, 0.4 ms."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._ids = {
            name: getattr(nvml, f"NVML_GPM_METRIC_{metric}")
            for name, metric in _GPM.items()
            if hasattr(nvml, f"NVML_GPM_METRIC_{metric}")
        }
        self._before, self._after = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        nvml.nvmlGpmSampleGet(handle, self._after)

    @classmethod
    def of(cls, nvml: Any, handle: Any) -> _Gpm | None:
        """None where the card or the driver has no GPM."""
        try:
            supported = nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice
            return cls(nvml, handle) if supported else None
        except (nvml.NVMLError, AttributeError):
            return None

    def read(self) -> Readings:
        """Since the reading before; nothing where both samples are of one moment."""
        nvml = self._nvml
        self._before, self._after = self._after, self._before
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(self._ids)
        for place, metric in enumerate(self._ids.values()):
            asked.metrics[place].metricId = metric
        try:
            nvml.nvmlGpmSampleGet(self._handle, self._after)
            asked.sample1, asked.sample2 = self._before, self._after
            nvml.nvmlGpmMetricsGet(asked)
        except nvml.NVMLError:
            return {}
        answers = zip(self._ids, asked.metrics, strict=False)
        return {name: float(answer.value) for name, answer in answers if not answer.nvmlReturn}

    def close(self) -> None:
        for sample in (self._before, self._after):
            self._nvml.nvmlGpmSampleFree(sample)


class _Xids:
    """Counts the driver's error events; zero where it does not tell them."""

    def __init__(self, nvml: Any, handles: list[Any]) -> None:
        self._nvml, self._count, self._set = nvml, 0, None
        try:
            events = nvml.nvmlEventSetCreate()
            for handle in handles:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            self._set = events
        except (nvml.NVMLError, AttributeError):
            pass

    def read(self) -> float:
        while self._set is not None:
            try:
                self._nvml.nvmlEventSetWait_v2(self._set, 0)
            except self._nvml.NVMLError:  # a timeout: no event is waiting
                break
            self._count += 1
        return float(self._count)
