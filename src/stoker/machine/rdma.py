"""InfiniBand and RoCE: the ports of RDMA devices, as /sys/class/infiniband shows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stoker.machine.files import Files, node_or_none
from stoker.machine.pci import bridges_above, read_link
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import Nic, Port

_CLASS = "/sys/class/infiniband"
# Counters that speak of cables and ports; those of congestion grow on a healthy fabric.
_FAULTS = (
    "symbol_error",
    "link_downed",
    "link_error_recovery",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
_GIDS = 16  # the first ones: the table has up to 256 places, nearly all empty
_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


def read_rdma(files: Files) -> list[Nic]:
    """Every port of every RDMA device; a device with one port has the device's name."""
    return [nic for device in files.names(_CLASS) for nic in _ports(files, device)]


def _ports(files: Files, device: str) -> list[Nic]:
    numbers = [name for name in files.names(f"{_CLASS}/{device}/ports") if name.isdigit()]
    home = f"{_CLASS}/{device}/device"
    common = Nic(
        name=device,
        rdma=True,
        numa_node=files.parsed(f"{home}/numa_node", node_or_none)
        if files.exists(f"{home}/numa_node")
        else None,
        bridges=bridges_above(files, Path(files.target(home)).name),
        pcie=read_link(files, home),
    )
    if not numbers:
        unread = Unknown(reason=f"{device} shows no port")
        return [replace(common, up=unread, port=unread)]
    return [_port(files, common, number, alone=len(numbers) == 1) for number in numbers]


def _port(files: Files, common: Nic, number: str, *, alone: bool) -> Nic:
    base = f"{_CLASS}/{common.name}/ports/{number}"
    state = files.parsed(f"{base}/state", _word)
    return replace(
        common,
        name=common.name if alone else f"{common.name}:{number}",
        up=state if isinstance(state, Unknown) else state == "ACTIVE",
        speed_bytes_s=files.parsed(f"{base}/rate", rate_of),
        port=Port(
            netdev=_netdev(files, common.name, number),
            layer=files.text(f"{base}/link_layer"),
            state=state,
            physical=files.parsed(f"{base}/phys_state", _word),
            lanes=files.parsed(f"{base}/rate", lanes_of),
            faults=_faults(files, base),
            gids=_gids(files, base),
        ),
    )


def _netdev(files: Files, device: str, number: str) -> str:
    """The interface of a port: dev_port counts from 0."""
    base = f"{_CLASS}/{device}/device/net"
    names = files.names(base)
    ours = [name for name in names if files.text(f"{base}/{name}/dev_port") == str(int(number) - 1)]
    return next(iter(ours or names), "")


def _word(text: str) -> str:
    """ACTIVE of `4: ACTIVE`."""
    return text.partition(":")[2].strip() or text


def rate_of(text: str) -> int:
    """Bytes a second of `200 Gb/sec (4X HDR)`."""
    return int(float(text.split()[0]) * 125_000_000)


def lanes_of(text: str) -> int:
    """4 of `200 Gb/sec (4X HDR)`."""
    return int(text.partition("(")[2].partition("X")[0])


def _faults(files: Files, base: str) -> dict[str, int]:
    read = {name: files.number(f"{base}/counters/{name}") for name in _FAULTS}
    return {name: count for name, count in read.items() if isinstance(count, int) and count > 0}


def _gids(files: Files, base: str) -> dict[str, str]:
    """The kinds of address by their index, as `RoCE v2 IPv4`; places that hold none are left out."""
    found = {}
    for index in range(_GIDS):
        gid = files.text(f"{base}/gids/{index}")
        if isinstance(gid, Unknown) or gid == _NO_GID:
            continue
        kind = files.text(f"{base}/gid_attrs/types/{index}")
        if isinstance(kind, str):
            found[str(index)] = kind + (" IPv4" if gid.startswith("0000:0000:0000:0000:0000:ffff:") else "")
    return found
