"""Variables that slow a job down, where they do, and only there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import faults, machine

from stoker.doctor.environment import PITFALLS, Pitfall
from stoker.doctor.examine import examine

NODE = machine("good_node")
HURTING = {
    "NCCL_P2P_LEVEL": "LOC", "NCCL_NET_GDR_LEVEL": "0", "NCCL_DEBUG": "TRACE", "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "LL", "NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_DISTRIBUTED_DEBUG": "detail", "NVIDIA_TF32_OVERRIDE": "0", "CUDA_VISIBLE_DEVICES": "",
    "OMP_PROC_BIND": "master", "GOMP_CPU_AFFINITY": "0-3", "KMP_AFFINITY": "granularity=fine,compact,1,0",
}  # fmt: skip


@pytest.mark.parametrize("pitfall", PITFALLS, ids=lambda pitfall: pitfall.variable)
def test_a_variable_that_hurts_is_told_with_its_remedy(pitfall: Pitfall) -> None:
    value = HURTING.get(pitfall.variable, "1")
    results = examine(replace(NODE, environ={pitfall.variable: value}))
    (found,) = [result for result in results if result.level in ("warn", "fail")]
    assert found.check.name == f"{pitfall.family} variables"
    assert pitfall.variable in found.seen.fix[0]


@pytest.mark.parametrize(
    "environ",
    [
        {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5", "NCCL_SOCKET_IFNAME": "eth"},
        {"NCCL_P2P_DISABLE": "0", "CUDA_VISIBLE_DEVICES": "0,1", "CUDA_LAUNCH_BLOCKING": "0"},
        {"NCCL_SOCKET_IFNAME": "^docker,lo", "OMP_NUM_THREADS": "8", "OMP_PROC_BIND": "spread"},
    ],
    ids=lambda environ: next(iter(environ)),
)
def test_variables_that_do_no_harm_are_left_alone(environ: dict[str, str]) -> None:
    assert faults(examine(replace(NODE, environ=environ))) == {}


def test_what_is_switched_off_and_not_there_does_no_harm() -> None:
    """A machine without cards, peers or RDMA, where such variables stand in every start-up file."""
    bare = machine("small_vm")
    environ = {"NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert faults(examine(replace(bare, environ=environ))) == faults(examine(bare))


@pytest.mark.parametrize(("value", "level"), [("=eth1", "fail"), ("eth0,ib", "ok"), ("bond", "fail")])
def test_an_interface_that_is_not_there_is_told(value: str, level: str) -> None:
    found = faults(examine(replace(NODE, environ={"NCCL_SOCKET_IFNAME": value})))
    assert found.get("NCCL variables", "ok") == level
