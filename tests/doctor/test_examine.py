"""Machines examined: known faults are found, nothing is invented, nothing missing is a crash."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import FOLDER, LARGE, NAMES, faults, machine

from stoker.doctor.examine import CHECKS, as_lines, examine, worst
from stoker.machine.plain import as_plain, from_plain
from stoker.machine.snapshot import Snapshot

KNOWN_FAULTS = {
    "good_node": {},
    "h200": {"cache on NVMe": "warn", "access times": "warn"},
    "small_vm": {"locked memory": "warn", "cache on NVMe": "warn", "access times": "warn"},
    "kubernetes_pod": {
        "shared memory": "fail", "memory limit": "warn", "locked memory": "fail", "open files": "warn",
        "cores": "warn", "CPU quota": "warn", "filesystem": "warn", "cache on NVMe": "warn",
        "Hugging Face cache": "warn", "NCCL variables": "fail", "OMP variables": "warn",
        "memory kills": "warn",
    },
    "nfs_node": {
        "turning disk": "warn", "read-ahead": "warn", "access times": "warn", "synchronous writes": "warn",
        "free space": "warn", "free inodes": "warn", "Hugging Face cache": "warn",
        "NFS transfer size": "warn", "NFS connections": "warn", "NFS caching": "warn", "NFS errors": "warn",
        "NFS repeats": "warn", "NFS read-ahead": "warn", "I/O and bus errors": "warn",
    },
    "lustre_slurm": {
        "locked memory": "fail", "open files": "warn", "swap": "warn", "huge pages": "warn",
        "zone reclaim": "warn", "cores": "warn", "CPU governor": "warn", "NUMA of cores": "warn",
        "NUMA balancing": "warn", "cache on NVMe": "warn", "Hugging Face cache": "warn",
        "Lustre stripes": "warn", "peer memory": "warn", "GPUDirect Storage": "warn",
        "OMP variables": "warn", "Slurm step": "warn", "memory kills": "warn",
    },
    "bad_gpus": {
        "NUMA of devices": "warn", "I/O scheduler": "warn", "read-ahead": "warn", "access times": "warn",
        "GPUs": "warn", "GPU driver": "warn", "persistence mode": "warn", "ECC": "fail",
        "power limit": "warn", "GPU clocks": "warn", "PCIe link": "warn", "peer access": "warn",
        "NVLink": "fail", "GPUDirect Storage": "fail", "NCCL variables": "warn", "torch variables": "fail",
        "GPU errors": "fail",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN_FAULTS)
def test_the_faults_of_a_recorded_machine_are_found_and_no_others(name: str) -> None:
    assert faults(examine(machine(name))) == KNOWN_FAULTS[name]


def test_every_check_finds_its_fault_somewhere() -> None:
    """`container` tells facts, and a client cannot see the mode of an EFS: it says where to look."""
    found = {
        result.check.name
        for name in NAMES
        for need in (None, LARGE)
        for result in examine(machine(name), need=need)
        if result.seen.fix
    }
    assert {check.name for check in CHECKS} - found == {"container"}


@pytest.mark.parametrize("name", NAMES)
def test_every_fault_says_what_mends_it(name: str) -> None:
    for need in (None, LARGE):
        for result in examine(machine(name), need=need):
            assert bool(result.seen.fix) or result.level in ("ok", "unknown"), result


def test_checks_have_names_of_their_own_and_reasons() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(check.why.endswith(".") for check in CHECKS)


def test_a_machine_of_which_nothing_is_known_is_unknown_throughout() -> None:
    results = examine(Snapshot())
    assert {result.level for result in results} <= {"unknown", "ok"}
    # variables that are not set are known not to be set
    assert {result.check.subject for result in results if result.level == "ok"} == {"environment"}


@pytest.mark.parametrize("name", NAMES)
def test_results_are_plain_json_and_findings(name: str) -> None:
    for result in examine(machine(name)):
        assert json.loads(json.dumps(result.as_plain()))["check"] == result.check.name
        finding = result.as_finding()
        assert bool(finding.missing) == (result.level == "unknown")
        assert finding.remedy == result.seen.fix


def test_the_report_reads_without_colour_and_puts_fixes_on_their_own_lines() -> None:
    lines = as_lines(examine(machine("small_vm")))
    assert "memory" in lines
    assert any(line.startswith("  warn    locked memory") for line in lines)
    assert any(line.startswith("          fix: echo '* - memlock unlimited'") for line in lines)
    assert lines[-1] == "0 fail, 3 warn, 1 unknown, 26 ok"


def test_the_worst_level_is_the_machines() -> None:
    assert worst([]) == "ok"
    assert worst(examine(machine("good_node"))) == "ok"
    assert worst(examine(machine("small_vm"))) == "warn"
    assert worst(examine(machine("kubernetes_pod"))) == "fail"


REQUIRED = {"version", "name", "role", "path", "index"}  # a disk without a name is no disk


def leaves(plain: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all that may be missing."""
    if isinstance(plain, dict) and "unknown" not in plain:
        inner = [leaf for key, value in plain.items() for leaf in leaves(value, (*path, key))]
    elif isinstance(plain, list) and any(isinstance(item, dict) for item in plain):
        inner = [leaf for number, value in enumerate(plain) for leaf in leaves(value, (*path, number))]
    else:
        inner = []
    droppable = path and isinstance(path[-1], str) and path[-1] not in REQUIRED
    return [*inner, path] if droppable else inner


def without(plain: Any, gone: set[tuple[Any, ...]], path: tuple[Any, ...] = ()) -> Any:
    if isinstance(plain, dict):
        return {
            key: without(value, gone, (*path, key))
            for key, value in plain.items()
            if (*path, key) not in gone
        }
    if isinstance(plain, list):
        return [without(value, gone, (*path, number)) for number, value in enumerate(plain)]
    return plain


PLAIN = {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in NAMES}
LEAVES = {name: leaves(plain) for name, plain in PLAIN.items()}


@given(data=st.data())
def test_any_machine_with_fields_missing_is_examined(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES))
    gone = data.draw(st.sets(st.sampled_from(LEAVES[name]), max_size=40))
    need = data.draw(st.sampled_from([None, LARGE]))
    examine(from_plain(Snapshot, without(PLAIN[name], gone)), need=need)


@given(gone=st.sets(st.sampled_from(LEAVES["good_node"]), max_size=40))
def test_nothing_is_invented_where_fields_of_a_good_machine_are_missing(gone: set[tuple[Any, ...]]) -> None:
    assert faults(examine(from_plain(Snapshot, without(PLAIN["good_node"], gone)))) == {}


def test_where_one_field_of_a_good_machine_is_missing_nothing_is_wrong() -> None:
    plain, paths = PLAIN["good_node"], LEAVES["good_node"]
    one_of_each = {tuple(key for key in leaf if isinstance(key, str)): leaf for leaf in paths}
    for leaf in one_of_each.values():
        assert faults(examine(from_plain(Snapshot, without(plain, {leaf})))) == {}, leaf


def test_recorded_machines_are_as_this_release_writes_them() -> None:
    for name in NAMES:
        assert as_plain(machine(name)) == PLAIN[name], name
