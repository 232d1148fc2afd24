"""Is what `stoker doctor` reads true? Each value beside that of a second source, and where they differ.

Method: doctor's snapshot of this machine is taken once; then nvidia-smi, lscpu, findmnt, df, sysctl, ulimit,
getconf, free, ip, timedatectl and torch.utils.collect_env are asked for the same. What none of them
says is listed as such. It measures nothing and changes nothing.

    python benchmarks/doctor_second_source.py [--json] [--keep]    # --keep: in benchmarks/results, as others

Exit code 1 where two sources differ. Takes some seconds; torch is asked where it is installed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from kept_runs import RESULTS, keep
from stoker.machine.plain import Unknown
from stoker.machine.read import read_machine
from stoker.machine.snapshot import UNLIMITED, Gpu, Place, Snapshot

PATIENCE_S = 25
# Where a second source is known to be the one that errs.
KNOWN = {"container": "goes by /.dockerenv, which a virtual machine made from an image has too"}


@dataclass(frozen=True, kw_only=True)
class Row:
    value: str
    doctor: str
    second: str
    source: str

    @property
    def verdict(self) -> str:
        if self.second == "":
            return "no second source"
        if self.doctor.startswith("unknown"):
            return "doctor does not know"
        if self.doctor == self.second:
            return "same"
        return "known to differ" if self.value in KNOWN else "DIFFERS"


def main() -> int:
    folder = Path(tempfile.gettempdir())
    machine = read_machine(cache=folder)
    rows = [
        row for ask in (memory, limits, cpu, place, network, cards, stack, around) for row in ask(machine)
    ]
    told = [{**asdict(row), "verdict": row.verdict} for row in rows]
    if "--keep" in sys.argv:
        counts = dict(Counter(row.verdict for row in rows))
        keep(RESULTS / "doctor_second_source.json", {**_machine(machine), "counts": counts, "rows": told})
    if "--json" in sys.argv:
        print(json.dumps(told, indent=1))
    else:
        width = max(len(row.value) for row in rows)
        for row in rows:
            second = row.second or "-"
            why = f": {KNOWN[row.value]}" if row.verdict == "known to differ" else ""
            print(f"{row.verdict:20} {row.value:{width}}  {row.doctor:30} {second:30} {row.source}{why}")
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in ("same", "DIFFERS")}
    print(f"{len(rows)} values, {counts['same']} same, {counts['DIFFERS']} differ", file=sys.stderr)
    return 1 if counts["DIFFERS"] else 0


def _machine(machine: Snapshot) -> dict[str, object]:
    gpus = () if isinstance(machine.gpus, Unknown) else machine.gpus
    return {"gpu": gpus[0].name if gpus else "", "cores": machine.cpu.cores}


def said(*words: str) -> str:
    """What a program prints; nothing where it is not there or fails."""
    if shutil.which(words[0]) is None:
        return ""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=PATIENCE_S, env={**os.environ, "LC_ALL": "C"}
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def compare(value: str, ours: object, second: object, source: str) -> Row:
    return Row(value=value, doctor=_text(ours), second="" if second is None else str(second), source=source)


def _text(value: object) -> str:
    return f"unknown ({value.reason})"[:60] if isinstance(value, Unknown) else str(value)


def memory(machine: Snapshot) -> Iterator[Row]:
    free = {line.split()[0].rstrip(":"): line.split() for line in said("free", "-k").splitlines()[1:]}
    kib = {name: str(int(row[1]) << 10) for name, row in free.items()}
    yield compare("memory total", machine.memory.total_bytes, kib.get("Mem"), "free")
    yield compare("swap total", machine.memory.swap_total_bytes, kib.get("Swap"), "free")
    for name, ours in (
        ("vm.swappiness", machine.memory.swappiness),
        ("vm.zone_reclaim_mode", machine.memory.zone_reclaim),
        ("kernel.numa_balancing", machine.cpu.numa_balancing),
    ):
        yield compare(name, ours, said("sysctl", "-n", name) or None, "sysctl")
    shm = said("df", "--output=size", "-B1", "/dev/shm").split()
    yield compare("/dev/shm", machine.memory.shm_bytes, shm[-1] if shm else None, "df")


def limits(machine: Snapshot) -> Iterator[Row]:
    def ulimit(option: str, unit: int) -> str | None:
        found = said("bash", "-c", f"ulimit {option}")
        return str(UNLIMITED) if found == "unlimited" else str(int(found) * unit) if found else None

    one = machine.limits
    yield compare("memlock soft", one.memlock_soft_bytes, ulimit("-Sl", 1024), "ulimit")
    yield compare("memlock hard", one.memlock_hard_bytes, ulimit("-Hl", 1024), "ulimit")
    yield compare("open files soft", one.open_files_soft, ulimit("-Sn", 1), "ulimit")
    yield compare("open files hard", one.open_files_hard, ulimit("-Hn", 1), "ulimit")
    yield compare("processes soft", one.processes_soft, ulimit("-Su", 1), "ulimit")


def cpu(machine: Snapshot) -> Iterator[Row]:
    yield compare("cores", machine.cpu.cores, said("getconf", "_NPROCESSORS_ONLN") or None, "getconf")
    usable = machine.cpu.usable
    count = usable if isinstance(usable, Unknown) else len(usable)
    yield compare("cores of this process", count, said("nproc") or None, "nproc")
    lscpu = dict(line.split(":", 1) for line in said("lscpu").splitlines() if ":" in line)
    nodes = machine.cpu.numa_nodes
    told = lscpu.get("NUMA node(s)", "").strip() or None
    yield compare("NUMA nodes", nodes if isinstance(nodes, Unknown) else len(nodes), told, "lscpu")
    hypervisor = bool(lscpu.get("Hypervisor vendor")) if lscpu else None
    yield compare("virtual", machine.surroundings.virtual, hypervisor, "lscpu")
    yield compare("kernel", machine.surroundings.kernel, said("uname", "-r") or None, "uname")


def place(machine: Snapshot) -> Iterator[Row]:
    cache = next(one for one in machine.places if one.role == "cache")
    found = said("findmnt", "-n", "-o", "TARGET,SOURCE,FSTYPE", "-T", cache.path).split()
    target, source, kind = found if len(found) == 3 else (None, None, None)
    yield compare("cache mountpoint", cache.mountpoint, target, "findmnt")
    yield compare("cache source", cache.source, source and source.partition("[")[0], "findmnt")
    yield compare("cache filesystem", cache.filesystem, kind, "findmnt")
    df = said("df", "-B1", "--output=size,itotal", cache.path).split()
    yield compare("cache bytes", cache.total_bytes, df[-2] if df else None, "df")
    yield compare("cache inodes", cache.total_inodes, df[-1].replace("-", "0") if df else None, "df")
    yield from _disk(cache)


def _disk(cache: Place) -> Iterator[Row]:
    if not isinstance(cache.disk, str):
        return
    rows = said("lsblk", "-n", "-s", "-o", "NAME,TYPE", "-l", str(cache.source)).splitlines()
    disks = [row.split()[0] for row in rows if row.split()[-1:] == ["disk"]]
    yield compare("cache disk", cache.disk, disks[0] if disks else None, "lsblk")


def network(machine: Snapshot) -> Iterator[Row]:
    rows = [line.split() for line in said("ip", "-o", "link").splitlines()]
    told = {row[1].rstrip(":").partition("@")[0]: row for row in rows}
    for nic in () if isinstance(machine.nics, Unknown) else machine.nics:
        row = None if nic.rdma else told.get(nic.name)
        mtu = row[row.index("mtu") + 1] if row else None
        if not nic.rdma:
            yield compare(f"MTU of {nic.name}", nic.mtu, mtu, "ip link")


_QUERIES: tuple[tuple[str, str, Callable[[Gpu], object]], ...] = (
    ("name", "name", lambda gpu: gpu.name),
    ("bus", "pci.bus_id", lambda gpu: gpu.bus),
    ("persistence", "persistence_mode", lambda gpu: gpu.persistence),
    ("ECC", "ecc.mode.current", lambda gpu: gpu.ecc),
    ("uncorrected errors", "ecc.errors.uncorrected.volatile.total", lambda gpu: gpu.ecc_uncorrected),
    ("power limit", "power.limit", lambda gpu: gpu.power_limit_w),
    ("default power limit", "power.default_limit", lambda gpu: gpu.power_default_w),
    ("PCIe generation at best", "pcie.link.gen.max", lambda gpu: gpu.pcie_gen_max),
    ("PCIe lanes", "pcie.link.width.current", lambda gpu: gpu.pcie_width),
    ("PCIe lanes at best", "pcie.link.width.max", lambda gpu: gpu.pcie_width_max),
    ("MIG", "mig.mode.current", lambda gpu: gpu.mig),
    ("rows remapped", "remapped_rows.uncorrectable", lambda gpu: gpu.rows_remapped),
    ("remap pending", "remapped_rows.pending", lambda gpu: gpu.remap_pending),
    ("remap failed", "remapped_rows.failure", lambda gpu: gpu.remap_failed),
)
_SPELT = {
    "Enabled": "True",
    "Yes": "True",
    "Disabled": "False",
    "No": "False",
    "[N/A]": "None",
    "N/A": "None",
}


def cards(machine: Snapshot) -> Iterator[Row]:
    gpus = () if isinstance(machine.gpus, Unknown) else machine.gpus
    listed = said("nvidia-smi", "-L")
    count = len(listed.splitlines()) if listed else None
    ours_count = machine.gpus if isinstance(machine.gpus, Unknown) else len(gpus)
    yield compare("cards", ours_count, count, "nvidia-smi -L")
    for gpu in gpus:
        told = _asked(gpu.index)
        for value, query, ours in _QUERIES:
            second = _spelt(told[query], query) if query in told else None
            yield compare(f"GPU {gpu.index} {value}", ours(gpu), second, f"nvidia-smi {query}")


def _asked(index: int) -> dict[str, str]:
    """All at once; one by one where the driver does not know one of them."""
    queries = [query for _, query, _ in _QUERIES]
    card = ("nvidia-smi", "-i", str(index), "--format=csv,noheader,nounits")
    if whole := said(*card, f"--query-gpu={','.join(queries)}"):
        return dict(zip(queries, whole.split(", "), strict=False))
    found = {query: said(*card, f"--query-gpu={query}") for query in queries}
    return {query: told for query, told in found.items() if told}


def _spelt(told: str, query: str) -> str:
    """As doctor spells it: a bus of 12 figures, True and False, watts with one figure at least."""
    if query == "pci.bus_id":
        return told.lower()[-12:]
    if query.startswith("power"):
        return str(float(told)) if re.fullmatch(r"[\d.]+", told) else told
    if query in ("remapped_rows.pending", "remapped_rows.failure"):
        return {"0": "False", "1": "True"}.get(told, _SPELT.get(told, told))
    return _SPELT.get(told, told)


def stack(machine: Snapshot) -> Iterator[Row]:
    driver = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    yield compare("driver", machine.gpu_stack.driver, driver[0] if driver else None, "nvidia-smi")
    cuda = re.search(r"CUDA (?:UMD )?Version: *([\d.]+)", said("nvidia-smi"))
    yield compare("CUDA of the driver", machine.gpu_stack.cuda, cuda[1] if cuda else None, "nvidia-smi")
    env = said(sys.executable, "-m", "torch.utils.collect_env")
    told = dict(line.split(":", 1) for line in env.splitlines() if ": " in line)
    version, built = (
        told.get(name, "").strip() for name in ("PyTorch version", "CUDA used to build PyTorch")
    )
    yield compare("torch", machine.gpu_stack.torch, version or None, "collect_env")
    built = built.replace("Could not collect", "None")
    yield compare("CUDA of torch", machine.gpu_stack.torch_cuda, built or None, "collect_env")
    if cpus := told.get("CPU(s)", "").strip():
        yield compare("cores, again", machine.cpu.cores, cpus, "collect_env")


def around(machine: Snapshot) -> Iterator[Row]:
    synced = said("timedatectl", "show", "-p", "NTPSynchronized", "--value")
    told = {"yes": True, "no": False}.get(synced)
    yield compare("clock synchronised", machine.surroundings.clock_synced, told, "timedatectl")
    virt = said("systemd-detect-virt", "--container")
    found = machine.surroundings.container
    if virt:
        yield compare("container", found, virt if virt != "none" else None, "systemd-detect-virt")


if __name__ == "__main__":
    raise SystemExit(main())
