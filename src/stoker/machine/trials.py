"""What was tried on a machine, as plain values: a folder written and read, memory locked, cards copied to."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.machine.plain import NOT_READ, Unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderTrial:
    """Some MiB written to a folder and read back; None: it was only read."""

    role: str
    path: str
    write_bytes_s: float | Unknown | None = NOT_READ  # to the disk: the sync counts
    sync_s: float | Unknown | None = NOT_READ  # of a block of 4 KiB
    read_bytes_s: float | Unknown | None = NOT_READ
    direct: bool | Unknown = NOT_READ  # O_DIRECT: past the page cache
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LockTrial:
    """Memory locked as an adapter's driver would."""

    bytes: int
    seconds: float | Unknown = NOT_READ
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTrial:
    """What one process saw, one to a card; of a machine without cards two that share the CPU."""

    rank: int = 0
    device: str = "cpu"
    pin_s: float | Unknown | None = NOT_READ  # to allocate the pinned buffer
    copy_bytes_s: float | Unknown | None = NOT_READ  # from pinned memory to the card
    reduce_s: float | Unknown = NOT_READ  # the second all-reduce: the first one connects
    sum_right: bool | Unknown = NOT_READ
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trials:
    """All that was tried."""

    folders: tuple[FolderTrial, ...] = ()
    lock: LockTrial | Unknown = NOT_READ
    ranks: tuple[RankTrial, ...] | Unknown = NOT_READ
