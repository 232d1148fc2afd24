"""Network storage checks: NFS, EFS, Lustre, and the network to them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator

from stoker.doctor.check import Check, Look, Seen, about, fail, known, ok, over_places, say, warn
from stoker.doctor.need import Need
from stoker.doctor.storage import NETWORK
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import Lustre, Nic, Place, Port, Snapshot

_TRANSFER = 1 << 20
_GOOD_READ_AHEAD = 1 << 20  # kernels from 5.4 on give NFS 128 KiB, less than one read of 1 MiB
_LONG_CACHING_S = 60
_RESENT_SHARE = 0.01
_STRIPE = 1 << 20
_USUAL_STRIPES = 8
_FEW_REQUESTS, _GOOD_REQUESTS = 8, 64  # Lustre's default, and what fills 100 Gbit/s at a millisecond
_LUSTRE_AHEAD_MB, _LUSTRE_AHEAD_FILE_MB = 256, 64  # eight ranks that each read one file of 64 MiB blocks
# What a new mount gets from us, what the kernel only tells, and what is so unless said otherwise.
_REPLACED = re.compile(
    r"(r|w|d)size=.*|bsize=.*|nconnect=.*|ac(reg|dir)(min|max)=.*|actimeo=.*|lookupcache=.*|noac|sharecache|"
    r"(no|rel|strict)?atime|nodiratime|hard|soft|softerr|(client|mount)?addr=.*|mountport=.*|mountvers=.*|"
    r"mountproto=.*|namlen=.*|rw|fsc=no"
)


def nfs_transfer(place: Place) -> Seen:
    sizes = {name: _number(place, name) for name in ("rsize", "wsize")}
    if None in sizes.values():
        return Seen(level="unknown", read="the mount does not say rsize and wsize")
    read = ", ".join(f"{name} {say(size or 0)}" for name, size in sizes.items())
    if min(size or 0 for size in sizes.values()) < _TRANSFER:
        return warn(read, _remount(place))
    return ok(read)


def nfs_connections(place: Place) -> Seen:
    if "proto=rdma" in known(place.options):
        return ok("RDMA")
    count = _number(place, "nconnect") or 1
    return ok(f"nconnect {count}") if count > 1 else warn("one TCP connection", _remount(place))


def nfs_caching(place: Place) -> Seen:
    """`noac` and short times ask the server before every open; mountstats says acregmax, not actimeo."""
    options = known(place.options)
    if "noac" in options:
        return warn("attributes are not cached (noac)", _remount(place))
    if "lookupcache=none" in options or "lookupcache=pos" in options:
        return warn("lookups are not cached in full (lookupcache)", _remount(place))
    longest = [_number(place, name) for name in ("acregmax", "acdirmax", "actimeo")]
    least = min((seconds for seconds in longest if seconds is not None), default=_LONG_CACHING_S)
    if least < _LONG_CACHING_S:
        return warn(f"attributes are cached for {least} s at most", _remount(place))
    return ok(f"attributes are cached for up to {least} s, lookups in full")


def nfs_safety(place: Place) -> Seen:
    options = known(place.options)
    if "soft" in options or "softerr" in options:
        return warn("mounted soft: a slow server becomes an I/O error", _remount(place))
    return ok("mounted hard")


def nfs_resent(place: Place) -> Seen:
    share = known(place.resent_share)
    if share > _RESENT_SHARE:
        return warn(f"{share:.1%} of requests were sent again", "nfsstat -rc; ip -s link  # look for drops")
    return ok(f"{share:.1%} of requests were sent again")


def nfs_read_ahead(place: Place) -> Seen:
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
    wanted = need.stripes or _USUAL_STRIPES
    too_few = count != -1 and max(1, count) < (need.stripes or 2)
    if too_few or size < _STRIPE:
        line = f"-c {wanted} -S 4M"
        return warn(read, f"lfs setstripe {line} {path}  # new files; for old ones: lfs migrate {line} FILE")
    return ok(read)


def lustre_requests(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    if known(place.filesystem) != "lustre":
        return None
    count = known(_client(snapshot).rpcs_in_flight)
    read = f"{count} requests in flight to a target"
    if count <= _FEW_REQUESTS:
        return warn(
            read, f"lctl set_param 'osc.*.max_rpcs_in_flight={_GOOD_REQUESTS}'  # -P on the MGS keeps it"
        )
    return ok(read)


def lustre_read_ahead(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
    if known(place.filesystem) != "lustre":
        return None
    client = _client(snapshot)
    whole, each = known(client.read_ahead_mb), known(client.read_ahead_per_file_mb)
    read = f"{whole} MiB ahead, {each} MiB of a file"
    if whole < _LUSTRE_AHEAD_MB or each < _LUSTRE_AHEAD_FILE_MB:
        return warn(
            read,
            f"lctl set_param 'llite.*.max_read_ahead_mb={4 * _LUSTRE_AHEAD_MB}' "
            f"'llite.*.max_read_ahead_per_file_mb={_LUSTRE_AHEAD_MB}'",
        )
    return ok(read)


def _client(snapshot: Snapshot) -> Lustre:
    return known(snapshot.lustre) or Lustre()


def network_speed(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    far = [p for p in snapshot.places if p.role == "data" and p.filesystem in NETWORK]
    if not far or need.read_bytes_s is None:
        return
    # a RoCE port is its interface seen from another side
    speeds = [n.speed_bytes_s for n in known(snapshot.nics) if n.up is True and not _has_interface(n)]
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


def _has_interface(nic: Nic) -> bool:
    return isinstance(nic.port, Port) and bool(nic.port.netdev)


def _over_nfs(look_at: Callable[[Place], Seen]) -> Look:
    def look(place: Place, snapshot: Snapshot, need: Need) -> Seen | None:
        return look_at(place) if known(place.filesystem).startswith("nfs") else None

    return over_places(look, *_OURS)


def _number(place: Place, name: str) -> int | None:
    for option in known(place.options):
        key, _, value = option.partition("=")
        if key == name and value.isdigit():
            return int(value)
    return None


def _remount(place: Place) -> str:
    """Most NFS options hold for a fresh mount only; long caching is for data, which nobody changes. What else
    the mount was made with stays: its security, its version, that it is read-only."""
    mountpoint, source = shlex.quote(known(place.mountpoint)), shlex.quote(known(place.source))
    kept = [option for option in known(place.options) if not _REPLACED.fullmatch(option)]
    wanted = ["hard", "noatime", "nconnect=8", f"rsize={_TRANSFER}", f"wsize={_TRANSFER}"]
    wanted += ["actimeo=600"] if place.role == "data" else []
    options = shlex.quote(",".join([*kept, *wanted]))
    return f"umount {mountpoint} && mount -t {known(place.filesystem)} -o {options} {source} {mountpoint}"


_OURS = ("data", "cache")  # a home on NFS is told by the check of the hub's cache

CHECKS = about(
    "shared storage",
    Check(
        "NFS transfer size",
        _over_nfs(nfs_transfer),
        "rsize and wsize are the bytes of one request: at 64 KiB a shard takes sixteen times the round "
        "trips.",
    ),
    Check(
        "NFS connections",
        _over_nfs(nfs_connections),
        "One TCP connection is one flow on one core and one path of the network, however many ranks read.",
    ),
    Check(
        "NFS caching",
        _over_nfs(nfs_caching),
        "Shards never change, yet each open asks the server again when attributes and lookups are not "
        "cached; on many small files that is most of the time.",
    ),
    Check(
        "NFS errors",
        _over_nfs(nfs_safety),
        "A soft mount gives up while a server is slow, and a read fails in the middle of an epoch.",
    ),
    Check(
        "NFS repeats",
        _over_nfs(nfs_resent),
        "A request that is sent again has waited for its time-out, seconds each.",
    ),
    Check(
        "NFS read-ahead",
        _over_nfs(nfs_read_ahead),
        "Kernels from 5.4 on read 128 KiB ahead on NFS, less than one request of 1 MiB: a stream waits for "
        "every round trip.",
    ),
    Check(
        "EFS mode",
        over_places(efs, *_OURS, "hub"),
        "Bursting throughput falls to 50 KiB/s for each GiB stored once its credits are spent.",
    ),
    Check(
        "Lustre stripes",
        over_places(stripes, "data"),
        "A file with one stripe lies on one server: all ranks that read it share that server's bandwidth.",
    ),
    Check(
        "Lustre requests",
        over_places(lustre_requests, "data"),
        "A client waits for each target with few requests under way: large reads do not fill the network.",
    ),
    Check(
        "Lustre read-ahead",
        over_places(lustre_read_ahead, "data"),
        "All files of a client share one read-ahead: with many ranks each stream gets nothing and reads "
        "block by block.",
    ),
    Check(
        "network speed",
        network_speed,
        "What a node reads from shared storage passes through its interfaces.",
    ),
)
