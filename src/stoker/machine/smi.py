"""nvidia-smi: cards through the program, for machines without nvidia-ml-py."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar
from xml.etree import ElementTree

from stoker.machine.plain import Unknown
from stoker.machine.snapshot import Gpu, Inventory

Answer = TypeVar("Answer")

# Without persistence mode each call wakes the driver anew, which takes a second or more.
_PATIENCE_S = 10.0
_SLOWDOWNS = {
    "hw_slowdown": "hardware slowdown",
    "sw_thermal_slowdown": "software thermal slowdown",
    "hw_thermal_slowdown": "hardware thermal slowdown",
    "hw_power_brake_slowdown": "power brake",
}


def smi_gpus() -> Inventory | Unknown:
    """What the program says; Unknown without it."""
    said = _run("-q", "-x")
    if isinstance(said, Unknown):
        return said
    try:
        found = cards_of(said)
    except (ElementTree.ParseError, ValueError) as error:
        return Unknown(reason=f"nvidia-smi -q -x: {error}")
    return replace(found, cards=_with_links(found.cards), peers=_peers(len(found.cards)))


def cards_of(xml: str) -> Inventory:
    """What `nvidia-smi -q -x` says; peers are told by another question."""
    root = ElementTree.fromstring(xml)
    return Inventory(
        driver=root.findtext("driver_version", ""),
        cuda=root.findtext("cuda_version") or Unknown(reason="nvidia-smi says no CUDA version"),
        cards=tuple(_card(index, node) for index, node in enumerate(root.iter("gpu"))),
    )


def peers_of(table: str) -> tuple[tuple[str, ...], ...]:
    """The matrix of `nvidia-smi topo -p2p r`: X, OK, or two or three letters that say why not."""
    rows = [line.split() for line in table.splitlines()]
    return tuple(tuple(row[1:]) for row in rows if row and row[0].startswith("GPU") and "X" in row)


def links_of(said: str) -> list[tuple[bool, ...]]:
    """The links of each card of `nvidia-smi nvlink -s`."""
    found: list[tuple[bool, ...]] = []
    for line in map(str.strip, said.splitlines()):
        if line.startswith("GPU "):
            found.append(())
        elif line.startswith("Link ") and found:
            found[-1] = (*found[-1], "inactive" not in line.lower())
    return found


def _card(index: int, node: ElementTree.Element) -> Gpu:
    def ask(path: str, make: Callable[[str], Answer]) -> Answer | Unknown:
        text = (node.findtext(path) or "").strip()
        try:
            return make(text)
        except (ValueError, IndexError, KeyError):
            return Unknown(reason=f"nvidia-smi says {path.rpartition('/')[2]} {text or 'nothing'}")

    width, gen = "pci/pci_gpu_link_info/link_widths", "pci/pci_gpu_link_info/pcie_gen"
    return Gpu(
        index=index,
        name=ask("product_name", _some),
        bus=ask("pci/pci_bus_id", lambda text: _some(text).lower()[-12:]),
        persistence=ask("persistence_mode", _switch),
        ecc=_mode(node.findtext("ecc_mode/current_ecc")),
        ecc_uncorrected=_uncorrected(node),
        remap_pending=ask("remapped_rows/remapped_row_pending", _switch),
        remap_failed=ask("remapped_rows/remapped_row_failure", _switch),
        rows_remapped=ask("remapped_rows/remapped_row_unc", _whole),
        pages_retired=_first(
            ask("retired_pages/double_bit_retirement/retired_count", _whole),
            ask("retired_pages/double_bit_retirement/retired_page_count", _whole),
        ),
        retire_pending=ask("retired_pages/pending_retirement", _switch),
        mig=_mode(node.findtext("mig_mode/current_mig")),
        fabric=_fabric(node),
        power_limit_w=_first(
            ask("gpu_power_readings/current_power_limit", _real), ask("power_readings/power_limit", _real)
        ),
        power_default_w=_first(
            ask("gpu_power_readings/default_power_limit", _real),
            ask("power_readings/default_power_limit", _real),
        ),
        clock_set_mhz=ask("applications_clocks/graphics_clock", _whole),
        clock_default_mhz=ask("default_applications_clocks/graphics_clock", _whole),
        slowdowns=_slowdowns(node),
        performance_state=ask("performance_state", lambda text: int(text.lstrip("P"))),
        pcie_gen=ask(f"{gen}/current_link_gen", _whole),
        pcie_gen_max=ask(f"{gen}/max_link_gen", _whole),
        pcie_width=ask(f"{width}/current_link_width", lambda text: int(text.rstrip("x"))),
        pcie_width_max=ask(f"{width}/max_link_width", lambda text: int(text.rstrip("x"))),
    )


def _with_links(cards: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    said = _run("nvlink", "-s")
    if isinstance(said, Unknown):
        return tuple(replace(card, nvlinks=said) for card in cards)
    links = links_of(said)
    return tuple(replace(card, nvlinks=links[n] if n < len(links) else ()) for n, card in enumerate(cards))


def _peers(count: int) -> tuple[tuple[str, ...], ...] | Unknown:
    if count < 2:
        return (("X",),) * count
    said = _run("topo", "-p2p", "r")
    return said if isinstance(said, Unknown) else peers_of(said)


def _run(*arguments: str) -> str | Unknown:
    try:
        return subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_PATIENCE_S, check=True
        ).stdout
    except FileNotFoundError:
        return Unknown(reason="nvidia-smi is not installed")
    except (OSError, subprocess.SubprocessError) as error:
        return Unknown(reason=f"nvidia-smi: {error}")


def _slowdowns(node: ElementTree.Element) -> tuple[str, ...] | Unknown:
    for group in ("clocks_event_reasons", "clocks_throttle_reasons"):  # the older word
        if (reasons := node.find(group)) is not None:
            return tuple(
                name
                for key, name in _SLOWDOWNS.items()
                for one in reasons
                if one.tag.endswith(f"reason_{key}") and (one.text or "").strip() == "Active"
            )
    return Unknown(reason="nvidia-smi names no clock event reasons")


def _uncorrected(node: ElementTree.Element) -> int | Unknown:
    errors = node.find("ecc_errors/volatile")
    if errors is None:
        return Unknown(reason="nvidia-smi counts no ECC errors")
    counts = [one.text or "" for one in errors if "uncorrectable" in one.tag]
    return sum(int(text) for text in counts if text.strip().isdigit())


def _fabric(node: ElementTree.Element) -> str | None:
    """The state of the fabric below an NVSwitch card; others say N/A or nothing."""
    state, status = (node.findtext(f"fabric/{name}", "N/A").strip() for name in ("state", "status"))
    if state in ("N/A", ""):
        return None
    return state if status in ("Success", "N/A", "") else f"{state}, {status}"


def _mode(text: str | None) -> bool | None:
    """A switch that some cards do not have."""
    return None if text is None or text.strip() in ("N/A", "[N/A]", "") else text.strip() == "Enabled"


def _first(one: Answer | Unknown, other: Answer | Unknown) -> Answer | Unknown:
    return other if isinstance(one, Unknown) else one


def _switch(text: str) -> bool:
    return {"Enabled": True, "Yes": True, "Disabled": False, "No": False}[text]


def _whole(text: str) -> int:
    return int(text.split()[0])


def _real(text: str) -> float:
    return float(text.split()[0])


def _some(text: str) -> str:
    if not text:
        raise ValueError("nothing")
    return text
