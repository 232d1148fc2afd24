"""GPU checks: driver, ECC, clocks, links, and what lies under the cards."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.doctor.check import Change, Check, Seen, about, cards, fail, for_whom, known, ok, over_gpus, warn
from stoker.doctor.need import Need
from stoker.formats.sizes import counted
from stoker.machine.plain import NOT_READ, Unknown
from stoker.machine.snapshot import Gpu, PcieLink, Snapshot

_OLDEST_DRIVER = 525  # the first for CUDA 12, which torch 2.4 and later are built with
_DMABUF_KERNEL = (5, 12)
# The filesystems that cuFile reads straight into a card.
_DIRECT = ("ext4", "xfs", "lustre", "wekafs", "gpfs", "beegfs", "nfs", "nfs4")


def present(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    on_bus, found = snapshot.gpu_stack.on_bus, snapshot.gpus
    if isinstance(found, Unknown) and found != NOT_READ and isinstance(on_bus, int) and on_bus:
        yield fail(
            f"{counted(on_bus, 'NVIDIA card')} on the PCI bus, and no driver that answers ({found.reason})",
            "nvidia-smi  # says what is wrong; install the driver, or run the container with --gpus all",
        )
        return
    count = len(known(found))
    if need.gpus is not None and count < need.gpus:
        yield fail(f"{counted(count, 'GPU')} of {need.gpus} needed", *_gpus_fixes(snapshot, need.gpus))
    elif not count:
        yield ok("no NVIDIA GPU here")
    elif isinstance(on_bus, int) and on_bus > count and snapshot.surroundings.container is None:
        yield warn(
            f"{counted(on_bus, 'card')} on the PCI bus, the driver sees {count}",
            "dmesg | grep -i nvrm  # lost a card?",
        )
    else:
        yield ok(f"{count} × {_names(snapshot)}")


def driver_version(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    if not cards(snapshot):
        return
    version = known(snapshot.gpu_stack.driver)
    major = version.partition(".")[0]
    if major.isdigit() and int(major) < _OLDEST_DRIVER:
        yield warn(f"driver {version}", f"install driver {_OLDEST_DRIVER} or later, for CUDA 12")
    else:
        yield ok(f"driver {version}")


def persistence(gpu: Gpu) -> Seen:
    if known(gpu.persistence):
        return ok("persistence mode on")
    change = Change(do=f"nvidia-smi -i {gpu.index} -pm 1", undo=f"nvidia-smi -i {gpu.index} -pm 0")
    return warn(
        "persistence mode off", "nvidia-smi -pm 1  # or the service nvidia-persistenced", changes=(change,)
    )


def ecc(gpu: Gpu) -> Seen:
    state = known(gpu.ecc)
    if state is None:
        return ok("no ECC on this card")
    if not state:
        return warn("ECC off", "nvidia-smi -e 1  # then reboot or reset the card")
    errors = 0 if isinstance(gpu.ecc_uncorrected, Unknown) else gpu.ecc_uncorrected
    if errors:
        return fail(f"{errors} uncorrected memory errors", "nvidia-smi -r  # drain the node first")
    if gpu.remap_pending is True:
        return fail("a bad row of memory waits to be replaced", "nvidia-smi -r  # drain the node first")
    return ok("ECC on, no uncorrected error")


def power(gpu: Gpu) -> Seen:
    now, default = known(gpu.power_limit_w), known(gpu.power_default_w)
    if now < default:
        return warn(f"power limit {now:g} W, {default:g} W by default", f"nvidia-smi -pl {default:g}")
    return ok(f"power limit {now:g} W")


def clocks(gpu: Gpu) -> Seen:
    slow = known(gpu.slowdowns)
    if slow:
        return warn(", ".join(slow), "nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE  # cooling or supply")
    now, default = gpu.clock_set_mhz, gpu.clock_default_mhz
    if isinstance(now, int) and isinstance(default, int) and now < default:
        return warn(f"clock set to {now} MHz, {default} MHz by default", "nvidia-smi -rac; nvidia-smi -rgc")
    return ok("no slowdown, default clocks")


def pcie(gpu: Gpu) -> Seen:
    width, widest = known(gpu.pcie_width), known(gpu.pcie_width_max)
    gen, highest = known(gpu.pcie_gen), known(gpu.pcie_gen_max)
    read = f"PCIe gen {gen} × {width} of gen {highest} × {widest}"
    busy = gpu.performance_state == 0
    if slot := _slot(gpu, highest, widest):
        return warn(f"{read}; {slot}", "another slot or riser for the card, or a host of its generation")
    if width < widest:
        return warn(read, "reseat the card or its riser; look at the slot's lanes in the firmware's set-up")
    if gen < highest and busy:
        return warn(
            read, "firmware: PCIe link speed of the slot to Auto or the highest; then nvidia-smi -q -d PCIE"
        )
    return ok(read if gen == highest else f"{read}; an idle link may rest")


def _slot(gpu: Gpu, highest: int, widest: int) -> str:
    """NVML's best is of card and slot together; the kernel knows the card's own."""
    own = gpu.pcie
    if (
        not isinstance(own, PcieLink)
        or isinstance(own.gen_max, Unknown)
        or isinstance(own.width_max, Unknown)
    ):
        return ""
    if own.gen_max > highest or own.width_max > widest:
        return f"the card could have gen {own.gen_max} × {own.width_max}"
    return ""


def peers(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    if len(cards(snapshot)) < 2:
        return
    matrix = known(snapshot.gpu_stack.peers)
    broken = [
        f"{row}–{column} {state}"
        for row, states in enumerate(matrix)
        for column, state in enumerate(states)
        if row < column and state not in ("OK", "X", "U")
    ]
    if broken:
        yield warn(
            f"cards that cannot reach each other: {', '.join(broken)}",
            "nvidia-smi topo -p2p r; nvidia-smi topo -m",
            "firmware: ACS off for the PCIe switches; kernel: iommu=pt",
        )
    else:
        yield ok(f"all {len(matrix)} cards reach each other")


def nvlink(gpu: Gpu) -> Seen:
    links = known(gpu.nvlinks)
    if not links:
        return ok("no NVLink")
    down = [str(number) for number, up in enumerate(links) if not up]
    if len(down) == len(links):
        return ok(f"{len(links)} NVLinks, none connected")
    if down:
        return fail(
            f"NVLink {', '.join(down)} of {len(links)} down",
            "nvidia-smi nvlink -s; systemctl restart nvidia-fabricmanager  # else drain the node and reset",
        )
    return ok(f"{len(links)} NVLinks up")


def peer_memory(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    nics = known(snapshot.nics)
    if not cards(snapshot) or not any(nic.rdma for nic in nics):
        return
    if known(snapshot.gpu_stack.peer_memory):
        yield ok("nvidia_peermem is loaded")
    elif _kernel(snapshot) >= _DMABUF_KERNEL:
        yield ok("nvidia_peermem is not loaded; NCCL uses dma-buf on this kernel with the open driver")
    else:
        yield warn("nvidia_peermem is not loaded", "modprobe nvidia_peermem")


def direct_storage(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    if not cards(snapshot):
        return
    stack = snapshot.gpu_stack
    if not known(stack.cufile):
        yield ok("no cuFile here: data goes through pinned host memory")
    elif not known(stack.nvidia_fs):
        if known(stack.cufile_compat):
            yield ok("cuFile in compatibility mode (no nvidia-fs): data goes through host memory")
        else:
            yield fail(
                "no nvidia-fs, and cufile.json forbids compatibility mode: every cuFile open fails",
                'modprobe nvidia-fs  # or "allow_compat_mode": true in /etc/cufile.json',
            )
    else:
        yield from _direct_places(snapshot)


def _direct_places(snapshot: Snapshot) -> Iterator[Seen]:
    for place in snapshot.places:
        kind = place.filesystem
        if place.role in ("data", "cache") and isinstance(kind, str) and kind not in _DIRECT:
            yield warn(
                f"nvidia-fs is loaded, but {place.path} lies on {kind}: read through host memory",
                f"put {place.path} on ext4 or xfs on NVMe, or on Lustre, Weka, GPFS or NFS over RDMA",
            )
            return
    yield ok("nvidia-fs is loaded, on filesystems it can read")


def _names(snapshot: Snapshot) -> str:
    return ", ".join(dict.fromkeys(str(gpu.name) for gpu in cards(snapshot) if isinstance(gpu.name, str)))


def _gpus_fixes(snapshot: Snapshot, count: int) -> tuple[str, ...]:
    return for_whom(
        snapshot,
        kubernetes=f"spec.containers[].resources.limits: {{nvidia.com/gpu: {count}}}",
        slurm=f"#SBATCH --gpus-per-node={count}",
        container=f"docker run --gpus {count} …",
        machine="nvidia-smi -L",
    )


def _kernel(snapshot: Snapshot) -> tuple[int, ...]:
    numbers = known(snapshot.surroundings.kernel).split("-")[0].split(".")
    return tuple(int(number) for number in numbers[:2] if number.isdigit())


CHECKS = about(
    "GPU",
    Check(
        "GPUs",
        present,
        "A card that the driver does not answer for is lost to the job, often silently on one node of many.",
    ),
    Check(
        "GPU driver",
        driver_version,
        "torch's CUDA needs a driver of its time; with an older one it falls back to the CPU or fails at "
        "start.",
    ),
    Check(
        "persistence mode",
        over_gpus(persistence),
        "Without it the driver unloads when nobody uses the card: every start waits seconds for it, and "
        "settings are lost.",
    ),
    Check(
        "ECC",
        over_gpus(ecc),
        "Without ECC a flipped bit is a silently wrong weight; uncorrected errors end jobs at random.",
    ),
    Check(
        "power limit",
        over_gpus(power),
        "A card below its power limit by default is slower than its peers, and all ranks wait for it.",
    ),
    Check(
        "GPU clocks",
        over_gpus(clocks),
        "Heat or a weak supply pulls clocks down while utilisation still says 100%. A software power cap at "
        "full load is healthy.",
    ),
    Check(
        "PCIe link",
        over_gpus(pcie),
        "All data comes to the card over this link; half the lanes are half the speed of every copy.",
    ),
    Check(
        "peer access",
        peers,
        "Cards that cannot read each other's memory pass every gradient through the host.",
    ),
    Check(
        "NVLink",
        over_gpus(nvlink),
        "One link that is down slows every collective of the node to its pace, or sends it over PCIe.",
    ),
    Check(
        "peer memory",
        peer_memory,
        "Without it (or dma-buf) adapters cannot read the card's memory: NCCL copies through the host.",
    ),
    Check(
        "GPUDirect Storage",
        direct_storage,
        "With nvidia-fs cuFile reads from the disk into the card; without, it goes through host memory like "
        "any read, which is fine, unless that is forbidden.",
    ),
)
