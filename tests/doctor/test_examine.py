"""Machines examined: known faults are found, nothing is invented, nothing missing is a crash."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import FOLDER, LARGE, NAMES, faults, machine

from stoker.doctor.check import known
from stoker.doctor.examine import CHECKS, as_lines, examine, worst
from stoker.machine.plain import as_plain, from_plain
from stoker.machine.snapshot import Snapshot

KNOWN_FAULTS = {
    "good_node": {},
    "h200": {"cache on NVMe": "warn", "access times": "warn"},
    "small_vm": {"cache on NVMe": "warn", "access times": "warn"},
    "kubernetes_pod": {
        "shared memory": "fail", "memory limit": "warn", "locked memory": "fail", "open files": "warn",
        "cores": "warn", "CPU quota": "warn", "filesystem": "warn", "cache on NVMe": "warn",
        "Hugging Face cache": "warn", "NCCL variables": "fail", "OMP variables": "warn",
        "memory kills": "warn",
    },
    "nfs_node": {
        "turning disk": "warn", "read-ahead": "warn", "access times": "warn", "synchronous writes": "warn",
        "writable cache": "fail", "free space": "warn", "free inodes": "warn", "Hugging Face cache": "warn",
        "NFS transfer size": "warn", "NFS connections": "warn", "NFS caching": "warn", "NFS errors": "warn",
        "NFS repeats": "warn", "NFS read-ahead": "warn", "I/O and bus errors": "warn",
    },
    "lustre_slurm": {
        "locked memory": "fail", "open files": "warn", "swap": "warn", "huge pages": "warn",
        "zone reclaim": "warn", "cores": "warn", "CPU governor": "warn", "NUMA of cores": "warn",
        "NUMA balancing": "warn", "cache on NVMe": "warn", "Hugging Face cache": "warn",
        "Lustre stripes": "warn", "Lustre requests": "warn", "Lustre read-ahead": "warn",
        "peer memory": "warn", "GPUDirect Storage": "warn",
        "OMP variables": "warn", "Slurm step": "warn", "memory kills": "warn",
    },
    "bad_gpus": {
        "NUMA of devices": "warn", "I/O scheduler": "warn", "read-ahead": "warn", "access times": "warn",
        "GPUs": "warn", "GPU driver": "warn", "persistence mode": "warn", "ECC": "fail",
        "power limit": "warn", "GPU clocks": "warn", "PCIe link": "warn", "peer access": "warn",
        "NVLink": "fail", "GPUDirect Storage": "fail", "NCCL variables": "warn", "torch variables": "fail",
        "GPU errors": "fail",
    },
    "fabric_faults": {
        "process limit": "warn", "C-states": "warn", "RAID": "warn", "PCIe link": "warn", "MIG": "warn",
        "memory rows": "fail", "NVSwitch fabric": "fail", "torch build": "fail", "PCIe of devices": "warn",
        "IOMMU": "warn", "ACS": "warn", "adapters near cards": "warn", "RDMA ports": "warn",
        "RDMA speed": "warn", "RDMA errors": "warn", "RoCE addresses": "warn", "MTU": "warn",
        "clock": "warn", "folders tried": "warn", "memory locked": "fail", "copy to the card": "warn",
        "all-reduce": "fail",
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
def test_results_are_plain_json(name: str) -> None:
    for result in examine(machine(name)):
        assert json.loads(json.dumps(result.as_plain()))["check"] == result.check.name


def test_the_report_reads_without_colour_and_puts_fixes_on_their_own_lines() -> None:
    lines = as_lines(examine(machine("small_vm")))
    assert "memory" in lines
    assert any(line.startswith("  warn    access times") for line in lines)
    assert any(line.startswith("          fix: mount -o remount,noatime /") for line in lines)
    assert lines[-1] == "0 fail, 2 warn, 5 unknown, 28 ok"


def test_the_worst_level_is_the_machines() -> None:
    assert worst([]) == "ok"
    assert worst(examine(machine("good_node"))) == "ok"
    assert worst(examine(machine("small_vm"))) == "warn"
    assert worst(examine(machine("kubernetes_pod"))) == "fail"


REQUIRED = {"version", "name", "role", "path", "index", "rdma"}  # a disk without a name is no disk


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


HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\nfix: rm -rf /\u202e\u2028\x9b\udcff"


def test_other_peoples_text_cannot_steer_the_terminal() -> None:
    """Names of mounts, variables and the kernel's log, on one line each and without control characters."""
    good = machine("good_node")
    place = replace(
        good.places[1], path=f"/c{HOSTILE}", mountpoint=f"/m{HOSTILE}", options=("relatime", "sync", HOSTILE)
    )
    node = replace(
        good,
        places=(place,),
        environ={"NCCL_ALGO": HOSTILE, "OMP_PROC_BIND": f"x{HOSTILE}"},
        log=(f"I/O error, dev {HOSTILE}",),
        gpus=tuple(replace(gpu, name=HOSTILE) for gpu in known(good.gpus)),
    )
    results = examine(node)
    lines = as_lines(results)
    assert sum("owned" in line for line in lines) > 8
    assert all(line.isprintable() for line in lines)
    assert not any(line.strip().startswith("fix: rm") for line in lines)
