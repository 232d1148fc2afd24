"""Block devices and filesystems: disks, and what the folders that matter lie on."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from stoker.machine.files import Files, chosen, node_or_none
from stoker.machine.mounts import Mount, mounts_of, nfs_of
from stoker.machine.pci import read_link
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import Disk, Place

_PASSING = ("loop", "ram", "zram", "dm-", "md", "sr", "fd", "nbd")  # what is no disk by itself
_LFS_S = 1.0
_COUNTING_S = 5.0  # a cache of shards is counted in milliseconds, one of a million files in seconds
_PATIENCE_S = 1.2

Value = TypeVar("Value")


def read_disks(files: Files) -> tuple[Disk, ...] | Unknown:
    """The disks of the machine."""
    if not files.exists("/sys/block"):
        return Unknown(reason="/sys/block is not there")
    return tuple(_disk(files, name) for name in disk_names(files))


def disk_names(files: Files) -> list[str]:
    """Real disks: not their partitions, nor what is stacked upon them."""
    return [name for name in files.names("/sys/block") if not name.startswith(_PASSING)]


def read_place(files: Files, role: str, path: Path) -> Place:
    """A folder's filesystem; of one that is not there yet, that of the nearest folder above it."""
    mounts = files.parsed("/proc/self/mountinfo", mounts_of)
    if isinstance(mounts, Unknown):
        return Place(role=role, path=str(path), mountpoint=mounts, filesystem=mounts, options=mounts)
    whole = path.absolute()
    if place := within(_PATIENCE_S, lambda: _place(files, role, whole, mounts)):
        place = replace(place, path=str(path))
        return replace(place, held_bytes=_held(path)) if role == "cache" else place
    mount, silent = _holding(mounts, whole), Unknown(reason=f"no answer in {_PATIENCE_S:g} s")
    return Place(
        role=role,
        path=str(path),
        answers=False,
        mountpoint=mount.mountpoint if mount else silent,
        source=mount.source if mount else silent,
        filesystem=mount.filesystem if mount else silent,
        options=mount.options if mount else silent,
    )


