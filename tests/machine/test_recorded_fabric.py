"""sysfs and procfs of machines with adapters, switches, arrays and Lustre, in a tree of the test's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stoker.machine.cards import torch_of
from stoker.machine.files import Files
from stoker.machine.host import read_cpu, read_nics
from stoker.machine.pci import acs_control, bridges_above, generation_of, read_iommu, read_link, redirecting
from stoker.machine.plain import Unknown
from stoker.machine.rdma import read_rdma
from stoker.machine.snapshot import Lustre, PcieLink, Port, Raid
from stoker.machine.stores import raids_of, read_lustre, read_raids

if TYPE_CHECKING:
    from pathlib import Path

ROOT_PORT, SWITCH, ADAPTER = "0000:15:01.0", "0000:16:00.0", "0000:17:00.0"
NO_GID, LINK_LOCAL = ":".join(["0000"] * 8), "fe80:0000:0000:0000:ba59:9fff:fe12:3456"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a01:0005"

MDSTAT = """Personalities : [raid1] [raid6] [raid5] [raid4] [raid0]
md2 : active (auto-read-only) raid0 nvme2n1[1] nvme1n1[0]
      7501212672 blocks super 1.2 512k chunks

md1 : active raid5 sdd1[4] sdc1[2] sdb1[1] sda1[0]
      5860142080 blocks super 1.2 level 5, 512k chunk, algorithm 2 [4/3] [UUU_]
      [==>..................]  recovery = 12.6% (247044096/1953380693) finish=127.5min speed=222975K/sec
      bitmap: 3/15 pages [12KB], 65536KB chunk

md0 : active raid1 nvme0n1p2[0] nvme3n1p2[1]
      523264 blocks super 1.2 [2/2] [UU]

md9 : inactive sdz[0](S)
      976631512 blocks super 1.2

unused devices: <none>
"""


class Tree:
    """A root of the test's own; a link is written as `-> TARGET`."""

    def __init__(self, root: Path) -> None:
        self.root, self.files = root, Files(root)

    def write(self, path: str, text: str | bytes) -> None:
        at = self.root / path.lstrip("/")
        at.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, str) and text.startswith("-> "):
            at.symlink_to(self.root / text[3:].lstrip("/"))
        else:
            at.write_bytes(text if isinstance(text, bytes) else f"{text}\n".encode())

    def fill(self, base: str, **texts: str) -> None:
        for name, text in texts.items():
            self.write(f"{base}/{name}", text)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.fixture
