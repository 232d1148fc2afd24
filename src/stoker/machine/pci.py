"""PCI Express: the link a device has beside the one it could have, the switches above it, IOMMU and ACS."""

from __future__ import annotations

from pathlib import Path

from stoker.machine.files import Files
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import PcieLink

_DEVICES = "/sys/bus/pci/devices"
_GENERATIONS = {"2.5": 1, "5.0": 2, "5": 2, "8.0": 3, "8": 3, "16.0": 4, "16": 4, "32.0": 5, "64.0": 6}
_PLAIN_SPACE, _EXTENDED = 256, 0x100  # bytes of the configuration space that old PCI had
_ACS = 0x000D  # the number of the capability "Access Control Services"
_REDIRECT = 0b1100  # its bits P2P Request Redirect and Completion Redirect: peers meet at the root only


def read_link(files: Files, device: str) -> PcieLink | Unknown | None:
    """A device's link, from its folder in sysfs; None for one that is not on PCIe."""
    if not files.exists(f"{device}/max_link_speed"):
        return None
    return PcieLink(
        gen=files.parsed(f"{device}/current_link_speed", generation_of),
        gen_max=files.parsed(f"{device}/max_link_speed", generation_of),
        width=files.parsed(f"{device}/current_link_width", _width),
        width_max=files.parsed(f"{device}/max_link_width", _width),
    )


def generation_of(speed: str) -> int:
    """4 of `16.0 GT/s PCIe`; a virtual machine's bridge may say `Unknown`, which is no generation."""
    return _GENERATIONS[speed.split()[0]]


def bridges_above(files: Files, bus: str) -> tuple[str, ...] | Unknown:
    """The addresses of the bridges between a device and its root, the nearest first."""
    if not files.exists(f"{_DEVICES}/{bus}"):
        return Unknown(reason=f"{_DEVICES}/{bus} is not there")
    above = Path(files.target(f"{_DEVICES}/{bus}")).parents
    return tuple(folder.name for folder in above if _is_address(folder.name))


def read_iommu(files: Files, bus: str) -> str | Unknown | None:
    """How a device's addresses are translated: `identity` is not at all; None without an IOMMU."""
    group = f"{_DEVICES}/{bus}/iommu_group"
    return files.text(f"{group}/type") if files.exists(group) else None


def redirecting(files: Files, bridges: tuple[str, ...]) -> tuple[str, ...] | Unknown:
    """Those of the bridges that send traffic between peers up to the root, by ACS."""
    found = []
    for bridge in bridges:
        space = files.data(f"{_DEVICES}/{bridge}/config", limit=4096)
        if isinstance(space, Unknown):
            return space
        if len(space) < _PLAIN_SPACE:
            return Unknown(reason="PCI configuration is shown to root only")
        if acs_control(space) & _REDIRECT:
            found.append(bridge)
    return tuple(found)


def acs_control(space: bytes) -> int:
    """The control register of ACS in a device's configuration space; 0 where it has none."""
    at, seen = _EXTENDED, set()
    while _EXTENDED <= at <= len(space) - 8 and at not in seen:  # a list that bites its own tail has an end
        seen.add(at)
        head = int.from_bytes(space[at : at + 4], "little")
        if head & 0xFFFF == _ACS:
            return int.from_bytes(space[at + 6 : at + 8], "little")
        at = head >> 20 & 0xFFC
    return 0


def _width(text: str) -> int:
    """0 lanes and 255 are how a link says that it does not know."""
    if not 0 < int(text) <= 32:
        raise ValueError(text)
    return int(text)


def _is_address(name: str) -> bool:
    """`0000:17:00.0`, and not the root's own `pci0000:17`."""
    return name.count(":") == 2 and name[-2:-1] == "."