def within(seconds: float, work: Callable[[], Value]) -> Value | None:
    """What the work gives, or None: a dead server's mount keeps whoever asks for ever. The thread that asked
    stays behind; it ends with the process."""
    found: list[Value] = []
    thread = threading.Thread(target=lambda: found.append(work()), name="stoker-place", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def stripes_of(said: str) -> tuple[int, int]:
    """Stripe count and size of `lfs getstripe -d`."""
    words = said.replace("stripe_count:", " stripe_count: ").replace("stripe_size:", " stripe_size: ").split()
    return int(words[words.index("stripe_count:") + 1]), int(words[words.index("stripe_size:") + 1])


def _disk(files: Files, name: str) -> Disk:
    queue = f"/sys/block/{name}/queue"
    return Disk(
        name=name,
        rotational=files.parsed(f"{queue}/rotational", lambda text: text == "1"),
        scheduler=files.parsed(f"{queue}/scheduler", chosen),
        schedulers=files.parsed(
            f"{queue}/scheduler", lambda text: tuple(text.replace("[", "").replace("]", "").split())
        ),
        read_ahead_bytes=files.parsed(f"{queue}/read_ahead_kb", lambda text: int(text) << 10),
        numa_node=_disk_node(files, name),
        bytes=files.parsed(f"/sys/block/{name}/size", lambda text: int(text) * 512),
        pcie=read_link(files, f"/sys/block/{name}/device/device"),
    )


def _disk_node(files: Files, name: str) -> int | Unknown | None:
    """The node of the disk's controller: `device` is the disk, the controller some folders above it."""
    for above in ("device", "device/device", "device/.."):
        if files.exists(path := f"/sys/block/{name}/{above}/numa_node"):
            return files.parsed(path, node_or_none)
    return None


def _place(files: Files, role: str, path: Path, mounts: list[Mount]) -> Place:
    there = path
    while not os.path.exists(there) and there != there.parent:
        there = there.parent
    broken = any(os.path.islink(one) for one in (path, *path.parents) if not os.path.exists(one))
    mount = _holding(mounts, there.resolve())
    if mount is None:
        return Place(role=role, path=str(path), answers=True, exists=os.path.exists(path))
    total_bytes, free_bytes, total_inodes, free_inodes = _space(there)
    options, resent_share = _nfs(files, mount)
    stripes, stripe_bytes = _stripes(mount, there)
    return Place(
        role=role,
        path=str(path),
        answers=True,
        exists=os.path.exists(path),
        broken_link=broken,
        writable=os.access(there, os.W_OK | os.X_OK),
        mountpoint=mount.mountpoint,
        source=mount.source,
        filesystem=mount.filesystem,
        options=options,
        disk=_disk_under(files, mount),
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        total_inodes=total_inodes,
        free_inodes=free_inodes,
        read_ahead_bytes=files.parsed(
            f"/sys/class/bdi/{mount.device}/read_ahead_kb", lambda text: int(text) << 10
        ),
        resent_share=resent_share,
        stripes=stripes,
        stripe_bytes=stripe_bytes,
    )


def _space(there: Path) -> tuple[int | Unknown, int | Unknown, int | Unknown, int | Unknown]:
    try:
        stat = os.statvfs(there)
    except OSError as error:
        reason = Unknown(reason=f"{there}: {error.strerror}")
        return reason, reason, reason, reason
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize, stat.f_files, stat.f_favail


def _held(folder: Path) -> int | Unknown:
    """What the files of a cache take of its disk; a folder that nothing was staged to yet is none."""
    if not (folder / ".stoker").is_dir():
        return 0
    found = within(_COUNTING_S, lambda: sum(map(_taken, folder.rglob("*"))))
    return Unknown(reason=f"not counted in {_COUNTING_S:g} s") if found is None else found


def _taken(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:  # gone meanwhile
        return 0


def _holding(mounts: Iterable[Mount], path: Path) -> Mount | None:
    """The mount that a path lies on: the longest, and of equals the one mounted last."""
    found = [mount for mount in mounts if path.is_relative_to(mount.mountpoint)]
    return max(reversed(found), key=lambda mount: len(mount.mountpoint), default=None)


def _disk_under(files: Files, mount: Mount) -> str | None:
    """The disk of a mount: of a partition the whole disk, of a mapped device the first below it. btrfs has a
    device number of its own, so that its source must tell."""
    base = f"/sys/dev/block/{mount.device}"
    if not files.exists(base):
        base = f"/sys/class/block/{mount.source.removeprefix('/dev/')}"
    if not mount.source.startswith("/dev/") or not files.exists(base):
        return None
    while below := files.names(f"{base}/slaves"):
        base = f"/sys/class/block/{below[0]}"
    path = Path(files.target(base))
    return path.parent.name if files.exists(f"{base}/partition") else path.name


def _nfs(files: Files, mount: Mount) -> tuple[tuple[str, ...], float | Unknown]:
    if not mount.filesystem.startswith("nfs"):
        return mount.options, Unknown(reason=f"{mount.filesystem} is not NFS")
    said = files.parsed("/proc/self/mountstats", nfs_of)
    if isinstance(said, Unknown):
        return mount.options, said
    for nfs in said:
        if nfs.mountpoint == mount.mountpoint:
            return tuple(dict.fromkeys((*mount.options, *nfs.options))), nfs.resent_share
    return mount.options, 0.0


def _stripes(mount: Mount, there: Path) -> tuple[int | Unknown, int | Unknown]:
    if mount.filesystem != "lustre":
        reason = Unknown(reason=f"{mount.filesystem} has no stripes")
        return reason, reason
    folder = there if there.is_dir() else there.parent
    try:
        said = subprocess.run(
            ["lfs", "getstripe", "-d", folder], capture_output=True, text=True, timeout=_LFS_S, check=True
        )
        return stripes_of(said.stdout)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        reason = Unknown(reason=f"lfs getstripe: {error}")
        return reason, reason


def hub_folder(environ: Mapping[str, str], *, home: Path) -> Path:
    """Where the Hugging Face libraries keep what they download."""
    if folder := environ.get("HF_HUB_CACHE"):
        return Path(folder)
    return Path(environ.get("HF_HOME") or home / ".cache" / "huggingface")
