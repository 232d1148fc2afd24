"""NFS and Lustre client metrics: NFS from mountstats, Lustre from its own files."""

from __future__ import annotations

from pathlib import Path

from stoker.machine.mounts import nfs_of
from stoker.watch.gauges.kept import Kept, Rate

_LUSTRE = ("sys/kernel/debug/lustre/llite", "proc/fs/lustre/llite")


class Mounts:
    """Sums over all mounts; where there is none it costs one stat at the start."""

    def __init__(self, root: Path = Path("/")) -> None:
        stats = root / "proc/self/mountstats"
        self._nfs = Kept(stats) if _has_nfs(root / "proc/mounts") else None
        folders = [root / name for name in _LUSTRE]
        self._lustre = [Kept(path) for folder in folders for path in _stats_of(folder)]
        self._rate = Rate()

    def read(self, t: float) -> dict[str, float]:
        counters: dict[str, float] = {}
        if self._nfs is not None:
            counters |= nfs_counters(self._nfs.read())
        if self._lustre:
            counters |= lustre_counters([kept.read() for kept in self._lustre])
        rates = self._rate.per_second(t, counters)
        waited_ms = rates.pop("nfs_rtt_total_ms", 0.0)
        if rates.get("nfs_ops"):
            rates["nfs_rtt_ms"] = waited_ms / rates["nfs_ops"]
        return rates

    def close(self) -> None:
        for kept in (*self._lustre, *filter(None, [self._nfs])):
            kept.close()


def nfs_counters(mountstats: str) -> dict[str, float]:
    """Bytes read and written by servers' count, operations, and milliseconds waited for them, so far."""
    mounts = nfs_of(mountstats)
    return {
        "nfs_read": sum(mount.read_bytes for mount in mounts),
        "nfs_write": sum(mount.written_bytes for mount in mounts),
        "nfs_ops": sum(mount.calls for mount in mounts),
        "nfs_rtt_total_ms": sum(mount.rtt_ms for mount in mounts),
    }


def lustre_counters(texts: list[str]) -> dict[str, float]:
    """`read_bytes 12 samples [bytes] 4096 1048576 9437184 …`: how often, and the sum in the seventh word."""
    found = dict.fromkeys(("lustre_read", "lustre_write", "lustre_ops"), 0.0)
    for line in "\n".join(texts).split("\n"):
        words = line.split()
        if len(words) >= 3 and words[2] == "samples":
            found["lustre_ops"] += int(words[1])
            if words[0] in ("read_bytes", "write_bytes") and len(words) >= 7:
                found["lustre_" + words[0].removesuffix("_bytes")] += int(words[6])
    return found


def _has_nfs(mounts: Path) -> bool:
    try:
        return any(line.split()[2].startswith("nfs") for line in mounts.read_text().splitlines())
    except (OSError, IndexError):
        return False


def _stats_of(folder: Path) -> list[Path]:
    try:
        return sorted(folder.glob("*/stats"))
    except OSError:
        return []
