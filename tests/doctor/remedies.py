"""Remedies: every line of advice that checks give on recorded machines, and how each of them was tried."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from machines import LARGE, NAMES, machine

from stoker.doctor.examine import examine
from stoker.machine.snapshot import Snapshot, Surroundings

AROUND = {
    "machine": Surroundings(container=None, kubernetes=False, slurm=False),
    "container": Surroundings(container="docker", kubernetes=False, slurm=False),
    "pod": Surroundings(container="kubernetes", kubernetes=True, slurm=False),
    "Slurm": Surroundings(container=None, kubernetes=False, slurm=True),
}


def remedies() -> list[tuple[str, str]]:
    """Check and remedy, each kind once: what stands in for this machine's names and numbers is left out."""
    found: dict[tuple[str, str], None] = {}
    for snapshot in _machines():
        for need in (None, LARGE):
            for result in examine(snapshot, need=need):
                for line in result.seen.fix:
                    found[result.check.name, general(line)] = None
    return list(found)


def general(line: str) -> str:
    """A remedy without its comment, numbers, paths and names."""
    text = line.partition("  #")[0]
    text = re.sub(r"-o \S+ \S+ ", "-o OPTIONS SOURCE ", text) if text.startswith("umount") else text
    text = re.sub(r"(?<![\w.*)])/(?!sys|proc|etc|dev/shm)[\w./-]+", "PATH", text)
    text = re.sub(r"noatime /$", "noatime PATH", text)
    text = re.sub(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d", "BUS", text)
    text = re.sub(r"\b(mlx5_|ens\w*|nvme|md|sd|fs-)[\w:]*", "DEVICE", text)
    return re.sub(r"(?<![\w.-])-?\d+(\.\d+)?", "N", text)


def _machines() -> Iterator[Snapshot]:
    for name in NAMES:
        yield (whole := machine(name))
        for around in AROUND.values():
            yield replace(whole, surroundings=replace(around, kernel=whole.surroundings.kernel))


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A machine with faults, made for the test: shell lines in a mount and network namespace of its own.

    `{folder}` is the cache; `{bin}`, `{sys}`, `{etc}`, `{proc}` hold what stands in; `{real}` is empty.
    Doctor must find the faults, its remedies are typed twice over, and doctor must be satisfied.
    """

    name: str
    where: str  # for the table
    made: str
    cures: tuple[tuple[str, str], ...]  # check and remedy
    environ: tuple[tuple[str, str], ...] = ()
    under: str = ""  # what both doctors run under
    need: str = ""  # what the job needs, in JSON
    then: str = ""  # what a remedy's comment says besides: reset the card


_STAND_IN = (
    "mount -t sysfs sys {real}; ip link add ens1 type bridge; mount --rbind {sys} /sys; "
    "mkdir -p /sys/class/net /sys/devices/virtual; mount --bind {real}/class/net /sys/class/net; "
    "mount --bind {real}/devices/virtual /sys/devices/virtual"
)
_PRIVATE_ETC = "mount --bind {etc} /etc"
_SYSCTL = "sysctl -w {0}=N && echo {0}=N > /etc/sysctl.d/N-stoker-{0}.conf"
_VARIABLES = (
    ("NCCL variables", "NCCL_P2P_DISABLE", "1"),
    ("NCCL variables", "NCCL_IB_DISABLE", "1"),
    ("NCCL variables", "NCCL_SOCKET_IFNAME", "nosuch"),
    ("torch variables", "TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
    ("torch variables", "CUDA_LAUNCH_BLOCKING", "1"),
    ("OMP variables", "OMP_PROC_BIND", "MASTER"),
)

SCENES = (
    Scene(
        name="devices",
        where="files and programs that stand in for sysfs, procfs, nvidia-smi, setpci, modprobe, update-grub",
        made=f"{_STAND_IN}; {_PRIVATE_ETC}; for name in swappiness zone_reclaim_mode; do "
        "mount --bind {proc}/$name /proc/sys/vm/$name; done; "
        "mount --bind {proc}/numa_balancing /proc/sys/kernel/numa_balancing; "
        "for name in meminfo cpuinfo; do mount --bind {proc}/$name /proc/$name; done; "
        "touch {bin}/libcufile.so.0; "
        "echo '{{\"properties\": {{\"allow_compat_mode\": false}}}}' > /etc/cufile.json",
        environ=(("LD_LIBRARY_PATH", "{bin}"),),
        then="nvidia-smi -r",
        cures=(
            ("I/O scheduler", "echo none > /sys/block/DEVICE/queue/scheduler"),
            ("read-ahead", "echo N > /sys/block/DEVICE/queue/read_ahead_kb"),
            ("CPU governor", "for f in /sys/devices/system/cpu/cpufreq/policy*/scaling_governor; do echo "
             "performance > $f; done"),
            ("C-states", "for s in /sys/devices/system/cpu/cpu*/cpuidle/state*; do [ $(cat $s/latency) -le N "
             "] || echo N > $s/disable; done"),
            ("huge pages", "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"),
            ("swap", _SYSCTL.format("vm.swappiness")),
            ("zone reclaim", _SYSCTL.format("vm.zone_reclaim_mode")),
            ("NUMA balancing", _SYSCTL.format("kernel.numa_balancing")),
            ("persistence mode", "nvidia-smi -pm N"),
            ("ECC", "nvidia-smi -e N"),
            ("power limit", "nvidia-smi -pl N"),
            ("GPU clocks", "nvidia-smi -rac; nvidia-smi -rgc"),
            ("MIG", "nvidia-smi -i N -mig N"),
            ("IOMMU", "grep -q iommu=pt /etc/default/grub || sed -i 's/^GRUB_CMDLINE_LINUX=\"/&iommu=pt /' "
             "/etc/default/grub && update-grub"),
            ("ACS", "setpci -s BUS ECAP_ACS+N.w=N"),
            ("MTU", "ip link set dev DEVICE mtu N"),
            ("GPUDirect Storage", "modprobe nvidia-fs"),
        ),
    ),
    Scene(
        name="variables",
        where="a shell, before cards and an adapter that are stood in for",
        made=_STAND_IN,
        environ=(*((name, value) for _, name, value in _VARIABLES), ("NCCL_IB_GID_INDEX", "0"),
                 ("OMP_NUM_THREADS", "640")),
        cures=(
            *((check, f"unset {name}") for check, name, _ in _VARIABLES),
            ("OMP variables", "export OMP_NUM_THREADS=N"),
            ("RoCE addresses", "export NCCL_IB_GID_INDEX=N"),
        ),
    ),
    Scene(
        name="Slurm variables",
        where="a shell, with the variables of a Slurm step",
        made="true",
        environ=(("SLURM_JOB_ID", "7"), ("SLURM_CPUS_PER_TASK", "160")),
        cures=(("Slurm step", "export SRUN_CPUS_PER_TASK=N"),),
    ),
    Scene(
        name="limits of a shell",
        where="a shell with limits of its own, before an adapter that is stood in for",
        made=_STAND_IN,
        need='{"memlock_bytes": 1048576, "open_files": 4096}',
        under="prlimit --memlock=65536:8388608 --nofile=1024:8192 setpriv --bounding-set=-ipc_lock "
        "--inh-caps=-ipc_lock",
        cures=(("locked memory", "ulimit -l N"), ("open files", "ulimit -n N")),
    ),
    Scene(
        name="small shared memory",
        where="a tmpfs",
        made="mount -t tmpfs -o size=64m tmpfs /dev/shm",
        cures=(("shared memory", "mount -o remount,size=NG /dev/shm"),),
    ),
    *(
        Scene(
            name=f"mounted {options}",
            where="a tmpfs",
            made=f"mount -t tmpfs -o {options} stoker {{folder}}",
            cures=(("synchronous writes", remedy),),
        )
        for options, remedy in (
            ("sync,nosuid", "mount -o remount,async PATH"),
            ("dirsync,nosuid", "umount PATH && mount -t tmpfs -o OPTIONS SOURCE PATH"),
            ("sync,dirsync,nodev,size=32m", "umount PATH && mount -t tmpfs -o OPTIONS SOURCE PATH"),
        )
    ),
    Scene(
        name="a read-only cache",
        where="a tmpfs",
        made="mount -t tmpfs -o ro stoker {folder}",
        cures=(("writable cache", "mount -o remount,rw PATH"),),
    ),
    Scene(
        name="access times",
        where="an ext4 on a loop device",
        made="mount -t tmpfs tmpfs {real}; truncate -s 64M {real}/disk; mkfs.ext4 -q {real}/disk; "
        "mount -o loop,relatime {real}/disk {folder}",
        cures=(("access times", "mount -o remount,noatime PATH"),),
    ),
)  # fmt: skip

_LOOK = "a look: it changes nothing"
_HANDS = "work for hands, or another machine"
_START = "how to start the job: the check is of this process"
_ELSEWHERE = "set outside of this process, by whoever starts it"

# Why the others were not tried: the first expression that is found at the beginning of a remedy.
NOT_TRIED = (
    (r"dmesg|nvidia-smi (-q|-L|topo)|ibstat|mlxlink|lspci|findmnt|lsblk|du |nfsstat|aws efs describe", _LOOK),
    (r"stoker stage ls|DEVICE --detail|NCCL_DEBUG=INFO|nvidia-smi nvlink -s", _LOOK),
    (r"spec\.", "a line of a manifest: `test_manifest_lines_are_yaml` reads it, Kubernetes applies it"),
    (r"kubelet|on the nodes?[:,]", _ELSEWHERE),
    (r"docker run", "how to start the container: no container runtime is on the test's machine"),
    (r"#SBATCH|numactl|stoker (stage URL|plan)", _START),
    (r"install (driver|a torch)|reseat|another slot|firmware|drain|run on|put PATH|no NVMe disk", _HANDS),
    (r"nvidia-smi -r$", "resets a card: needs one"),
    (r"modprobe nvidia_peermem", "asked for on kernels before 5.12 only"),
    (r"systemctl enable --now nvidia-fabricmanager", "needs an NVSwitch"),
    (r"systemctl set-property", "needs systemd as the first process"),
    (r"timedatectl", "needs systemd and a time server"),
    (r"lfs|lctl", "needs a Lustre client"),
    (r"aws efs update", "needs an EFS and its owner"),
    (r"echo N > /sys/class/bdi", "needs an NFS mount; the guest of the tests has no sysfs"),
    (r"export HF_HOME", "names a disk of this machine"),
    (r"ulimit -l unlimited", "as `ulimit -l N`, which is tried with the check of locked memory"),
)  # fmt: skip


# Tried by tests of their own, which need more than a scene.
ELSEWHERE = (
    (r"umount PATH && mount -t nfs4", "a real NFS mount, through mount(2): `test_doctor_nfs.py`"),
    (r"sudo install", "two users: `test_a_folder_given_to_a_user_is_writable`"),
    (
        r"printf .* > /etc/security/limits.d",
        "logins of root and another, with a lower number: `test_limits_hold_for_root_and_for_others`",
    ),
    (r"export OMP_NUM_THREADS", "a cgroup: `test_threads_within_a_quota_are_good`"),
)


def where_tried(check: str, remedy: str) -> str:
    """Where a remedy was tried; empty where it was not."""
    for scene in SCENES:
        if (check, remedy) in scene.cures:
            return scene.where
    return next((where for pattern, where in ELSEWHERE if re.match(pattern, remedy)), "")


def why_not(remedy: str) -> str:
    """Why a remedy was not tried in a scene; empty where nobody said."""
    return next((why for pattern, why in NOT_TRIED if re.match(pattern, remedy)), "")


def page() -> str:
    """docs/reference/remedies.md."""
    rows = [*dict.fromkeys([*remedies(), *(cure for scene in SCENES for cure in scene.cures)])]
    tried = sum(bool(where_tried(*row)) for row in rows)
    looks = sum(why_not(row[1]) in (_LOOK, _HANDS, _START) for row in rows if not where_tried(*row))
    parts = [
        "# Remedies of `stoker doctor`, tried\n\n"
        "Generated from `tests/doctor/remedies.py` by `docs/reference/make.py`: every line of advice that "
        "doctor gives on the recorded machines, bare, in containers, pods and Slurm jobs. *Tried*: "
        "`tests/integration/test_remedies_applied.py` makes the fault in namespaces of its own, types the "
        "remedy twice as it is printed, and doctor is satisfied. Of the others the table says why.\n\n"
        f"{tried} of {len(rows)} tried; {looks} are looks, work for hands or other ways to start.\n\n"
        "| check | remedy | tried |\n|---|---|---|\n"
    ]
    for row in sorted(rows):
        where = where_tried(*row)
        told = f"**yes**: {where}" if where else f"no: {why_not(row[1])}"
        remedy = row[1].replace("|", "\\|")
        parts.append(f"| {row[0]} | `{remedy}` | {told} |\n")
    return "".join(parts)
