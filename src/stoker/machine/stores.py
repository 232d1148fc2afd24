"""RAID arrays (/proc/mdstat) and the settings of a Lustre client: what is tuned beneath a mount."""

from __future__ import annotations

import re

from stoker.machine.files import Files
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import Lustre, Raid

_LUSTRE = ("/sys/fs/lustre", "/proc/fs/lustre")  # the older clients
_ARRAY = re.compile(r"^(md\S+) : (\w+)(?: \([\w-]+\))? (?:\(\w+\) )?(raid\d+|linear|multipath|faulty)?", re.M)
_MEMBERS = re.compile(r"\[(\d+)/(\d+)\] \[[U_]+\]")
_ACTION = re.compile(r"(recovery|resync|reshape|check) = *([\d.]+)%")


def read_raids(files: Files) -> tuple[Raid, ...] | Unknown:
    """The arrays; none on a kernel without them."""
    if not files.exists("/proc/mdstat"):
        return ()
    return files.parsed("/proc/mdstat", raids_of)


def raids_of(mdstat: str) -> tuple[Raid, ...]:
    """The arrays of /proc/mdstat: a first line each, and what follows up to an empty one."""
    heads = list(_ARRAY.finditer(mdstat))
    ends = [*(head.start() for head in heads), len(mdstat)][1:]
    return tuple(_raid(head, mdstat[head.end() : end]) for head, end in zip(heads, ends, strict=False))


def _raid(head: re.Match[str], text: str) -> Raid:
    members, action = _MEMBERS.search(text), _ACTION.search(text)
    return Raid(
        name=head[1],
        active=head[2] == "active",
        level=head[3] or "none",
        members=int(members[1]) if members else None,
        working=int(members[2]) if members else None,
        action=action[1] if action else None,
        done_share=float(action[2]) / 100 if action else None,
    )


def read_lustre(files: Files) -> Lustre | None:
    """The least that any target or mount of this client is set to; None without Lustre."""
    base = next((path for path in _LUSTRE if files.exists(path)), None)
    if base is None:
        return None
    return Lustre(
        rpcs_in_flight=_least(files, f"{base}/osc", "max_rpcs_in_flight"),
        read_ahead_mb=_least(files, f"{base}/llite", "max_read_ahead_mb"),
        read_ahead_per_file_mb=_least(files, f"{base}/llite", "max_read_ahead_per_file_mb"),
    )


def _least(files: Files, folder: str, name: str) -> int | Unknown:
    read = [files.parsed(f"{folder}/{one}/{name}", _megabytes) for one in files.names(folder)]
    known = [value for value in read if isinstance(value, int)]
    return min(known) if known else Unknown(reason=f"{folder}/*/{name} cannot be read")


def _megabytes(text: str) -> int:
    """Old clients write 40.00."""
    return int(float(text.split()[0]))
