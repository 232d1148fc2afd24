"""What was tried, judged: rates, syncs, locked memory, copies, sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import machine, seen

from stoker.doctor.examine import examine
from stoker.doctor.need import Need
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import Nic, Snapshot
from stoker.machine.trials import FolderTrial, LockTrial, RankTrial, Trials

GOOD = machine("good_node")
FAST = FolderTrial(role="cache", path="/nvme", write_bytes_s=2e9, sync_s=0.001, read_bytes_s=3e9, direct=True)
RANKS = tuple(
    RankTrial(rank=rank, device=f"cuda:{rank}", pin_s=0.1, copy_bytes_s=50e9, reduce_s=0.001, sum_right=True)
    for rank in range(8)
)


def tried(**changes: object) -> Snapshot:
    whole = Trials(folders=(FAST,), lock=LockTrial(bytes=64 << 20, seconds=0.01), ranks=RANKS)
    return replace(GOOD, trials=replace(whole, **changes))


def told(snapshot: Snapshot, check: str, need: Need | None = None) -> list[tuple[str, str]]:
    return [(result.level, result.seen.read) for result in seen(snapshot, check, need)]


def test_what_was_not_tried_is_not_told() -> None:
    assert {result.check.subject for result in examine(GOOD)} & {"tried"} == set()


def test_a_machine_that_does_what_it_says_is_good() -> None:
    results = [result for result in examine(tried()) if result.check.subject == "tried"]
    assert {result.level for result in results} == {"ok"}
    assert len(results) == 11


@pytest.mark.parametrize(
    ("trial", "need", "level", "words"),
    [
        (FAST, Need(), "ok", "a sync takes 1.0 ms"),
        (replace(FAST, direct=False), Need(), "ok", "no O_DIRECT"),
        (replace(FAST, read_bytes_s=100e6), Need(), "warn", "191 MiB/s a stream"),
        (replace(FAST, read_bytes_s=1e9), Need(read_bytes_s=16_000_000_000), "warn", "1.86 GiB/s a stream"),
        (replace(FAST, write_bytes_s=50e6), Need(), "warn", "written 47.7 MiB/s"),
        (replace(FAST, sync_s=0.2), Need(), "warn", "a sync takes 200.0 ms"),
        (replace(FAST, error="Disk quota exceeded"), Need(), "fail", "Disk quota exceeded"),
        (replace(FAST, read_bytes_s=Unknown(reason="no file")), Need(), "unknown", "no file"),
    ],
)
def test_a_folder_is_judged_by_what_it_did(trial: FolderTrial, need: Need, level: str, words: str) -> None:
    ((found, read),) = told(tried(folders=(trial,)), "folders tried", need)
    assert (found, words in read) == (level, True), read


@pytest.mark.parametrize(("rdma", "level"), [(True, "fail"), (False, "ok")])
def test_memory_that_cannot_be_locked_matters_to_rdma_alone(rdma: bool, level: str) -> None:
    refused = LockTrial(bytes=64 << 20, seconds=0.0, error="Cannot allocate memory")
    node = tried(lock=refused)
    nics = node.nics if rdma else (Nic(name="eth0"),)
    assert told(replace(node, nics=nics), "memory locked")[0][0] == level


def test_a_copy_far_below_its_link_is_told() -> None:
    slow = (replace(RANKS[0], copy_bytes_s=12e9), *RANKS[1:])
    assert [level for level, _ in told(tried(ranks=slow), "copy to the card")] == ["warn"] + ["ok"] * 7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"error": "no answer in 60 s"}, "rank 3: no answer"),
        ({"sum_right": False}, "wrong sums on rank 3"),
    ],
)
def test_an_all_reduce_that_fails_or_is_wrong_fails(change: dict[str, object], words: str) -> None:
    ranks = (*RANKS[:3], replace(RANKS[3], **change), *RANKS[4:])
    ((level, read),) = told(tried(ranks=ranks), "all-reduce")
    assert (level, words in read) == ("fail", True)


def test_a_card_that_torch_does_not_see_fails() -> None:
    blind = tuple(replace(rank, device="cpu", copy_bytes_s=None) for rank in RANKS)
    assert {level for level, _ in told(tried(ranks=blind), "copy to the card")} == {"fail"}
