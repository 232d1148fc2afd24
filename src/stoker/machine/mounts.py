"""Mount tables: what is mounted where (mountinfo), and what NFS did on each of its mounts (mountstats)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """A line of mountinfo."""

    device: str
    mountpoint: str
    filesystem: str
    source: str
    options: tuple[str, ...]


@dataclass(kw_only=True, slots=True)
class NfsMount:
    """A mount's options in force, and its counters since it was mounted; filled while its lines are read."""

    mountpoint: str
    options: tuple[str, ...] = ()
    read_bytes: int = 0  # from and to the server, without what the page cache answered
    written_bytes: int = 0
    calls: int = 0
    sends: int = 0
    rtt_ms: int = 0  # waited for the server, over all calls

    @property
    def resent_share(self) -> float:
        return max(0, self.sends - self.calls) / max(1, self.calls)


def mounts_of(mountinfo: str) -> list[Mount]:
    """The mounts of /proc/self/mountinfo; the options of a mount and of its filesystem together."""
    found = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        _, _, device, _, mountpoint, options, *_ = left.split(" ")
        filesystem, source, *rest = right.split(" ")  # a source may be empty
        both = dict.fromkeys(f"{options},{rest[-1] if rest else ''}".rstrip(",").split(","))
        found.append(
            Mount(
                device=device,
                mountpoint=_unescaped(mountpoint),
                filesystem=filesystem,
                source=_unescaped(source),
                options=tuple(both),
            )
        )
    return found


def nfs_of(mountstats: str) -> list[NfsMount]:
    """The NFS mounts of /proc/self/mountstats."""
    found: list[NfsMount] = []
    inside = False
    for words in map(str.split, mountstats.splitlines()):
        if words[:1] == ["device"]:  # SOURCE mounted on MOUNTPOINT with fstype nfs4 statvers=1.1
            inside = len(words) >= 8 and words[7].startswith("nfs")
            if inside:
                found.append(NfsMount(mountpoint=_unescaped(words[4])))
        elif inside and words:
            _count(found[-1], words)
    return found


def _count(mount: NfsMount, words: list[str]) -> None:
    if words[0] == "opts:":
        mount.options = tuple(words[1].split(","))
    elif words[0] == "bytes:":  # the first four are what programs asked for
        mount.read_bytes, mount.written_bytes = int(words[5]), int(words[6])
    elif len(words) >= 8 and words[0].rstrip(":").isupper():  # an operation: calls, transmissions, …
        mount.calls += int(words[1])
        mount.sends += int(words[2])
        mount.rtt_ms += int(words[7])


def _unescaped(text: str) -> str:
    """mountinfo writes a blank as \\040."""
    return text.encode().decode("unicode_escape").encode("latin-1").decode("utf-8", "replace")
