"""PCIe checks: links below what their devices can, IOMMU and ACS between peers, adapters far from cards."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.doctor.check import Check, Seen, about, cards, has_rdma, known, ok, warn
from stoker.doctor.fabric import rdma_ports
from stoker.doctor.need import Need
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import PcieLink, Snapshot


def devices(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    """Adapters, and NVMe disks that folders of ours lie on."""
    links = list(_links(snapshot))
    if not links:
        return
    slow = [f"{name} {words}" for name, link in links if (words := below(link))]
    if slow:
        yield warn(
            f"PCIe of {', '.join(slow)}",
            f"lspci -vv | grep -E 'LnkCap:|LnkSta:'  # reseat {slow[0].split()[0]}, or another slot for it",
        )
    else:
        yield ok(f"PCIe of {', '.join(name for name, _ in links)} at its best")


def below(link: PcieLink) -> str:
    """What a link lacks to its device's best; empty where nothing, or where it cannot be known."""
    gen, best = link.gen, link.gen_max
    width, widest = link.width, link.width_max
    slow = isinstance(gen, int) and isinstance(best, int) and gen < best
    narrow = isinstance(width, int) and isinstance(widest, int) and width < widest
    return f"gen {gen} × {width} of gen {best} × {widest}" if slow or narrow else ""


def translation(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    if not _has_peers(snapshot):
        return
    kinds = {known(gpu.iommu) for gpu in cards(snapshot)}
    if snapshot.surroundings.virtual is True:
        yield ok("a virtual machine: its host decides")
    elif kinds <= {None, "identity"}:
        yield ok("no IOMMU before the cards" if kinds == {None} else "IOMMU in passthrough")
    else:
        yield warn(
            f"IOMMU translates ({', '.join(sorted(filter(None, kinds)))})",
            "grep -q iommu=pt /etc/default/grub || sed -i 's/^GRUB_CMDLINE_LINUX=\"/&iommu=pt /' "
            "/etc/default/grub && update-grub  # then reboot",
        )


def redirection(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    if not _has_peers(snapshot):
        return
    if snapshot.surroundings.virtual is True:
        yield ok("a virtual machine: its host decides")
        return
    bridges = sorted({bridge for gpu in cards(snapshot) for bridge in known(gpu.redirects)})
    if bridges:
        yield warn(
            f"ACS redirects on {', '.join(bridges)}",
            *(f"setpci -s {bridge} ECAP_ACS+6.w=0000  # lasts until reboot" for bridge in bridges),
        )
    else:
        yield ok("ACS redirects nothing above the cards")


def near_adapters(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    """Each card wants an active port on its own side of the machine; `nvidia-smi topo -m` shows the same."""
    ports = rdma_ports(snapshot)
    homes = {known(nic.numa_node) for nic, port in ports if known(port.state) == "ACTIVE"}
    if not homes or None in homes:  # a machine that does not say where its devices hang
        return
    far = [gpu.index for gpu in cards(snapshot) if known(gpu.numa_node) not in (None, *homes)]
    if far:
        yield warn(
            f"GPU {', '.join(map(str, far))}: no active RDMA port on its NUMA node",
            "nvidia-smi topo -m  # SYS: move an adapter to that socket, or bring its port up",
        )
    else:
        yield ok(f"every card has an active port on its node; {_switched(snapshot)}")


def _switched(snapshot: Snapshot) -> str:
    """How many cards share a PCIe switch with a port: more than a root port is above both."""
    near = 0
    for gpu in cards(snapshot):
        above = set() if isinstance(gpu.bridges, Unknown) else set(gpu.bridges)
        near += any(
            above & set(nic.bridges) for nic, _ in rdma_ports(snapshot) if isinstance(nic.bridges, tuple)
        )
    return f"{near} of {len(cards(snapshot))} behind one PCIe switch with it"


def _links(snapshot: Snapshot) -> Iterator[tuple[str, PcieLink]]:
    used = {place.disk for place in snapshot.places if place.role in ("data", "cache")}
    for nic, _ in rdma_ports(snapshot):
        if isinstance(nic.pcie, PcieLink):
            yield nic.name, nic.pcie
    for disk in () if isinstance(snapshot.disks, Unknown) else snapshot.disks:
        if disk.name in used and isinstance(disk.pcie, PcieLink):
            yield disk.name, disk.pcie


def _has_peers(snapshot: Snapshot) -> bool:
    """Whether cards, or a card and an adapter, talk to each other over PCIe."""
    return len(cards(snapshot)) > 1 or (bool(cards(snapshot)) and has_rdma(snapshot))


CHECKS = about(
    "PCIe",
    Check(
        "PCIe of devices",
        devices,
        "An adapter or NVMe disk in a slot with half the lanes, or trained to an older generation, gives "
        "half of what it is bought for.",
    ),
    Check(
        "IOMMU",
        translation,
        "With translation every transfer looks its addresses up, and traffic between peers goes through the "
        "root; passthrough (iommu=pt) leaves both direct.",
    ),
    Check(
        "ACS",
        redirection,
        "A switch with ACS redirection sends what one card writes to another up to the CPU: peer access and "
        "GPUDirect run at a fraction, or hang.",
    ),
    Check(
        "adapters near cards",
        near_adapters,
        "A card whose nearest port hangs on the other socket sends gradients over the link between them.",
    ),
)