def adapter(tree: Tree) -> Tree:
    """A ConnectX-7 behind a PCIe switch, one port of RoCE."""
    home = f"/sys/devices/pci0000:15/{ROOT_PORT}/{SWITCH}/{ADAPTER}"
    tree.fill(
        home,
        numa_node="1",
        current_link_speed="16.0 GT/s PCIe",
        max_link_speed="32.0 GT/s PCIe",
        current_link_width="8",
        max_link_width="16",
    )
    tree.fill(f"{home}/net/ens1f0np0", dev_port="0")
    for bus, path in ((ADAPTER, home), (SWITCH, home.rpartition("/")[0])):
        tree.write(f"/sys/bus/pci/devices/{bus}", f"-> {path}")
    port = "/sys/class/infiniband/mlx5_0/ports/1"
    tree.write("/sys/class/infiniband/mlx5_0/device", f"-> {home}")
    tree.fill(
        port, state="4: ACTIVE", phys_state="5: LinkUp", link_layer="Ethernet", rate="200 Gb/sec (4X HDR)"
    )
    tree.fill(f"{port}/counters", symbol_error="12", link_downed="0", port_rcv_errors="7")
    for index, (gid, kind) in enumerate(
        [(LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2"), (NO_GID, ""), (IPV4, "RoCE v2")]
    ):
        tree.write(f"{port}/gids/{index}", gid)
        if kind:
            tree.write(f"{port}/gid_attrs/types/{index}", kind)
    return tree


def test_a_port_is_read_with_its_link_its_errors_and_its_addresses(adapter: Tree) -> None:
    (nic,) = read_rdma(adapter.files)
    assert (nic.name, nic.rdma, nic.up, nic.numa_node) == ("mlx5_0", True, True, 1)
    assert nic.speed_bytes_s == 25_000_000_000
    assert nic.pcie == PcieLink(gen=4, gen_max=5, width=8, width_max=16)
    assert nic.bridges == (SWITCH, ROOT_PORT)
    assert nic.port == Port(
        netdev="ens1f0np0",
        layer="Ethernet",
        state="ACTIVE",
        physical="LinkUp",
        lanes=4,
        faults={"symbol_error": 12, "port_rcv_errors": 7},
        gids={"0": "IB/RoCE v1", "1": "RoCE v2", "3": "RoCE v2 IPv4"},
    )


def test_each_port_of_a_device_with_two_is_told(adapter: Tree) -> None:
    adapter.fill("/sys/class/infiniband/mlx5_0/ports/2", state="1: DOWN", phys_state="3: Disabled")
    first, second = read_rdma(adapter.files)
    assert (first.name, second.name, second.up) == ("mlx5_0:1", "mlx5_0:2", False)
    assert isinstance(second.speed_bytes_s, Unknown)


def test_a_virtual_interface_does_not_know_its_speed(tree: Tree) -> None:
    """A pod's veth says 10 Gbit/s whatever lies beneath it, and a file among interfaces is none."""
    tree.write("/sys/devices/x/numa_node", "0")
    for name, device in (("eth0", False), ("ens1", True)):
        tree.fill(f"/sys/class/net/{name}", operstate="up", speed="100000", mtu="1500")
        if device:
            tree.write(f"/sys/class/net/{name}/device", "-> /sys/devices/x")
    tree.write("/sys/class/net/bonding_masters", "bond0")
    nics = read_nics(tree.files)
    assert not isinstance(nics, Unknown)
    assert {nic.name: nic.speed_bytes_s for nic in nics if not isinstance(nic.speed_bytes_s, Unknown)} == {
        "ens1": 12_500_000_000
    }
    assert [nic.mtu for nic in nics] == [1500, 1500]


@pytest.mark.parametrize("text", ["Unknown", "Unknown speed", "", "99.0 GT/s PCIe"])
def test_a_link_that_does_not_know_itself_is_unknown(text: str, tree: Tree) -> None:
    tree.fill(
        "/d", max_link_speed=text, current_link_speed=text, current_link_width="0", max_link_width="255"
    )
    link = read_link(tree.files, "/d")
    assert isinstance(link, PcieLink)
    assert all(isinstance(value, Unknown) for value in (link.gen, link.gen_max, link.width, link.width_max))


def test_generations_are_told_by_their_speed() -> None:
    speeds = ("2.5 GT/s PCIe", "5.0 GT/s PCIe", "8.0 GT/s PCIe", "16.0 GT/s PCIe", "32.0 GT/s PCIe", "8 GT/s")
    assert [generation_of(speed) for speed in speeds] == [1, 2, 3, 4, 5, 3]


def test_what_is_not_on_pcie_has_no_link(tree: Tree) -> None:
    assert read_link(tree.files, "/sys/block/vda/device") is None
    assert isinstance(bridges_above(tree.files, "virtio0"), Unknown)


def config(*capabilities: tuple[int, int, bytes], size: int = 4096) -> bytes:
    """A configuration space with these extended capabilities: number, next, body."""
    space, at = bytearray(size), 0x100
    for number, following, body in capabilities:
        space[at : at + 4] = (number | 1 << 16 | following << 20).to_bytes(4, "little")
        space[at + 4 : at + 4 + len(body)] = body
        at = following
    return bytes(space)


ACS = (0x000D, 0, bytes([0x5F, 0, 0x1D, 0]))  # capability, then control: validation, redirects, forwarding


@pytest.mark.parametrize(
    ("space", "control"),
    [
        (config((0x0001, 0x148, b""), ACS), 0x1D),
        (config((0x0001, 0, b"")), 0),
        (config((0x0001, 0x100, b"")), 0),  # bites its own tail
        (config((0x0001, 0xFFC, b"")), 0),  # points past the end
        (bytes(64), 0),
        (bytes([255]) * 4096, 0),
    ],
    ids=["acs", "none", "loop", "past the end", "short", "gone from the bus"],
)
def test_acs_is_found_in_a_configuration_space(space: bytes, control: int) -> None:
    assert acs_control(space) == control


def test_switches_that_redirect_are_named_and_others_may_be_hidden(adapter: Tree) -> None:
    adapter.write(f"/sys/bus/pci/devices/{SWITCH}/config", config(ACS))
    assert redirecting(adapter.files, (SWITCH,)) == (SWITCH,)
    adapter.write(f"/sys/bus/pci/devices/{SWITCH}/config", bytes(64))
    hidden = redirecting(adapter.files, (SWITCH,))
    assert isinstance(hidden, Unknown)
    assert "root only" in hidden.reason


def test_the_iommu_says_how_it_translates(adapter: Tree) -> None:
    assert read_iommu(adapter.files, ADAPTER) is None
    adapter.write(f"/sys/bus/pci/devices/{ADAPTER}/iommu_group/type", "DMA-FQ")
    assert read_iommu(adapter.files, ADAPTER) == "DMA-FQ"


def test_arrays_are_read_as_the_kernel_writes_them() -> None:
    whole = {"active": True, "action": None, "done_share": None}
    assert raids_of(MDSTAT) == (
        Raid(name="md2", level="raid0", members=None, working=None, **whole),  # type: ignore[arg-type]
        Raid(
            name="md1", active=True, level="raid5", members=4, working=3, action="recovery", done_share=0.126
        ),
        Raid(name="md0", level="raid1", members=2, working=2, **whole),  # type: ignore[arg-type]
        Raid(
            name="md9", active=False, level="none", members=None, working=None, action=None, done_share=None
        ),
    )
    assert raids_of("Personalities : \nunused devices: <none>\n") == ()


def test_a_kernel_without_arrays_has_none(tree: Tree) -> None:
    assert read_raids(tree.files) == ()


@pytest.mark.parametrize("base", ["/sys/fs/lustre", "/proc/fs/lustre"], ids=["now", "before 2.12"])
def test_lustre_is_as_good_as_its_least_target(base: str, tree: Tree) -> None:
    for target, count in (("OST0000-osc-ffff", "64"), ("OST0001-osc-ffff", "8")):
        tree.write(f"{base}/osc/{target}/max_rpcs_in_flight", count)
    tree.fill(f"{base}/llite/scratch-ffff", max_read_ahead_mb="1024.00", max_read_ahead_per_file_mb="64")
    assert read_lustre(tree.files) == Lustre(rpcs_in_flight=8, read_ahead_mb=1024, read_ahead_per_file_mb=64)


def test_a_machine_without_lustre_has_no_client(tree: Tree) -> None:
    assert read_lustre(tree.files) is None


def test_a_c_state_that_is_switched_off_does_not_count(tree: Tree) -> None:
    base = "/sys/devices/system/cpu/cpu0/cpuidle"
    for number, (latency, disabled) in enumerate([("0", "0"), ("2", "0"), ("170", "1")]):
        tree.fill(f"{base}/state{number}", latency=latency, disable=disabled)
    assert read_cpu(tree.files).idle_latency_us == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("__version__ = '2.11.0+cu128'\ncuda: Optional[str] = '12.8'\n", ("2.11.0+cu128", "12.8")),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", ("2.13.0+cpu", None)),
        ("__version__ = '1.13.1'\ncuda = '11.7'\n", ("1.13.1", "11.7")),
    ],
)
def test_torch_says_what_it_was_built_for(text: str, told: tuple[str, str | None]) -> None:
    assert torch_of(text) == told
