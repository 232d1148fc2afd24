"""Cards through NVML: the home of nvidia-ml-py. Each answer that a card does not give is Unknown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from stoker.errors import MissingPackageError, require
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import Gpu

Answer = TypeVar("Answer")

# Bits of the clock event reasons that mean that something holds the clock back; idle, application clocks
# and a software power cap at full load are healthy.
_SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
_NO_ECC = "NotSupported"
_MOST_NVLINKS = 18
_READ = 0  # NVML_P2P_CAPS_INDEX_READ
_PEER_STATES = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS"}  # as nvidia-smi topo writes them


def nvml_gpus() -> tuple[str, tuple[Gpu, ...], tuple[tuple[str, ...], ...]] | Unknown:
    """The driver's version, the cards, and which reaches which; Unknown without NVML."""
    try:
        nvml = require("pynvml", extra="gpu")
        nvml.nvmlInit()
    except MissingPackageError:
        return Unknown(reason="nvidia-ml-py is not installed")
    except Exception as error:  # whatever a broken driver makes of it, another way may work
        return Unknown(reason=f"NVML: {error}")
    try:
        return cards_of(nvml)
    except Exception as error:
        return Unknown(reason=f"NVML: {error}")
    finally:
        nvml.nvmlShutdown()


def cards_of(nvml: Any) -> tuple[str, tuple[Gpu, ...], tuple[tuple[str, ...], ...]]:
    """What an opened NVML says. `nvml` is the module pynvml."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
    cards = tuple(_card(nvml, index, handle) for index, handle in enumerate(handles))
    peers = tuple(tuple(_peer(nvml, one, other) for other in handles) for one in handles)
    return _text(nvml.nvmlSystemGetDriverVersion()), cards, peers


def _card(nvml: Any, index: int, handle: Any) -> Gpu:
    def ask(name: str, *given: int) -> Any:
        return _ask(lambda: getattr(nvml, f"nvmlDeviceGet{name}")(handle, *given))

    def told(answer: Any, make: Callable[[Any], Answer]) -> Answer | Unknown:
        return answer if isinstance(answer, Unknown) else make(answer)

    return Gpu(
        index=index,
        name=told(ask("Name"), _text),
        bus=told(ask("PciInfo"), lambda pci: _text(pci.busId).lower()[-12:]),
        persistence=told(ask("PersistenceMode"), bool),
        ecc=_ecc(ask("EccMode")),
        ecc_uncorrected=told(ask("TotalEccErrors", 1, 0), int),  # uncorrected, since the driver was loaded
        remap_pending=told(ask("RemappedRows"), lambda rows: bool(rows[2])),
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
    return tuple(name for bit, name in _SLOWDOWNS.items() if bits & bit)


def _reasons(ask: Callable[..., Any]) -> Any:
    """Clock event reasons; older drivers know them by the older word."""
    now = ask("CurrentClocksEventReasons")
    return ask("CurrentClocksThrottleReasons") if isinstance(now, Unknown) else now


def _ask(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception as error:  # NVMLError and, where the library is older than the package, AttributeError
        return Unknown(reason=f"NVML: {error}")


def _ecc(answer: Any) -> bool | Unknown | None:
    if isinstance(answer, Unknown):
        return None if _NO_ECC.lower() in answer.reason.replace(" ", "").lower() else answer
    return bool(answer[0])


def _nvlinks(ask: Callable[..., Any]) -> tuple[bool, ...]:
    states = (ask("NvLinkState", link) for link in range(_MOST_NVLINKS))
    return tuple(bool(state) for state in states if not isinstance(state, Unknown))


def _peer(nvml: Any, one: Any, other: Any) -> str:
    if one is other:
        return "X"
    state = _ask(lambda: nvml.nvmlDeviceGetP2PStatus(one, other, _READ))
    return "U" if isinstance(state, Unknown) else _PEER_STATES.get(state, "U")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
