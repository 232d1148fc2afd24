"""GPU inventory: cards and the software under them, by NVML, else nvidia-smi, else what the PCI bus shows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from stoker.machine.files import Files, node_or_none
from stoker.machine.nvml import nvml_gpus
from stoker.machine.pci import bridges_above, read_iommu, read_link, redirecting
from stoker.machine.plain import Unknown
from stoker.machine.smi import smi_gpus
from stoker.machine.snapshot import Gpu, GpuStack

_NVIDIA, _DISPLAY, _NO_PCI = "0x10de", ("0x0300", "0x0302"), "/sys/bus/pci/devices is not there"


def read_cards(files: Files, environ: Mapping[str, str]) -> tuple[tuple[Gpu, ...] | Unknown, GpuStack]:
    """The cards, and their driver and modules."""
    on_bus = _on_bus(files)
    torch, torch_cuda = _torch()
    stack = GpuStack(
        on_bus=on_bus,
        torch=torch,
        torch_cuda=torch_cuda,
        peer_memory=_loaded(files, "nvidia_peermem"),
        nvidia_fs=_loaded(files, "nvidia_fs"),
        cufile=_cufile_installed(environ),
        cufile_compat=_compat(files, environ),
    )
    said = nvml_gpus()
    if isinstance(said, Unknown):
        unread = said
        said = smi_gpus()
        if isinstance(said, Unknown):
            reason = Unknown(reason=f"{unread.reason}; {said.reason}")
            return () if on_bus == 0 else reason, replace(stack, driver=reason, cuda=reason, peers=reason)
    placed = tuple(_placed(files, card) for card in said.cards)
    return placed, replace(stack, driver=said.driver, cuda=said.cuda, peers=said.peers)


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


def _placed(files: Files, card: Gpu) -> Gpu:
    """A card with what the kernel says of its place on the bus."""
    bus = card.bus
    if isinstance(bus, Unknown):
        return replace(card, numa_node=bus, pcie=bus, bridges=bus, iommu=bus, redirects=bus)
    bridges = bridges_above(files, bus)
    return replace(
        card,
        numa_node=files.parsed(f"/sys/bus/pci/devices/{bus}/numa_node", node_or_none),
        pcie=read_link(files, f"/sys/bus/pci/devices/{bus}"),
        bridges=bridges,
        iommu=read_iommu(files, bus),
        redirects=bridges if isinstance(bridges, Unknown) else redirecting(files, bridges),
    )


def _torch() -> tuple[str | Unknown | None, str | Unknown | None]:
    """Version of torch and of the CUDA it was built for, out of its own file: to import it takes seconds."""
    try:
        found = find_spec("torch")
    except (ImportError, ValueError):
        found = None
    if found is None or not found.origin:
        return None, None
    try:
        text = Path(found.origin).with_name("version.py").read_text("utf-8", "replace")
    except OSError as error:
        unread = Unknown(reason=f"torch/version.py: {error.strerror}")
        return unread, unread
    return torch_of(text)


def torch_of(text: str) -> tuple[str | Unknown, str | Unknown | None]:
    """`2.11.0+cu128` and `12.8` of torch/version.py; None for a build without CUDA."""
    given = dict(re.findall(r"^(__version__|cuda)\b[^=]*= *(?:'([^']*)'|None)", text, re.M))
    version = given.get("__version__") or Unknown(reason="torch/version.py says no version")
    return version, given.get("cuda") or None


def _loaded(files: Files, module: str) -> bool | Unknown:
    if not files.exists("/sys/module"):
        return Unknown(reason="/sys/module is not there")
    return files.exists(f"/sys/module/{module}")


def _cufile_installed(environ: Mapping[str, str]) -> bool:
    """Where a loader looks; ctypes' own way starts a compiler to ask."""
    named = [Path(folder) for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    usual = [Path(f"/usr/lib{suffix}") for suffix in ("", "64", "/x86_64-linux-gnu", "/aarch64-linux-gnu")]
    folders = [*named, *usual, *Path("/usr/local").glob("cuda*/lib64")]
    return any(True for folder in folders for _ in folder.glob("libcufile.so*"))


def _compat(files: Files, environ: Mapping[str, str]) -> bool | Unknown:
    """cuFile's own default is to allow it; its file has comments, which JSON has not."""
    path = environ.get("CUFILE_ENV_PATH_JSON") or "/etc/cufile.json"
    if not files.exists(path):
        return True

    def allowed(text: str) -> bool:
        lines = (line for line in text.splitlines() if not line.lstrip().startswith("//"))
        plain = "\n".join(line.partition(" //")[0] for line in lines)
        return bool(json.loads(plain).get("properties", {}).get("allow_compat_mode", True))

    return files.parsed(path, allowed)
