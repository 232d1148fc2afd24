"""Storage benchmark: a folder or file by engine, block size and threads; its knee, and the setting there.

The file has no name (O_TMPFILE), so no ending leaves it behind. Reads past the page cache are O_DIRECT; cold
buffered ones drop the file's pages first and read each block once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from stoker.bench.card.asking import check_device
from stoker.bench.card.onward import Onward, Reached, reach_card, usual_ways
from stoker.bench.drive import Driven, Workload, drive
from stoker.bench.figures import Bench, Figure
from stoker.errors import StorageError, UsageError
from stoker.formats.sizes import counted, say_binary, say_size
from stoker.machine.allowed import usable_cores
from stoker.machine.files import Files
from stoker.machine.host import read_memory
from stoker.machine.mounts import mounts_of
from stoker.native import native
from stoker.storage import named_errors

_ENOUGH = 0.95  # of the best rate: the knee is the least that reaches it
_LEFT_FREE = 1 << 30  # a disk that is nearly full is not filled by us
_LEAST_BYTES = 64 << 20
_FILL_BLOCK = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A workload and where the page cache stands in it."""

    work: Workload
    cache: str = "direct"  # past the page cache; "cold": through it, from the disk; "warm": out of it

    @property
    def name(self) -> str:
        work = self.work
        what = f"{'random' if work.random else 'sequential'} {'write' if work.writes else 'read'}"
        engine = work.engine if work.engine != "sync" else "pwrite" if work.writes else "pread"
        depth = f" × depth {work.depth}" if work.engine == "io_uring" else ""
        how = f"{say_binary(work.block)} × {counted(work.threads, 'thread')}{depth}"
        return f"{what}, {self.cache} {engine}, {how}"


def usual_trials(*, seconds: float, most_threads: int, reads_only: bool = False) -> list[Trial]:
    """A table in seconds: blocks against threads past the cache, then what else people ask."""
    threads = [count for count in (1, 4, 16, 64) if count <= max(16, most_threads)]

    def trial(cache: str = "direct", **work: object) -> Trial:
        return Trial(work=replace(Workload(seconds=seconds), **work), cache=cache)  # type: ignore[arg-type]

    found = [trial(block=size << 10, threads=n) for size in (128, 1024, 4096) for n in threads]
    found += [trial(block=4096, threads=n, random=True) for n in threads]
    found += [trial(engine="io_uring", block=1 << 20, depth=n) for n in (4, 16)]
    found += [trial(engine="io_uring", block=4096, depth=64, random=True)]
    found += [trial("cold", threads=n, repeats=False) for n in threads[:2]]
    found += [trial("warm", threads=n) for n in threads[:2]]
    if not reads_only:  # another's file may be cut short while it is mapped, which would end this process
        found += [trial("warm", engine="mmap")]
        found += [trial(block=4 << 20, threads=n, writes=True) for n in threads[:2]]
        found += [trial(block=4096, threads=1, random=True, writes=True)]
    return found


def bench_path(
    path: Path,
    *,
    size: int = 1 << 30,
    seconds: float = 0.4,
    trials: Sequence[Trial] | None = None,
    card: str = "",
    ways: Sequence[Onward] | None = None,
    said: Callable[[str, int, int], None] = lambda name, done, of: None,
) -> Bench:
    """Measure a folder with a file of our own, or one of the user's files by reading it; and with a `card`
    (`cuda:0`) on to it."""
    if card:
        check_device(card)
    with _opened(path, size) as (descriptor, file_bytes, reads_only):
        usual = usual_trials(seconds=seconds, most_threads=4 * usable_cores(), reads_only=reads_only)
        _check(trials or usual[:1], file_bytes, reads_only=reads_only)
        wanted = trials or [one for one in usual if _fits(one, file_bytes)]
        notes, figures, found = list[str](), list[Figure](), list[tuple[Trial, Driven]]()
        if not trials:
            few = f"{say_binary(file_bytes)} are too few"
            notes += [f"{one.name}: {few}" for one in usual if one not in wanted]
        if not reads_only:
            said("filling a file", 0, len(wanted))
            figures.append(_filled(descriptor, file_bytes))
        for number, trial in enumerate(wanted):
            said(trial.name, number, len(wanted))
            try:
                found.append((trial, run_trial(descriptor, file_bytes, trial)))
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM):
                    raise
                notes.append(f"{trial.name}: {_refusal(error, trial)}")
        past_cache = [driven.bytes_s for trial, driven in found if trial.cache == "direct"]
        reached = Reached()
        if card:
            reached = reach_card(
                descriptor,
                file_bytes,
                device=card,
                ways=usual_ways(seconds) if ways is None else ways,
                storage_bytes_s=max(past_cache, default=0.0),
                said=said,
            )
    best = knee([(trial, driven) for trial, driven in found if _is_stream(trial)])
    figures += [_figure(trial, driven, found) for trial, driven in found]
    return Bench(
        verb="path",
        of=f"{path}, {say_binary(file_bytes)}",
        figures=figures + reached.figures,
        advice=([] if trials else _advice(best)) + reached.advice,  # one setting has no knee
        measured={"nvme_rate": best[1].bytes_s} if best else {},
        notes=_grouped(notes + reached.notes),
    )


