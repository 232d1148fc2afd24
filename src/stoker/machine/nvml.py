"""NVML: the one home of nvidia-ml-py, and what it says of the cards; `samples` reads again and again.

Each answer that a card does not give is Unknown.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

from stoker.errors import MissingPackageError, require
from stoker.gpus import SLOWDOWNS
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import Gpu, Inventory

Answer = TypeVar("Answer")

_NO_SUCH = "notsupported"
_FABRIC_STATES = {1: "Not Started", 2: "In Progress", 3: "Completed"}  # 0: the card has none
_MOST_NVLINKS = 18
_READ = 0  # NVML_P2P_CAPS_INDEX_READ
_PEER_STATES = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS"}  # as nvidia-smi topo writes them


def open_nvml() -> Any:
    """The module pynvml, ready to be asked; whoever opens it calls `nvmlShutdown`."""
    nvml = require("pynvml", extra="gpu")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise MissingPackageError(f"NVML: {error}", hint="install the NVIDIA driver") from error
    return nvml


def handles_of(nvml: Any) -> list[Any]:
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


def text_of(value: Any) -> str:
    """Older packages answer in bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def nvml_gpus() -> Inventory | Unknown:
    """What NVML says; Unknown without it."""
    try:
        nvml = open_nvml()
    except MissingPackageError as error:
        return Unknown(reason=error.message)
    except Exception as error:  # whatever a broken driver makes of it, another way may work
        return Unknown(reason=f"NVML: {error}")
    try:
        return cards_of(nvml)
    except Exception as error:
        return Unknown(reason=f"NVML: {error}")
    finally:
        nvml.nvmlShutdown()


def cards_of(nvml: Any) -> Inventory:
    """What an opened NVML says. `nvml` is the module pynvml."""
    handles = handles_of(nvml)
    cards = tuple(_card(nvml, index, handle) for index, handle in enumerate(handles))
    peers = tuple(tuple(_peer(nvml, one, other) for other in handles) for one in handles)
    version = _ask(lambda: int(nvml.nvmlSystemGetCudaDriverVersion_v2()))
    return Inventory(
        driver=text_of(nvml.nvmlSystemGetDriverVersion()),
        cuda=version if isinstance(version, Unknown) else f"{version // 1000}.{version % 1000 // 10}",
        cards=cards,
        peers=peers,
    )


def _card(nvml: Any, index: int, handle: Any) -> Gpu:
    def ask(name: str, *given: int) -> Any:
        return _ask(lambda: getattr(nvml, f"nvmlDeviceGet{name}")(handle, *given))

    def told(answer: Any, make: Callable[[Any], Answer]) -> Answer | Unknown:
        return answer if isinstance(answer, Unknown) else make(answer)

    rows = ask("RemappedRows")  # corrected, uncorrected, pending, failed
    return Gpu(
        index=index,
        name=told(ask("Name"), text_of),
        bus=told(ask("PciInfo"), lambda pci: text_of(pci.busId).lower()[-12:]),
        persistence=told(ask("PersistenceMode"), bool),
        ecc=_mode(ask("EccMode")),
        ecc_uncorrected=told(ask("TotalEccErrors", 1, 0), int),  # uncorrected, since the driver was loaded
        remap_pending=told(rows, lambda rows: bool(rows[2])),
        remap_failed=told(rows, lambda rows: bool(rows[3])),
        rows_remapped=told(rows, lambda rows: int(rows[1])),
        pages_retired=told(ask("RetiredPages", 1), len),  # 1: for uncorrected errors
        retire_pending=told(ask("RetiredPagesPendingStatus"), bool),
        mig=_mode(ask("MigMode")),
        fabric=_fabric(nvml, handle),
        power_limit_w=told(ask("PowerManagementLimit"), lambda milliwatts: milliwatts / 1000),
        power_default_w=told(ask("PowerManagementDefaultLimit"), lambda milliwatts: milliwatts / 1000),
        clock_set_mhz=ask("ApplicationsClock", 1),  # NVML_CLOCK_SM
        clock_default_mhz=ask("DefaultApplicationsClock", 1),
        slowdowns=told(_reasons(ask), slowdowns_of),
        performance_state=ask("PerformanceState"),
        pcie_gen=ask("CurrPcieLinkGeneration"),
        pcie_gen_max=ask("MaxPcieLinkGeneration"),
        pcie_width=ask("CurrPcieLinkWidth"),
        pcie_width_max=ask("MaxPcieLinkWidth"),
        nvlinks=_nvlinks(ask),
    )


def slowdowns_of(bits: int) -> tuple[str, ...]:
    return tuple(name for bit, name in SLOWDOWNS.items() if bits & bit)


def _reasons(ask: Callable[..., Any]) -> Any:
    """Clock event reasons; older drivers know them by the older word."""
    now = ask("CurrentClocksEventReasons")
    return ask("CurrentClocksThrottleReasons") if isinstance(now, Unknown) else now


def _ask(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception as error:  # NVMLError and, where the library is older than the package, AttributeError
        return Unknown(reason=f"NVML: {error}")


def _mode(answer: Any) -> bool | Unknown | None:
    """A switch that some cards do not have: now, and after the next reset."""
    if isinstance(answer, Unknown):
        return None if _is_lacking(answer) else answer
    return bool(answer[0])


def _is_lacking(answer: Unknown) -> bool:
    return _NO_SUCH in answer.reason.replace(" ", "").lower()


def _fabric(nvml: Any, handle: Any) -> str | Unknown | None:
    """How far the fabric manager has come with an NVSwitch card."""

    def asked() -> Any:
        told = nvml.c_nvmlGpuFabricInfo_t()
        nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(told))
        return told

    told = _ask(asked)
    if isinstance(told, Unknown):
        return None if _is_lacking(told) else told
    state = _FABRIC_STATES.get(int(told.state))
    return f"{state}, error {told.status}" if state and told.status else state


def _nvlinks(ask: Callable[..., Any]) -> tuple[bool, ...]:
    states = (ask("NvLinkState", link) for link in range(_MOST_NVLINKS))
    return tuple(bool(state) for state in states if not isinstance(state, Unknown))


def _peer(nvml: Any, one: Any, other: Any) -> str:
    if one is other:
        return "X"
    state = _ask(lambda: nvml.nvmlDeviceGetP2PStatus(one, other, _READ))
    return "U" if isinstance(state, Unknown) else _PEER_STATES.get(state, "U")
