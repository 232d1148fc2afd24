"""Shared storage: NFS, EFS, Lustre, and the network to it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from stoker.doctor.check import Check, Seen, fail, known, ok, over_places, say, warn
from stoker.doctor.need import Need
from stoker.doctor.storage import NETWORK
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import Place, Snapshot

_TRANSFER = 1 << 20
_GOOD_READ_AHEAD = 1 << 20  # kernels from 5.4 on give NFS 128 KiB, less than one read of 1 MiB
_LONG_CACHING_S = 60
_RESENT_SHARE = 0.01
_STRIPE = 1 << 20


def nfs_transfer(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    if not _is_nfs(place):
        return None
    sizes = {name: _number(place, name) for name in ("rsize", "wsize")}
    if None in sizes.values():
        return Seen(level="unknown", read="the mount does not say rsize and wsize")
    read = ", ".join(f"{name} {say(size or 0)}" for name, size in sizes.items())
    if min(size or 0 for size in sizes.values()) < _TRANSFER:
        return warn(read, _remount(place))
    return ok(read)


def nfs_connections(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    if not _is_nfs(place):
        return None
    if "proto=rdma" in known(place.options):
        return ok("RDMA")
    count = _number(place, "nconnect") or 1
    return ok(f"nconnect {count}") if count > 1 else warn("one TCP connection", _remount(place))


def nfs_caching(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    """`noac` and short times ask the server before every open; mountstats says acregmax, not actimeo."""
    if not _is_nfs(place):
        return None
    options = known(place.options)
    if "noac" in options:
        return warn("attributes are not cached (noac)", _remount(place))
    if "lookupcache=none" in options or "lookupcache=pos" in options:
        return warn("lookups are not cached in full (lookupcache)", _remount(place))
    least = min(_number(place, "acregmax") or _LONG_CACHING_S, _number(place, "acdirmax") or _LONG_CACHING_S)
    if least < _LONG_CACHING_S:
        return warn(f"attributes are cached for {least} s at most", _remount(place))
    return ok(f"attributes are cached for up to {least} s, lookups in full")


def nfs_safety(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    if not _is_nfs(place):
        return None
    options = known(place.options)
    if "soft" in options or "softerr" in options:
        return warn("mounted soft: a slow server becomes an I/O error", _remount(place))
    return ok("mounted hard")


def nfs_resent(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    if not _is_nfs(place):
        return None
    share = known(place.resent_share)
    if share > _RESENT_SHARE:
        return warn(f"{share:.1%} of requests were sent again", "nfsstat -rc; ip -s link  # look for drops")
    return ok(f"{share:.1%} of requests were sent again")


def nfs_read_ahead(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    if not _is_nfs(place):
        return None
    size = known(place.read_ahead_bytes)
    if size >= _GOOD_READ_AHEAD:
        return ok(f"{say(size)} ahead")
    mountpoint = shlex.quote(known(place.mountpoint))
    return warn(
        f"{say(size)} ahead",
        f"echo 15360 > /sys/class/bdi/$(mountpoint -d {mountpoint})/read_ahead_kb  # lasts until unmounted",
    )


def efs(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    source = known(place.source)
    if ".efs." not in source and known(place.filesystem) != "efs":
        return None
    name = source.partition(".")[0]
    return Seen(
        level="unknown",
        read=f"{name} is EFS; whether its throughput is bursting or elastic shows only to its owner",
        fix=(
            f"aws efs describe-file-systems --file-system-id {name} "
            "--query 'FileSystems[].[PerformanceMode,ThroughputMode]'",
            f"aws efs update-file-system --file-system-id {name} --throughput-mode elastic  # if bursting",
        ),
    )


def stripes(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    if known(place.filesystem) != "lustre":
        return None
    count, size = known(place.stripes), known(place.stripe_bytes)
    read = f"{'all targets' if count == -1 else count} × {say(size)}"
    path = shlex.quote(place.path)
    if count in (0, 1) or size < _STRIPE:
        return warn(
            read, f"lfs setstripe -c 8 -S 4M {path}  # new files; for old ones: lfs migrate -c 8 -S 4M FILE"
        )
    return ok(read)


def network_speed(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    far = [p for p in snapshot.places if p.role == "data" and p.filesystem in NETWORK]
    if not far or need.read_bytes_s is None:
        return
    speeds = [n.speed_bytes_s for n in known(snapshot.nics) if n.up is True]
    total = sum(speed for speed in speeds if not isinstance(speed, Unknown))
    if not total:
        yield Seen(level="unknown", read="no interface says its speed")
    elif total < need.read_bytes_s:
        yield fail(
            f"{say(total)}/s of network, {say(need.read_bytes_s)}/s are needed",
            "stoker stage URL --cache /nvme/stoker --share NODE/NODES  # each node fetches its part once",
        )
    else:
        yield ok(f"{say(total)}/s of network for {say(need.read_bytes_s)}/s")


def _is_nfs(place: Place) -> bool:
    return known(place.filesystem).startswith("nfs")


def _number(place: Place, name: str) -> int | None:
    for option in known(place.options):
        key, _, value = option.partition("=")
        if key == name and value.isdigit():
            return int(value)
    return None


def _remount(place: Place) -> str:
    """Most NFS options hold for a fresh mount only; long caching is for data, which nobody changes."""
    mountpoint, source = shlex.quote(known(place.mountpoint)), shlex.quote(known(place.source))
    options = f"hard,noatime,nconnect=8,rsize={_TRANSFER},wsize={_TRANSFER}"
    options += ",actimeo=600" if place.role == "data" else ""
    return f"umount {mountpoint} && mount -t {known(place.filesystem)} -o {options} {source} {mountpoint}"


_OURS = ("data", "cache")  # a home on NFS is told by the check of the hub's cache

CHECKS = (
    Check(
        name="NFS transfer size",
        subject="shared storage",
        why="rsize and wsize are the bytes of one request: at 64 KiB a shard takes sixteen times the "
        "round trips.",
        look=over_places(nfs_transfer, *_OURS),
    ),
    Check(
        name="NFS connections",
        subject="shared storage",
        why="One TCP connection is one flow on one core and one path of the network, however many ranks "
        "read.",
        look=over_places(nfs_connections, *_OURS),
    ),
    Check(
        name="NFS caching",
        subject="shared storage",
        why="Shards never change, yet each open asks the server again when attributes and lookups are not "
        "cached; on many small files that is most of the time.",
        look=over_places(nfs_caching, *_OURS),
    ),
    Check(
        name="NFS errors",
        subject="shared storage",
        why="A soft mount gives up while a server is slow, and a read fails in the middle of an epoch.",
        look=over_places(nfs_safety, *_OURS),
    ),
    Check(
        name="NFS repeats",
        subject="shared storage",
        why="A request that is sent again has waited for its time-out, seconds each.",
        look=over_places(nfs_resent, *_OURS),
    ),
    Check(
        name="NFS read-ahead",
        subject="shared storage",
        why="Kernels from 5.4 on read 128 KiB ahead on NFS, less than one request of 1 MiB: a stream "
        "waits for "
        "every round trip.",
        look=over_places(nfs_read_ahead, *_OURS),
    ),
    Check(
        name="EFS mode",
        subject="shared storage",
        why="Bursting throughput falls to 50 KiB/s for each GiB stored once its credits are spent.",
        look=over_places(efs, *_OURS, "hub"),
    ),
    Check(
        name="Lustre stripes",
        subject="shared storage",
        why="A file with one stripe lies on one server: all ranks that read it share that server's "
        "bandwidth.",
        look=over_places(stripes, "data"),
    ),
    Check(
        name="network speed",
        subject="shared storage",
        why="What a node reads from shared storage passes through its interfaces.",
        look=network_speed,
    ),
)
