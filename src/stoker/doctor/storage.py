"""Local storage checks: disks, mounts, room, and where caches lie."""

from __future__ import annotations

import json
import shlex

from stoker.doctor.check import Change, Check, Seen, about, fail, known, ok, over_places, say, warn
from stoker.doctor.need import Need
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import Disk, Place, Snapshot

NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "wekafs", "fuse.s3fs", "afs")
_MEMORY = ("tmpfs", "ramfs")
_LOCAL = ("ext4", "xfs", "btrfs", "zfs", "f2fs", "ext3", "bcachefs")
_LEAST_READ_AHEAD = 128 << 10  # the kernel's own default
_GOOD_READ_AHEAD_KB = 4096
_LOW_SHARE = 0.05
_NO_ROOM = 1 << 30  # a cache that cannot take two shards
_FEW_INODES = 100
_FAR_DISKS = ("rbd", "nbd", "drbd", "zd", "sr")
_HUB_BYTES = 50 << 30  # one model of 8 billion parameters takes 16 GB, its dataset as much again


def scheduler(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    if (disk := _disk(place, snapshot)) is None:
        return None
    now = known(disk.scheduler)
    if known(disk.rotational) or now in ("none", "mq-deadline", "noop", "kyber"):
        return ok(f"{disk.name} schedules by {now}")
    wanted = "none" if "none" in known(disk.schedulers) else "mq-deadline"
    path = f"/sys/block/{disk.name}/queue/scheduler"
    change = Change(do=f"echo {wanted} > {path}", undo=f"echo {now} > {path}")
    return warn(f"{disk.name} schedules by {now}", change.do, changes=(change,) if place.given else ())


def read_ahead(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    if (disk := _disk(place, snapshot)) is None:
        return None
    now = known(disk.read_ahead_bytes)
    if now >= _LEAST_READ_AHEAD:
        return ok(f"{disk.name} reads {say(now)} ahead")
    path = f"/sys/block/{disk.name}/queue/read_ahead_kb"
    change = Change(do=f"echo {_GOOD_READ_AHEAD_KB} > {path}", undo=f"echo {now >> 10} > {path}")
    return warn(f"{disk.name} reads {say(now)} ahead", change.do, changes=(change,) if place.given else ())


def rotational(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    if (disk := _disk(place, snapshot)) is None:
        return None
    if not known(disk.rotational):
        return ok(f"{disk.name} is flash")
    if disk.name.startswith(("vd", "xvd")):
        return ok(f"{disk.name} is a virtual disk; it says that it turns, which its host may not mean")
    return warn(
        f"{disk.name} is a turning disk",
        f"stoker stage URL --cache {shlex.quote(_better(snapshot) or '/nvme/stoker')}",
    )


def access_times(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    options, kind = known(place.options), known(place.filesystem)
    if kind not in (*_LOCAL, "lustre"):  # on NFS the server decides, whatever the mount says
        return None
    if "noatime" in options or "ro" in options:
        return ok("reading writes no access times")
    mountpoint = shlex.quote(known(place.mountpoint))
    word = "relatime" if "relatime" in options else "strictatime"
    change = Change(do=f"mount -o remount,noatime {mountpoint}", undo=f"mount -o remount,{word} {mountpoint}")
    fix = f"{change.do}  # and noatime in /etc/fstab"
    return warn(f"mounted {word}", fix, changes=(change,) if place.given else ())


def synchronous(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    options = known(place.options)
    slow = [word for word in ("sync", "dirsync") if word in options]
    if not slow:
        return ok("writes are not synchronous")
    mountpoint, source = shlex.quote(known(place.mountpoint)), shlex.quote(known(place.source))
    if "dirsync" not in slow:
        return warn("mounted sync", f"mount -o remount,async {mountpoint}")
    # No remount takes dirsync away: tried with util-linux 2.38, which sets flags one by one.
    kept = shlex.quote(",".join(option for option in options if option not in slow))
    again = f"mount -t {known(place.filesystem)} -o {kept} {source} {mountpoint}"
    return warn(f"mounted {', '.join(slow)}", f"umount {mountpoint} && {again}")


def filesystem(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    kind = known(place.filesystem)
    if place.answers is False:
        return fail(
            f"{kind} does not answer",
            f"umount -l {shlex.quote(known(place.mountpoint))}  # and mount it anew",
        )
    if place.exists is False and place.role == "data":
        return fail("is not there", f"ls -d {shlex.quote(place.path)}  # mount it, or correct --data")
    if kind in (*_LOCAL, *NETWORK, *_MEMORY, "overlay", "squashfs", "erofs"):
        return ok(kind)
    return warn(
        f"{kind}: each read takes a detour through another process or the host",
        f"stoker stage URL --cache {shlex.quote(_better(snapshot) or '/nvme/stoker')}",
    )


def room(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    free, total = known(place.free_bytes), known(place.total_bytes)
    read = f"{say(free)} of {say(total)} free"
    # a job that comes back finds its share
    held = place.held_bytes if isinstance(place.held_bytes, int) else 0
    if place.role == "cache" and need.cache_bytes is not None and free + held < need.cache_bytes:
        return fail(
            f"{read}, {say(held)} lie there already; {say(need.cache_bytes)} are needed",
            f"stoker stage ls --cache {shlex.quote(place.path)}  # see what may go; or let it give way: "
            f"stoker stage URL --cache {shlex.quote(place.path)} --budget {free * 9 // 10}",
        )
    if place.role == "data" and "ro" in known(place.options):
        return ok(read)
    if total and free < _LOW_SHARE * total:
        tell = fail if place.role == "cache" and free + held < _NO_ROOM else warn
        return tell(read, f"du -xh -d1 {shlex.quote(known(place.mountpoint))} | sort -h  # and clear away")
    return ok(read)


def writable(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    path, mountpoint = shlex.quote(place.path), shlex.quote(known(place.mountpoint))
    if place.broken_link is True:  # older recordings do not say
        return fail(
            "a link on its way leads nowhere",
            f"namei -l {path}  # mount what it leads to, or another --cache DIR",
        )
    if "ro" in known(place.options):
        return fail("mounted read-only", f"mount -o remount,rw {mountpoint}  # or another --cache DIR")
    if not known(place.writable):
        return fail(
            "this user may not write there", f"sudo install -d -o $(id -un) {path}  # or another --cache DIR"
        )
    return ok("may be written")


def inodes(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    free, total = known(place.free_inodes), known(place.total_inodes)
    if not total:  # btrfs, for one, makes them as it goes
        return ok("no fixed number of files")
    read = f"{free:,} of {total:,} inodes free"
    if place.role == "cache" and need.inodes is not None and free < need.inodes and not _holds(place, need):
        return fail(f"{read}; {need.inodes:,} are needed", _inode_fix(place))
    if free < _LOW_SHARE * total:
        tell = fail if place.role == "cache" and free < _FEW_INODES else warn
        return tell(read, _inode_fix(place))
    return ok(read)


def _inode_fix(place: Place) -> str:
    return f"du --inodes -x -d1 {shlex.quote(known(place.mountpoint))} | sort -n  # pack them in shards"


def _holds(place: Place, need: Need) -> bool:
    """Whether the job's files lie there already: one that comes back finds its share."""
    held = place.held_bytes if isinstance(place.held_bytes, int) else 0
    return need.cache_bytes is not None and 0 < need.cache_bytes <= held


def cache_disk(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    kind, mountpoint = known(place.filesystem), known(place.mountpoint)
    better = _better(snapshot)
    fixes = (
        [f"stoker stage URL --cache {shlex.quote(better)}"] if better else list(_mount_fixes(snapshot, place))
    )
    if kind in NETWORK or kind.startswith("fuse"):
        return warn(f"the cache lies on {kind}, behind the network", *fixes)
    if kind in _MEMORY:
        return warn(f"the cache lies in memory ({kind}) and counts as memory", *fixes)
    if kind == "overlay":
        return warn("the cache lies in the container's own layer", *fixes)
    disk = known(place.disk)
    if disk and disk.startswith(_FAR_DISKS):
        return warn(f"the cache lies on {disk}, a disk behind the network", *fixes)
    if mountpoint == "/" and disk and not disk.startswith("nvme"):
        return warn(
            f"the cache lies on the root filesystem ({known(place.source)}), no NVMe is under it", *fixes
        )
    return ok(f"{kind} on {disk or known(place.source)}, mounted at {mountpoint}")


def hub_cache(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    kind, free = known(place.filesystem), known(place.free_bytes)
    better = _better(snapshot)
    folder = f"{better or '/nvme'}/huggingface"
    fix = f"export HF_HOME={shlex.quote(folder)}"
    if kind in NETWORK:
        return warn(f"on {kind}: every rank of every node loads over the network, and file locks hang", fix)
    if kind in ("overlay", *_MEMORY):
        return warn(f"on {kind}: gone with the container", fix)
    if known(place.mountpoint) == "/" and better:
        return warn(f"on the root filesystem, while {better} is there", fix)
    if free < _HUB_BYTES:
        return warn(f"{say(free)} free: less than a model and its dataset take", fix)
    return ok(f"{kind}, {say(free)} free")


def _disk(place: Place, snapshot: Snapshot) -> Disk | None:
    name = known(place.disk)
    return next((disk for disk in known(snapshot.disks) if disk.name == name), None)


def _better(snapshot: Snapshot) -> str:
    """A folder of ours on an NVMe filesystem that is not the root."""
    for place in snapshot.places:
        if (
            isinstance(place.disk, str)
            and place.disk.startswith("nvme")
            and isinstance(place.mountpoint, str)
            and place.mountpoint != "/"
        ):
            return place.mountpoint
    return ""


def _mount_fixes(snapshot: Snapshot, place: Place) -> tuple[str, ...]:
    """Mount an NVMe disk that nothing of ours lies on, if there is one."""
    used = {one.disk for one in snapshot.places}
    disks = () if isinstance(snapshot.disks, Unknown) else snapshot.disks
    idle = next((d.name for d in disks if d.name.startswith("nvme") and d.name not in used), "")
    if snapshot.surroundings.kubernetes is True:
        return (
            "spec.volumes: [{name: nvme, hostPath: {path: /mnt/nvme, type: DirectoryOrCreate}}]",
            f"spec.containers[].volumeMounts: [{{name: nvme, mountPath: {json.dumps(place.path)}}}]",
        )
    if idle:
        return (
            f"lsblk -f /dev/{idle}  # free? then: mkfs.xfs /dev/{idle} && mount -o noatime /dev/{idle} "
            f"{shlex.quote(place.path)}",
        )
    return ("no NVMe disk is seen here: use a machine with one, or name its folder with --cache DIR",)


_OURS = ("data", "cache")

CHECKS = about(
    "storage",
    Check(
        "filesystem",
        over_places(filesystem, *_OURS),
        "Local ext4 and xfs and the parallel filesystems read at the speed of their disks; layers on top of "
        "them do not.",
    ),
    Check(
        "cache on NVMe",
        over_places(cache_disk, "cache"),
        "Staged data is read every epoch by every GPU of the node: it belongs on a disk that only this node "
        "reads, and that is as fast as its GPUs eat.",
    ),
    Check(
        "turning disk",
        over_places(rotational, *_OURS),
        "A turning disk gives 200 MB/s in one stream, and a hundredth of that when ranks read in several "
        "places at once.",
    ),
    Check(
        "I/O scheduler",
        over_places(scheduler, *_OURS),
        "NVMe orders requests by itself; bfq and cfq take a lock and CPU time for each, which caps reads far "
        "below the disk.",
    ),
    Check(
        "read-ahead",
        over_places(read_ahead, *_OURS),
        "Buffered sequential reads and mmap wait for each piece where the kernel fetches little ahead.",
    ),
    Check(
        "access times",
        over_places(access_times, *_OURS),
        "Without noatime reading writes: the first read of a file in a day updates its inode, thousands of "
        "them in an epoch of small files.",
    ),
    Check(
        "synchronous writes",
        over_places(synchronous, *_OURS),
        "Every write of a checkpoint or a staged shard waits for the disk by itself.",
    ),
    Check(
        "writable cache",
        over_places(writable, "cache"),
        "What cannot be written there is fetched by nobody, and every rank fails at its first shard.",
    ),
    Check(
        "free space",
        over_places(room, "cache", "data"),
        "A filesystem that fills up ends staging and checkpoints; the last free percents are slow as well.",
    ),
    Check(
        "free inodes",
        over_places(inodes, *_OURS),
        "A filesystem without inodes is full, whatever its free bytes say.",
    ),
    Check(
        "Hugging Face cache",
        over_places(hub_cache, "hub"),
        "Models and datasets land there: in the home folder, unless told otherwise, which is small, slow or "
        "shared by all nodes.",
    ),
)
