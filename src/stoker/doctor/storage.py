"""Local storage: disks, mounts, room, and where caches lie."""

from __future__ import annotations

import shlex

from stoker.doctor.check import Change, Check, Seen, fail, known, ok, over_places, say, warn
from stoker.doctor.need import Need
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import Disk, Place, Snapshot

NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "wekafs", "fuse.s3fs", "afs")
_MEMORY = ("tmpfs", "ramfs")
_LOCAL = ("ext4", "xfs", "btrfs", "zfs", "f2fs", "ext3", "bcachefs")
_LEAST_READ_AHEAD = 128 << 10  # the kernel's own default
_GOOD_READ_AHEAD_KB = 4096
_LOW_SHARE = 0.05
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
        f"{disk.name} is a turning disk", f"stoker stage URL --cache {_better(snapshot) or '/nvme/stoker'}"
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
    slow = [word for word in ("sync", "dirsync") if word in known(place.options)]
    if not slow:
        return ok("writes are not synchronous")
    mountpoint = shlex.quote(known(place.mountpoint))
    return warn(f"mounted {', '.join(slow)}", f"mount -o remount,async {mountpoint}")


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
        f"stoker stage URL --cache {_better(snapshot) or '/nvme/stoker'}",
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
        return warn(read, f"du -xh -d1 {shlex.quote(known(place.mountpoint))} | sort -h  # and clear away")
    return ok(read)


def inodes(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    free, total = known(place.free_inodes), known(place.total_inodes)
    if not total:  # btrfs, for one, makes them as it goes
        return ok("no fixed number of files")
    read = f"{free:,} of {total:,} inodes free"
    if free < _LOW_SHARE * total:
        return warn(
            read,
            f"du --inodes -x -d1 {shlex.quote(known(place.mountpoint))} | sort -n  # pack them in shards",
        )
    return ok(read)


def cache_disk(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    kind, mountpoint = known(place.filesystem), known(place.mountpoint)
    better = _better(snapshot)
    fixes = [f"stoker stage URL --cache {better}"] if better else list(_mount_fixes(snapshot, place))
    if kind in NETWORK or kind.startswith("fuse"):
        return warn(f"the cache lies on {kind}, behind the network", *fixes)
    if kind in _MEMORY:
        return warn(f"the cache lies in memory ({kind}) and counts as memory", *fixes)
    if kind == "overlay":
        return warn("the cache lies in the container's own layer", *fixes)
    disk = known(place.disk)
    if mountpoint == "/" and disk and not disk.startswith("nvme"):
        return warn(
            f"the cache lies on the root filesystem ({known(place.source)}), no NVMe is under it", *fixes
        )
    return ok(f"{kind} on {disk or known(place.source)}, mounted at {mountpoint}")


def hub_cache(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    kind, free = known(place.filesystem), known(place.free_bytes)
    better = _better(snapshot)
    fix = f"export HF_HOME={better or '/nvme'}/huggingface"
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
            f"spec.containers[].volumeMounts: [{{name: nvme, mountPath: {place.path}}}]",
        )
    if idle:
        return (
            f"lsblk -f /dev/{idle}  # free? then: mkfs.xfs /dev/{idle} && mount -o noatime /dev/{idle} "
            f"{shlex.quote(place.path)}",
        )
    return ("no NVMe disk is seen here: use a machine with one, or name its folder with --cache DIR",)


_OURS = ("data", "cache")

CHECKS = (
    Check(
        name="filesystem",
        subject="storage",
        why="Local ext4 and xfs and the parallel filesystems read at the speed of their disks; layers on top "
        "of them do not.",
        look=over_places(filesystem, *_OURS),
    ),
    Check(
        name="cache on NVMe",
        subject="storage",
        why="Staged data is read every epoch by every GPU of the node: it belongs on a disk that only "
        "this node "
        "reads, and that is as fast as its GPUs eat.",
        look=over_places(cache_disk, "cache"),
    ),
    Check(
        name="turning disk",
        subject="storage",
        why="A turning disk gives 200 MB/s in one stream, and a hundredth of that when ranks read in several "
        "places at once.",
        look=over_places(rotational, *_OURS),
    ),
    Check(
        name="I/O scheduler",
        subject="storage",
        why="NVMe orders requests by itself; bfq and cfq take a lock and CPU time for each, which caps reads "
        "far below the disk.",
        look=over_places(scheduler, *_OURS),
    ),
    Check(
        name="read-ahead",
        subject="storage",
        why="Buffered sequential reads and mmap wait for each piece where the kernel fetches little ahead.",
        look=over_places(read_ahead, *_OURS),
    ),
    Check(
        name="access times",
        subject="storage",
        why="Without noatime reading writes: the first read of a file in a day updates its inode, "
        "thousands of "
        "them in an epoch of small files.",
        look=over_places(access_times, *_OURS),
    ),
    Check(
        name="synchronous writes",
        subject="storage",
        why="Every write of a checkpoint or a staged shard waits for the disk by itself.",
        look=over_places(synchronous, *_OURS),
    ),
    Check(
        name="free space",
        subject="storage",
        why="A filesystem that fills up ends staging and checkpoints; the last free percents are slow as "
        "well.",
        look=over_places(room, "cache", "data"),
    ),
    Check(
        name="free inodes",
        subject="storage",
        why="A filesystem without inodes is full, whatever its free bytes say.",
        look=over_places(inodes, *_OURS),
    ),
    Check(
        name="Hugging Face cache",
        subject="storage",
        why="Models and datasets land there: in the home folder, unless told otherwise, which is small, slow "
        "or shared by all nodes.",
        look=over_places(hub_cache, "hub"),
    ),
)
