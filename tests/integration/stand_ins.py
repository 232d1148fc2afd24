"""A machine's devices as plain files and small programs: sysfs, nvidia-smi, setpci, modprobe, update-grub.

In a mount namespace they lie where the kernel's own would, so that a remedy can be typed as it is printed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

CARDS = ("0000:18:00.0", "0000:19:00.0")
SWITCH, ADAPTER = "0000:17:00.0", "0000:1a:00.0"

NVIDIA_SMI = '''
import json, sys
from pathlib import Path

STATE = Path(__file__).with_name("cards.json")
cards, words = json.loads(STATE.read_text()), sys.argv[1:]
chosen = cards
if "-i" in words:
    chosen = [cards[int(words[words.index("-i") + 1])]]

def value(option):
    return words[words.index(option) + 1]

CARD = """<gpu id="{bus}"><product_name>NVIDIA H100</product_name><persistence_mode>{pm}</persistence_mode>
<pci><pci_bus_id>0000{bus}</pci_bus_id><pci_gpu_link_info>
<pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>5</current_link_gen></pcie_gen>
<link_widths><max_link_width>16x</max_link_width><current_link_width>16x</current_link_width></link_widths>
</pci_gpu_link_info></pci><performance_state>P0</performance_state>
<mig_mode><current_mig>{mig}</current_mig></mig_mode><ecc_mode><current_ecc>{ecc}</current_ecc></ecc_mode>
<remapped_rows><remapped_row_unc>0</remapped_row_unc><remapped_row_pending>No</remapped_row_pending>
<remapped_row_failure>No</remapped_row_failure></remapped_rows><clocks_event_reasons/>
<gpu_power_readings><current_power_limit>{pl}.00 W</current_power_limit>
<default_power_limit>700.00 W</default_power_limit></gpu_power_readings>
<applications_clocks><graphics_clock>{clock} MHz</graphics_clock></applications_clocks>
<default_applications_clocks><graphics_clock>1980 MHz</graphics_clock></default_applications_clocks></gpu>"""
switch = {"0": "Disabled", "1": "Enabled"}
if words == ["-q", "-x"]:
    head = "<nvidia_smi_log><driver_version>580.1</driver_version><cuda_version>13.0</cuda_version>"
    print(head, *(CARD.format(**card) for card in cards), "</nvidia_smi_log>")
elif words[:1] == ["topo"]:
    print(" GPU0 GPU1\\n GPU0 X OK\\n GPU1 OK X")
elif words[:1] == ["nvlink"]:
    print("GPU 0: x\\n Link 0: 26 GB/s\\nGPU 1: x\\n Link 0: 26 GB/s")
else:
    for card in chosen:
        for option in ("pm", "mig"):
            if f"-{option}" in words:
                card[option] = switch[value(f"-{option}")]
        if "-pl" in words:
            card["pl"] = int(value("-pl"))
        if "-e" in words:  # holds from the next reset on
            card["pending"] = switch[value("-e")]
        if "-r" in words:
            card["ecc"] = card.pop("pending", card["ecc"])
        if "-rac" in words or "-rgc" in words:
            card["clock"] = 1980
STATE.write_text(json.dumps(cards))
'''

CARDS_JSON = (
    '[{"bus": "0000:18:00.0", "pm": "Disabled", "pl": 500, "clock": 1500, "mig": "Enabled",'
    ' "ecc": "Enabled"},'
    ' {"bus": "0000:19:00.0", "pm": "Disabled", "pl": 700, "clock": 1980, "mig": "Disabled",'
    ' "ecc": "Disabled"}]'
)

# Writes to the configuration space, as setpci does: `-s BUS ECAP_ACS+6.w=0000`.
SETPCI = """
import sys
from pathlib import Path

_, _, bus, place = sys.argv
assert place.startswith("ECAP_ACS+6.w="), place
space = Path(f"/sys/bus/pci/devices/{bus}/config")
data = bytearray(space.read_bytes())
at = 0x100
while int.from_bytes(data[at : at + 2], "little") != 0x000D:
    at = int.from_bytes(data[at : at + 4], "little") >> 20
data[at + 6 : at + 8] = int(place.partition("=")[2], 16).to_bytes(2, "little")
space.write_bytes(data)
"""

MODPROBE = """
import sys
from pathlib import Path

Path("/sys/module", sys.argv[1].replace("-", "_")).mkdir(parents=True, exist_ok=True)
"""

# A reboot with the kernel's new line.
UPDATE_GRUB = """
from pathlib import Path