def knee(found: Sequence[tuple[Trial, Driven]]) -> tuple[Trial, Driven] | None:
    """The cheapest setting that reaches nearly the best rate: fewest calls at once, then the least block."""
    if not found:
        return None
    enough = _ENOUGH * max(driven.bytes_s for _, driven in found)
    good = [(trial, driven) for trial, driven in found if driven.bytes_s >= enough]
    return min(good, key=lambda one: (one[0].work.threads * one[0].work.depth, one[0].work.block))


def run_trial(descriptor: int, file_bytes: int, trial: Trial) -> Driven:
    """One trial, the page cache as it says."""
    _direct(descriptor, trial.cache == "direct")
    if trial.cache == "cold":
        os.fsync(descriptor)
        _drop(descriptor, file_bytes)
    elif trial.cache == "warm":
        drive(
            descriptor,
            file_bytes,
            Workload(block=min(1 << 20, trial.work.block), repeats=False, seconds=60.0),
        )
    try:
        return drive(descriptor, file_bytes, trial.work)
    finally:
        if trial.work.writes and trial.cache != "direct":
            os.fsync(descriptor)
        _direct(descriptor, False)


@contextmanager
def _opened(path: Path, size: int) -> Iterator[tuple[int, int, bool]]:
    """A descriptor, the bytes that may be read, and whether that is all that may be done."""
    with named_errors("measure", path):
        if path.is_dir():
            descriptor, file_bytes = _nameless(path), _room(path, size)
        elif path.is_file():
            descriptor, file_bytes = os.open(path, os.O_RDONLY), path.stat().st_size
        else:
            raise UsageError(f"{path} is no folder and no file", hint="give a folder on the disk to measure")
    try:
        with named_errors("measure", path):
            yield descriptor, file_bytes, path.is_file()
    finally:
        os.close(descriptor)


