"""Cards and the software under them: NVML, else nvidia-smi, else what the PCI bus shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker.machine.files import Files, node_or_none
from stoker.machine.nvml import nvml_gpus
from stoker.machine.plain import Unknown
from stoker.machine.smi import smi_gpus
from stoker.machine.snapshot import Gpu, GpuStack

_NVIDIA, _DISPLAY, _NO_PCI = "0x10de", ("0x0300", "0x0302"), "/sys/bus/pci/devices is not there"


def read_cards(files: Files, environ: Mapping[str, str]) -> tuple[tuple[Gpu, ...] | Unknown, GpuStack]:
    """The cards, and their driver and modules."""
    on_bus = _on_bus(files)
    stack = GpuStack(
        on_bus=on_bus,
        peer_memory=_loaded(files, "nvidia_peermem"),
        nvidia_fs=_loaded(files, "nvidia_fs"),
        cufile=_cufile_installed(),
        cufile_compat=_compat(files, environ),
    )
    said: Any = nvml_gpus()  # both ways give a driver, cards and peers, or say why not
    if isinstance(said, Unknown):
        unread = said
        said = smi_gpus()
        if isinstance(said, Unknown):
            reason = Unknown(reason=f"{unread.reason}; {said.reason}")
            return () if on_bus == 0 else reason, replace(stack, driver=reason, peers=reason)
    driver, cards, peers = said
    placed = tuple(replace(card, numa_node=_node(files, card)) for card in cards)
    return placed, replace(stack, driver=driver, peers=peers)


def _on_bus(files: Files) -> int | Unknown:
    base = "/sys/bus/pci/devices"
    if not files.exists(base):
        # a virtual machine without PCI, or a sandbox that hides it: the driver's own devices then tell
        shown = [name for name in files.names("/dev") if name.removeprefix("nvidia").isdigit()]
        return len(shown) or (Unknown(reason=_NO_PCI) if files.exists("/dev/nvidiactl") else 0)
    return sum(
        files.text(f"{base}/{name}/vendor") == _NVIDIA
        and str(files.text(f"{base}/{name}/class")).startswith(_DISPLAY)
        for name in files.names(base)
    )


def _node(files: Files, card: Gpu) -> int | Unknown | None:
    if isinstance(card.bus, Unknown):
        return card.bus
    return files.parsed(f"/sys/bus/pci/devices/{card.bus}/numa_node", node_or_none)


def _loaded(files: Files, module: str) -> bool | Unknown:
    if not files.exists("/sys/module"):
        return Unknown(reason="/sys/module is not there")
    return files.exists(f"/sys/module/{module}")


def _cufile_installed() -> bool:
    from ctypes.util import find_library

    return find_library("cufile") is not None or any(Path("/usr/local").glob("cuda*/lib64/libcufile.so*"))


def _compat(files: Files, environ: Mapping[str, str]) -> bool | Unknown:
    """cuFile's own default is to allow it; its file has comments, which JSON has not."""
    path = environ.get("CUFILE_ENV_PATH_JSON") or "/etc/cufile.json"
    if not files.exists(path):
        return True

    def allowed(text: str) -> bool:
        lines = (line for line in text.splitlines() if not line.lstrip().startswith("//"))
        bare = "\n".join(line.partition(" //")[0] for line in lines)
        return bool(json.loads(bare).get("properties", {}).get("allow_compat_mode", True))

    return files.parsed(path, allowed)
