"""Checks of what was tried: rates, syncs, locked memory, copies, an all-reduce. Silent where nothing was."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from stoker.doctor.check import Check, Seen, about, cards, fail, has_rdma, known, ok, say, warn
from stoker.doctor.need import Need
from stoker.formats.sizes import counted
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import Snapshot
from stoker.machine.trials import FolderTrial, RankTrial, Trials

_SLOW_BYTES_S = 200e6  # one turning disk
_STREAMS = 8  # what a node reads with at once; a trial is one of them
_SLOW_SYNC_S = 0.05
# Bytes a second of one lane by generation, after its encoding.
_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}
_POOR_SHARE = 0.5
_SLOW_COPY_BYTES_S = 6e9


def folders(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    for trial in _trials(snapshot).folders:
        yield _folder(trial, need)


def _folder(trial: FolderTrial, need: Need) -> Seen:
    where, path = f"{trial.role} {trial.path}", shlex.quote(trial.path)
    if trial.error is not None:
        return fail(
            f"{where}: {trial.error}", f"df -h {path}; df -i {path}; ls -ld {path}  # room and rights"
        )
    if isinstance(trial.read_bytes_s, Unknown):
        return Seen(level="unknown", read=f"{where}: {trial.read_bytes_s.reason}")
    told = f"{where}: {', '.join(_words(trial))}"
    wanted = max(_SLOW_BYTES_S, (need.read_bytes_s or 0) / _STREAMS)
    slow_read = trial.read_bytes_s is not None and trial.read_bytes_s < wanted
    slow_write = isinstance(trial.write_bytes_s, float) and trial.write_bytes_s < _SLOW_BYTES_S
    slow_sync = isinstance(trial.sync_s, float) and trial.sync_s > _SLOW_SYNC_S
    if slow_read or slow_write or slow_sync:
        return warn(
            f"{told}; {say(int(wanted))}/s a stream and {1000 * _SLOW_SYNC_S:.0f} ms a sync are usual",
            f"findmnt -T {path}  # synchronous, behind the network, or busy: look again, or another disk",
        )
    return ok(told)


def _words(trial: FolderTrial) -> Iterator[str]:
    if isinstance(trial.read_bytes_s, float):
        yield f"read {say(int(trial.read_bytes_s))}/s"
    if isinstance(trial.write_bytes_s, float):
        yield f"written {say(int(trial.write_bytes_s))}/s"
    if isinstance(trial.sync_s, float):
        yield f"a sync takes {1000 * trial.sync_s:.1f} ms"
    if trial.direct is False:
        yield "no O_DIRECT"


def locking(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    lock = known(_trials(snapshot).lock)
    if lock.error is None:
        yield ok(f"{say(lock.bytes)} locked in {1000 * known(lock.seconds):.0f} ms")
        return
    told = f"{say(lock.bytes)} could not be locked: {lock.error}"
    fix = "ulimit -l unlimited  # or as the check of locked memory says"
    yield fail(told, fix) if has_rdma(snapshot) else ok(f"{told}; no RDMA device is here to want it")


def copies(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    if not cards(snapshot):
        return
    for rank in known(_trials(snapshot).ranks):
        rate = None if isinstance(rank.copy_bytes_s, Unknown) else rank.copy_bytes_s
        if rate is None:
            yield _silent(rank)
        elif rate < (least := _least(snapshot, rank.rank)):
            yield warn(
                f"{rank.device}: {say(int(rate))}/s from pinned memory, {say(int(least))}/s is poor already",
                "nvidia-smi -q -d PCIE; nvidia-smi topo -m  # lanes, generation, this process's socket",
            )
        else:
            yield ok(f"{rank.device}: {say(int(rate))}/s from pinned memory")


def reduction(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    ranks = known(_trials(snapshot).ranks)
    backend = "NCCL" if cards(snapshot) else "gloo"
    look = (
        "NCCL_DEBUG=INFO stoker doctor --try" if cards(snapshot) else "python -c 'import torch.distributed'"
    )
    if broken := [rank for rank in ranks if rank.error is not None]:
        yield fail(
            f"{backend} over {len(ranks)}: rank {broken[0].rank}: {broken[0].error}", f"{look}  # where"
        )
    elif wrong := [rank.rank for rank in ranks if rank.sum_right is not True]:
        yield fail(
            f"{backend}: wrong sums on rank {', '.join(map(str, wrong))}", "drain the node: memory or links"
        )
    else:
        slowest = max(known(rank.reduce_s) for rank in ranks)
        yield ok(
            f"{backend} over {counted(len(ranks), 'rank')}: 1 MiB in {1000 * slowest:.1f} ms, sums right"
        )


def _silent(rank: RankTrial) -> Seen:
    if rank.error is None:
        return fail(
            f"{rank.device}: torch sees no card", "python -c 'import torch; torch.cuda.init()'  # says why"
        )
    return fail(f"{rank.device}: {rank.error}", "python -c 'import torch; torch.cuda.init()'; nvidia-smi")


def _least(snapshot: Snapshot, index: int) -> float:
    gpu = next((gpu for gpu in cards(snapshot) if gpu.index == index), None)
    if gpu is None or not isinstance(gpu.pcie_gen_max, int) or not isinstance(gpu.pcie_width_max, int):
        return _SLOW_COPY_BYTES_S
    return _POOR_SHARE * _LANE.get(gpu.pcie_gen_max, 0.0) * gpu.pcie_width_max


def _trials(snapshot: Snapshot) -> Trials:
    return known(snapshot.trials)


CHECKS = about(
    "tried",
    Check(
        "folders tried",
        folders,
        "A disk that calls itself NVMe, a quota, a mount that writes through: only writing and reading shows "
        "them.",
    ),
    Check(
        "memory locked",
        locking,
        "The limit is one thing, what the kernel grants another: cgroups and sandboxes refuse beside it.",
    ),
    Check(
        "copy to the card",
        copies,
        "A link that calls itself gen 5 and copies at a tenth of it shows by copying alone.",
    ),
    Check(
        "all-reduce",
        reduction,
        "That cards see each other, that NCCL finds its way, and that sums are right: in seconds, before a "
        "job of days.",
    ),
)
