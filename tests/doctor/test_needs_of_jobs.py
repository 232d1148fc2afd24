"""A machine against what a job needs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from machines import GIB, LARGE, faults, machine, seen

from stoker.doctor.examine import examine
from stoker.doctor.need import Need, need_of, read_need
from stoker.errors import BadInputError, UnreadableError
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import Cgroup, Memory, Snapshot, Surroundings

POD = Snapshot(
    memory=Memory(total_bytes=512 * GIB, shm_bytes=32 * GIB, shm_used_bytes=0),
    cgroup=Cgroup(version=2, memory_limit_bytes=100 * GIB, memory_used_bytes=GIB),
    surroundings=Surroundings(container="kubernetes", kubernetes=True),
)


def test_shared_memory_counts_inside_the_limit() -> None:
    (result,) = seen(POD, "shared memory in the limit")
    assert result.seen.read == "limit 100 GiB − /dev/shm 32 GiB = 68 GiB for processes"


@pytest.mark.parametrize(("processes_gib", "level"), [(68, "ok"), (69, "fail")])
def test_what_shared_memory_leaves_must_do_for_the_processes(processes_gib: int, level: str) -> None:
    need = Need(memory_bytes=(processes_gib + 16) * GIB, shm_bytes=16 * GIB)
    (result,) = seen(POD, "shared memory in the limit", need)
    assert result.level == level


def test_a_limit_that_is_too_small_says_the_manifest_line() -> None:
    (result,) = seen(POD, "memory limit", Need(memory_bytes=120 * GIB))
    assert (result.level, result.seen.fix) == (
        "fail",
        ("spec.containers[].resources.limits: {memory: 120Gi}",),
    )


def test_shared_memory_as_large_as_the_limit_is_told() -> None:
    """An emptyDir of memory without a sizeLimit takes the pod's."""
    pod = replace(POD, memory=replace(POD.memory, shm_bytes=100 * GIB))
    (result,) = seen(pod, "shared memory in the limit")
    assert (result.level, "sizeLimit: 25Gi" in result.seen.fix[0]) == ("warn", True)


@pytest.mark.parametrize(("shm_gib", "level"), [(16, "ok"), (32, "ok"), (33, "fail")])
def test_shared_memory_is_held_against_the_need(shm_gib: int, level: str) -> None:
    (result,) = seen(POD, "shared memory", Need(shm_bytes=shm_gib * GIB))
    assert result.level == level


def test_a_job_that_needs_no_shared_memory_is_content_with_the_container_default() -> None:
    pod = replace(POD, memory=replace(POD.memory, shm_bytes=64 << 20))
    assert [seen(pod, "shared memory", need)[0].level for need in (None, Need(shm_bytes=0))] == ["fail", "ok"]


def test_a_machine_too_small_for_a_large_job_fails_in_all_that_it_lacks() -> None:
    found = faults(examine(machine("nfs_node"), need=LARGE))
    failed = {"cores", "open files", "free space", "network speed", "GPUs", "writable cache"}
    assert {name for name, level in found.items() if level == "fail"} == failed


def test_a_good_machine_is_good_enough_for_its_job() -> None:
    need = replace(LARGE, cache_bytes=1 << 40, open_files=100_000, cpu_cores=32, read_bytes_s=10**9, gpus=8)
    assert faults(examine(machine("good_node"), need=need)) == {}


def test_a_job_that_comes_back_finds_its_share_and_needs_no_room_for_it() -> None:
    good = machine("good_node")
    (cache,) = [place for place in good.places if place.role == "cache"]
    full = replace(cache, free_bytes=1 << 30)
    levels = []
    for held in (Unknown(reason="not counted"), 0, 2 << 40):
        here = replace(good, places=(replace(full, held_bytes=held),))
        levels.append(seen(here, "free space", Need(cache_bytes=2 << 40))[0].level)
    assert levels[:2] == ["fail", "fail"]
    assert levels[2] != "fail"


def test_the_needs_of_a_plan_are_read(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(
        json.dumps({"stoker": "plan", "needs": {"shm_bytes": 5, "cpu_cores": 8.0, "later": 1}})
    )
    assert read_need(tmp_path / "plan.json") == Need(shm_bytes=5, cpu_cores=8)


def test_a_loaders_settings_become_needs() -> None:
    """Eight workers hold two batches each and make a third, in each of two ranks."""
    settings = {"workers": 8, "prefetch": 2, "batch_bytes": 1 << 20, "ranks": 2}
    assert need_of(settings) == Need(shm_bytes=48 << 20, cpu_cores=18)


@pytest.mark.parametrize(
    "wrong",
    [[], {}, {"needs": {"shm_bytes": -1}}, {"shm_bytes": "many"}, {"workers": None}, {"colour": 3}],
    ids=str,
)
def test_a_file_that_names_no_need_is_refused(wrong: Any, tmp_path: Path) -> None:
    (tmp_path / "need.json").write_text(json.dumps(wrong))
    with pytest.raises(BadInputError, match=r"need\.json is no need"):
        read_need(tmp_path / "need.json")


def test_a_need_that_is_not_there_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError):
        read_need(tmp_path / "none.json")


@pytest.mark.parametrize("opening", ["[", '{"needs":'], ids=["lists", "tables"])
def test_a_need_that_is_nested_without_end_is_refused(opening: str, tmp_path: Path) -> None:
    (tmp_path / "need.json").write_text(opening * 100_000)
    with pytest.raises(BadInputError, match="nested too deeply"):
        read_need(tmp_path / "need.json")


def test_a_file_without_an_end_is_not_read_to_it() -> None:
    with pytest.raises(BadInputError, match="longer than 16 MiB"):
        read_need(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("needs", "meant"),
    [
        ({"shm_bytes": 1, "memory_byte": 5}, "memory_bytes"),
        ({"workers": 8, "batch_byte": 5}, "batch_bytes"),
    ],
)
def test_a_misspelt_need_is_not_overlooked(needs: dict[str, int], meant: str) -> None:
    with pytest.raises(ValueError, match=f"is not known, {meant} is"):
        need_of(needs)


@pytest.mark.parametrize("huge", [1 << 62, 10**300, float("inf"), float("nan"), 1.5, True])
def test_a_number_that_no_machine_has_is_refused(huge: float) -> None:
    with pytest.raises(ValueError, match="shm_bytes must be"):
        need_of({"shm_bytes": huge})
