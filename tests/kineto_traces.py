"""Traces as torch's profiler (Kineto) writes them, made of a few lines: who launched what, when it ran."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GEMM = "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_nn"
SGEMM = "volta_sgemm_128x64_nn"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>(int)"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"
H2D = "Memcpy HtoD (Pageable -> Device)"
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


@dataclass
class Made:
    """A trace that grows; times in microseconds."""

    rank: int = 0
    world: int = 1
    origin: float = 1_700_000_000_000_000.0
    events: list[dict[str, Any]] = field(default_factory=list)
    links: int = 0

    def host(self, name: str, start: float, lasts: float, *, cat: str = "cpu_op", **args: Any) -> None:
        self._put(cat, name, 100, 100, start, lasts, args)

    def step(self, number: int, start: float, lasts: float) -> None:
        self.host(f"ProfilerStep#{number}", start, lasts, cat="user_annotation")

    def kernel(
        self, name: str, start: float, lasts: float, *, at: float, stream: int = 7, bytes: int = 0
    ) -> None:
        """Ran from `start` on; the host's call began at `at`."""
        self.links += 1
        copy = name.startswith("Memcpy")
        call = "cudaMemcpyAsync" if copy else "cudaLaunchKernel"
        self._put("cuda_runtime", call, 100, 100, at, 5, {"correlation": self.links})
        args = {"device": 0, "stream": stream, "correlation": self.links, "bytes": bytes}
        self._put("gpu_memcpy" if copy else "kernel", name, 0, stream, start, lasts, args)
        flow = {"ph": "f", "id": self.links, "pid": 0, "tid": stream, "cat": "ac2g", "name": "ac2g"}
        self.events.append({**flow, "ts": self.origin + start, "bp": "e"})

    def _put(
        self, cat: str, name: str, pid: int, tid: int, start: float, lasts: float, args: dict[str, Any]
    ) -> None:
        times = {"ts": self.origin + start, "dur": lasts}
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, **times, "args": args}
        )

    def text(self) -> str:
        told = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150_000_000_000}],
            "distributedInfo": {"backend": "nccl", "rank": self.rank, "world_size": self.world},
            "traceEvents": self.events,
            "traceName": "trace.json",
        }
        return json.dumps(told, indent=1)

    def write(self, path: Path) -> Path:
        data = self.text().encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


def training(
    *,
    steps: int = 8,
    kernels: int = 200,
    kernel_us: float = 100.0,
    launch_us: float = 6.0,
    data_us: float = 0.0,
    reduce_us: float = 0.0,
    sync: bool = False,
    name: str = GEMM,
    **made: Any,
) -> Made:
    """A loop: wait for a batch, launch kernels, exchange, perhaps wait for the card."""
    trace, host, card = Made(**made), 0.0, 0.0
    for number in range(1, steps + 1):
        began = host
        if data_us:
            trace.host(LOADER, host, data_us, cat="user_annotation")
            host += data_us
        for _ in range(kernels):
            trace.host("aten::mm", host, launch_us)
            start = max(card, host + 4)
            trace.kernel(name, start, kernel_us, at=host)
            host, card = host + launch_us, start + kernel_us
        if reduce_us:
            trace.kernel(NCCL, card, reduce_us, at=host, stream=20)
            host, card = host + 10, card + reduce_us
        behind = card - host
        if sync or behind > 5000:  # a queue has an end
            trace.host("cudaStreamSynchronize", host, max(behind, 1), cat="cuda_runtime")
            host = max(card, host + 1)
        trace.step(number, began, host - began)
    return trace