line = Path("/etc/default/grub").read_text()
assert line.count("iommu=pt") == 1, line
for bus in Path("/sys/bus/pci/devices").iterdir():
    if (bus / "iommu_group/type").exists():
        (bus / "iommu_group/type").write_text("identity\\n")
"""


def programs(folder: Path) -> None:
    """The programs, to be found by PATH."""
    folder.mkdir()
    (folder / "cards.json").write_text(CARDS_JSON)
    for name, text in {
        "nvidia-smi": NVIDIA_SMI, "setpci": SETPCI, "modprobe": MODPROBE, "update-grub": UPDATE_GRUB,
    }.items():  # fmt: skip
        (folder / name).write_text(f"#!{sys.executable}\n{text}")
        (folder / name).chmod(0o755)


def sysfs(root: Path, *, disk_of: Path) -> None:
    """A tree for /sys: two cards and an adapter behind a switch, one NVMe disk under a folder, two nodes."""
    _block(root, disk_of)
    cpu = root / "devices/system/cpu"
    _write(cpu / "cpufreq/policy0", scaling_governor="powersave")
    for number, latency in enumerate((0, 2, 170)):
        _write(cpu / f"cpu0/cpuidle/state{number}", latency=str(latency), disable="0")
    for node in range(2):
        _write(root / f"devices/system/node/node{node}", cpulist=str(node))
    _write(root / "kernel/mm/transparent_hugepage", enabled="always madvise [never]", defrag="madvise")
    for name in ("nvidia", "mlx5_core"):
        (root / "module" / name).mkdir(parents=True)
    _bus(root)


def _block(root: Path, folder: Path) -> None:
    device = os.stat(folder).st_dev
    disk = root / "devices/nvme9n1"
    _write(
        disk / "queue",
        rotational="0",
        scheduler="none mq-deadline [bfq]",
        read_ahead_kb="64",
        nr_requests="64",
    )
    _write(disk, size="1000")
    for link in (
        root / f"dev/block/{os.major(device)}:{os.minor(device)}",
        root / "block/nvme9n1",
        root / "class/block/nvme9n1",
    ):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(disk, link.parent))


def _bus(root: Path) -> None:
    switch = root / f"devices/pci0000:17/{SWITCH}"
    space = bytearray(4096)
    space[0x100:0x108] = bytes([0x0D, 0, 1, 0, 0x5F, 0, 0x1D, 0])
    for device in (*CARDS, ADAPTER, ""):
        home = switch / device if device else switch
        _write(home, numa_node="0", vendor="0x10de" if device in CARDS else "0x15b3")
        _write(home, **{"class": "0x030200" if device in CARDS else "0x020700"})
        if device in CARDS:
            _write(home / "iommu_group", type="DMA-FQ")
        link = root / "bus/pci/devices" / (device or SWITCH)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(home, link.parent))
    (switch / "config").write_bytes(space)
    port = root / "class/infiniband/mlx5_0/ports/1"
    _write(port, state="4: ACTIVE", phys_state="5: LinkUp", link_layer="Ethernet", rate="200 Gb/sec (4X HDR)")
    for index, kind in ((0, "IB/RoCE v1"), (3, "RoCE v2")):
        _write(port / "gids", **{str(index): "0000:0000:0000:0000:0000:ffff:0a01:0005"})
        _write(port / "gid_attrs/types", **{str(index): kind})
    _write(switch / ADAPTER / "net/ens1", dev_port="0")
    device = root / "class/infiniband/mlx5_0/device"
    device.symlink_to(os.path.relpath(switch / ADAPTER, device.parent))


def _write(folder: Path, **texts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(f"{text}\n")


def files_of_proc(folder: Path) -> None:
    """A kernel that swaps, on a machine that is not virtual."""
    for name, text in (("swappiness", "60"), ("zone_reclaim_mode", "1"), ("numa_balancing", "1")):
        _write(folder, **{name: text})
    bare = Path("/proc/cpuinfo").read_text().replace(" hypervisor", "")
    (folder / "cpuinfo").write_text(bare)
    rows = [row for row in Path("/proc/meminfo").read_text().splitlines() if not row.startswith("Swap")]
    rows += ["SwapTotal: 1048576 kB", "SwapFree: 1048576 kB"]
    (folder / "meminfo").write_text("\n".join(rows) + "\n")


def torch_for_cards(folder: Path) -> None:
    """A torch that says it was built for CUDA, to be found by PYTHONPATH."""
    _write(folder / "torch", **{"__init__.py": "", "version.py": "__version__ = '2.9.0'\ncuda = '12.8'"})
