"""A machine as plain values: what is written comes back, what is missing is unknown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadInputError, UnreadableError
from stoker.machine.plain import NOT_READ, Unknown, as_plain, from_plain
from stoker.machine.snapshot import Cgroup, Disk, Gpu, Memory, Place, Snapshot, read_snapshot, write_snapshot

if TYPE_CHECKING:
    from pathlib import Path

FULL = Snapshot(
    memory=Memory(total_bytes=1 << 40, huge_pages="madvise", shm_bytes=Unknown(reason="hidden")),
    cgroup=Cgroup(version=2, memory_limit_bytes=None, cpu_limit_cores=7.5),
    disks=(Disk(name="nvme0n1", rotational=False, schedulers=("none", "kyber"), numa_node=None),),
    places=(Place(role="data", path="/data", options=("rw", "noatime"), disk=None),),
    gpus=(Gpu(index=0, power_limit_w=700.0, nvlinks=(True, False)),),
    environ={"NCCL_DEBUG": "WARN"},
)


def test_a_machine_comes_back_as_it_was_recorded(tmp_path: Path) -> None:
    write_snapshot(FULL, tmp_path / "snap.json")
    assert read_snapshot(tmp_path / "snap.json") == FULL


def test_what_a_recording_lacks_is_unknown() -> None:
    found = from_plain(Snapshot, {"version": 1, "memory": {"total_bytes": 5}})
    assert (found.memory.total_bytes, found.memory.shm_bytes, found.gpus) == (5, NOT_READ, NOT_READ)


def test_what_a_later_release_recorded_besides_is_left_out() -> None:
    assert from_plain(Snapshot, {"version": 1, "memory": {"colour": "red"}, "smell": 3}) == Snapshot()


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory": 5},
        {"memory": {"total_bytes": "many"}},
        {"memory": {"total_bytes": True}},
        {"memory": {"total_bytes": None}},
        {"gpus": [{"index": "first"}]},
        {"gpus": [{"name": "no index"}]},
        {"environ": {"NCCL_DEBUG": 3}},
    ],
    ids=str,
)
def test_a_value_of_another_type_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "snap.json").write_text(json.dumps({"version": 1, **wrong}))
    with pytest.raises(BadInputError, match=r"snap\.json"):
        read_snapshot(tmp_path / "snap.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 99}', "\x00"])
def test_a_file_that_is_no_recording_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "snap.json").write_text(text)
    with pytest.raises(BadInputError):
        read_snapshot(tmp_path / "snap.json")


def test_a_recording_that_is_not_there_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="No such file"):
        read_snapshot(tmp_path / "none.json")


@given(
    total=st.integers(0, 1 << 60) | st.text().map(lambda reason: Unknown(reason=reason)),
    limit=st.none() | st.floats(0.1, 1000) | st.just(Unknown(reason="?")),
    nodes=st.lists(st.lists(st.integers(0, 255)).map(tuple)).map(tuple),
)
def test_any_values_survive_json(total: Any, limit: Any, nodes: Any) -> None:
    from stoker.machine.snapshot import Cpu

    machine = Snapshot(
        memory=Memory(total_bytes=total), cgroup=Cgroup(cpu_limit_cores=limit), cpu=Cpu(numa_nodes=nodes)
    )
    assert from_plain(Snapshot, json.loads(json.dumps(as_plain(machine)))) == machine