def _nameless(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
    descriptor, name = tempfile.mkstemp(prefix=".stoker-bench-", dir=folder)
    os.unlink(name)
    return descriptor


def _room(folder: Path, size: int) -> int:
    """The size in whole blocks of the first write: what was never written is read from no disk."""
    size = -(-size // _FILL_BLOCK) * _FILL_BLOCK
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    if free < size + _LEFT_FREE:
        raise StorageError(
            f"{folder} has {say_size(free)} free: too little for a file of {say_size(size)}",
            hint=f"give --size {say_binary(max(_LEAST_BYTES, (free - _LEFT_FREE) // 2)).replace(' ', '')}, "
            "or another folder",
        )
    return size


def _check(trials: Sequence[Trial], file_bytes: int, *, reads_only: bool) -> None:
    for trial in trials:
        if not _fits(trial, file_bytes):
            raise UsageError(
                f"{say_binary(file_bytes)} are too few for {trial.name}",
                hint="give a larger --size or file, smaller blocks, or fewer threads",
            )
        if reads_only and (trial.work.writes or trial.work.engine == "mmap"):
            raise UsageError("a file of yours is only read, and not mapped", hint="give its folder instead")
        if trial.work.writes and trial.work.engine == "mmap":
            raise UsageError("what is mapped is only read", hint="write with --engine pread or io_uring")
        _check_memory(trial)


def _fits(trial: Trial, file_bytes: int) -> bool:
    return trial.work.block * trial.work.threads <= file_bytes


def _check_memory(trial: Trial) -> None:
    """Every call on its way has a buffer: 1,024 threads of depth 1,024 have a million."""
    depth = trial.work.depth if trial.work.engine == "io_uring" else 1
    wanted, free = trial.work.block * trial.work.threads * depth, read_memory(Files()).available_bytes
    if isinstance(free, int) and wanted > free // 2:
        raise UsageError(
            f"{trial.name} needs buffers of {say_size(wanted)}, and {say_size(free)} are available",
            hint="give smaller blocks, fewer threads, or less depth",
        )


def _filled(descriptor: int, file_bytes: int) -> Figure:
    """Write every block once, as a checkpoint is written: past the cache where that works, then synced."""
    work = Workload(block=_FILL_BLOCK, writes=True, repeats=False, seconds=600.0)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, file_bytes)  # also says now that a quota does not allow it
    is_direct = _takes_direct(descriptor)
    _direct(descriptor, is_direct)
    driven = drive(descriptor, file_bytes, work)
    begun = time.monotonic()
    os.fsync(descriptor)
    driven = replace(driven, seconds=driven.seconds + time.monotonic() - begun)
    how = "direct" if is_direct else "buffered"
    return _plain(
        f"first write and sync, {how}, 4 MiB × 1 thread", driven, limit="the first write of new space"
    )


def _takes_direct(descriptor: int) -> bool:
    try:
        run_trial(descriptor, 4096, Trial(work=Workload(block=4096, writes=True, repeats=False)))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False
    return True


def _drop(descriptor: int, file_bytes: int) -> None:
    """Drop the pages of a file, or say that they stay: of a tmpfs, or where somebody has mapped them."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        if not _in_memory(descriptor):
            os.preadv(descriptor, [bytearray(1)], file_bytes - 1, os.RWF_NOWAIT)
    except OSError:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # what was just read ahead
        return  # EAGAIN: it is not there; others: the filesystem does not tell
    raise OSError(errno.EOPNOTSUPP, "the file's pages stay in memory")


def _in_memory(descriptor: int) -> bool:
    device = os.fstat(descriptor).st_dev
    told = Files().text("/proc/self/mountinfo")
    mounts = mounts_of(told) if isinstance(told, str) else []
    name = f"{os.major(device)}:{os.minor(device)}"
    return any(one.device == name and one.filesystem in ("tmpfs", "ramfs") for one in mounts)


def _direct(descriptor: int, wanted: bool) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)


def _is_stream(trial: Trial) -> bool:
    return trial.cache == "direct" and not trial.work.random and not trial.work.writes


def _figure(trial: Trial, driven: Driven, found: Sequence[tuple[Trial, Driven]]) -> Figure:
    return _plain(trial.name, driven, limit=_limit(trial, driven, found))


def _plain(name: str, driven: Driven, *, limit: str) -> Figure:
    return Figure(
        name=name,
        value=driven.bytes_s,
        unit="B/s",
        limit=limit,
        beside={
            "p50_s": driven.latency_s(0.5),
            "p99_s": driven.latency_s(0.99),
            "cores": driven.cpu_s / max(1e-9, driven.seconds),
        },
    )


def _limit(trial: Trial, driven: Driven, found: Sequence[tuple[Trial, Driven]]) -> str:
    """What holds a workload back: its processors, too few calls at once, or the device."""
    at_once = trial.work.threads * trial.work.depth
    busy = driven.cpu_s / max(1e-9, driven.seconds)
    if trial.cache == "warm" and not trial.work.writes:
        return "memory and the processor"  # no device has a part in it
    if busy >= 0.9 * min(trial.work.threads, usable_cores()):
        return "the processor" if trial.cache == "direct" else "memory and the processor"
    more = [
        other.bytes_s
        for one, other in found
        if one.cache == trial.cache
        and replace(one.work, threads=1, depth=1) == replace(trial.work, threads=1, depth=1)
        and one.work.threads * one.work.depth > at_once
    ]
    if more and max(more) > driven.bytes_s / _ENOUGH:
        return "too few calls at once"
    return "the device"


def _advice(best: tuple[Trial, Driven] | None) -> list[str]:
    if not best:
        return []
    work = best[0].work
    at_once = work.threads * work.depth
    give = "at once gives" if at_once == 1 else "at once give"
    return [
        f"{counted(at_once, 'read')} of {say_binary(work.block)} {give} {say_size(best[1].bytes_s)}/s: "
        f"more in flight or larger blocks gain less than {1 - _ENOUGH:.0%}",
        f"stoker.feed(readers={at_once}, chunk_bytes={work.block}) starts there; left out, "
        "they are tuned while it runs",
    ]


def _refusal(error: OSError, trial: Trial) -> str:
    if trial.work.engine == "io_uring":
        built = native("bench._drive") is not None
        return "io_uring is not allowed here" if built else "needs the C module, which was not built"
    if trial.cache == "direct":
        return "the filesystem has no O_DIRECT"
    return error.strerror or str(error)


def _grouped(notes: Sequence[str]) -> list[str]:
    """A reason once, with how many trials it kept away."""
    reasons: dict[str, int] = {}
    for note in notes:
        reason = note.partition(": ")[2]
        reasons[reason] = reasons.get(reason, 0) + 1
    return [f"{counted(count, 'trial')}: {reason}" for reason, count in reasons.items()]
