"""Drawn recordings of every format as they are read, column by column: kept, and compared.

    PYTHONPATH=tests python tests/watch/runs/kept_recordings.py

writes `kept/` anew, after a reader was changed on purpose: its difference is what to look at then. Of a long
column the length, the ends and two sums are kept: the second tells orders apart.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import sys
import tempfile
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kept_values import keep, plain
from kineto_traces import ADD, GEMM, H2D, LOADER, NCCL, SGEMM, Made, training
from stoker.errors import StokerError
from stoker.recording import Recording
from stoker.watch.runs import read_recording
from stoker.watch.runs.batches import Timed, split, timed
from stoker.watch.runs.ceiling import ceiling
from stoker.watch.runs.files import Rows, write_meta
from stoker.watch.runs.flat import read_flat
from stoker.watch.runs.traceevents import is_trace

sys.path.append(str(Path(__file__).parent))
from test_runs import BEGAN, Process, watcher

KEPT = Path(__file__).parent / "kept"
FLAT, FOLDERS, TRACES = 30, 20, 16


def columns(value: Any) -> Any:
    """A recording with its columns cut short."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: columns(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, np.ndarray):
        if len(value) <= 4:
            return plain(value)
        known = np.nan_to_num(value.astype(float), nan=-7.0, posinf=-5.0, neginf=-3.0)
        sums = (known.sum(), (known * (1 + np.arange(len(known)) % 97)).sum())
        return plain([len(value), known[0], known[-1], *sums])
    if isinstance(value, dict):
        return {str(name): columns(one) for name, one in value.items()}
    return [columns(one) for one in value] if isinstance(value, (tuple, list)) else plain(value)


def flat(seed: int) -> Any:
    """JSON lines of somebody's script, some of them odd."""
    draw = random.Random(seed)
    header = {
        "kind": "header",
        "format": "stoker-flat-trace/1",
        "gpu": draw.choice(["NVIDIA H200", ["NVIDIA L40S", "x"]]),
        "power_limit_w": draw.choice([None, 300, [400, 500]]),
        "mem_total": draw.choice([None, 8e10]),
        "cpus": draw.choice([None, 4, "8"]),
        "ended": draw.choice([None, "exit 1"]),
        "num_workers": 3,
        draw.choice(["quota_cores", "cpu_quota"]): draw.choice([None, 1.5, 0]),
        "label": ["a lie"],
    }
    parts = {
        "data_wait": 0.2,
        "copy": 0.05,
        "compute": 0.5,
        "forward": 0.1,
        "comm": 0.1,
        "eval": 0.3,
        "sync": 0.01,
    }
    chosen = {name: seconds for name, seconds in parts.items() if draw.random() < 0.6}
    begin, lines = draw.choice([0.0, 50.0, 0.5]), []
    for number in range(draw.randint(1, 12)):
        t = begin + number * 1.3 + 1
        total = {"total": draw.choice([0.9, 1.3, "1.1", None])} if draw.random() < 0.7 else {}
        step = {"kind": "step", "t": t, "step": draw.choice([number, number + 5, None]), **chosen, **total}
        extra = {
            "bytes": 5e7,
            "flops": 1e15,
            "tokens": draw.choice([None, 4096]),
            "rank": draw.choice([0, 0, 1]),
        }
        lines.append({**step, **extra, "node": draw.choice(["a", "a", "b"])})
        card = {
            "util": draw.choice([90, None, "70", True]),
            "power_w": 300 + number,
            "pcie_rx_kbs": 2048.0 * number,
        }
        where = {draw.choice(["gpu", "index"]): draw.choice([0, 1]), draw.choice(["node", "host"]): "a"}
        lines.append({"kind": "gpu", "t": t + 0.1, **card, **where, "fb_used": draw.choice([1e9, 1e30])})
        cpu = draw.choice([[10, 20.0, 30], 40, [10, None], [5]])
        counts = {"disk_read": 1e6 * number, "net_rx": draw.choice([None, 5e5]), "iowait": 3}
        lines.append({"kind": "host", "t": t + draw.choice([0, 0.2]), "cpu": cpu, **counts})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "drawn.jsonl"
        draw.shuffle(lines)
        path.write_text("\n".join(json.dumps(one) for one in [header, *lines]) + '\n{"kind": "st')
        return columns(read_flat(path))


def folder(seed: int) -> Any:
    """A run folder of several processes, nodes and restarts."""
    draw = random.Random(-1 - seed)
    with tempfile.TemporaryDirectory() as name:
        where = Path(name)
        ending = {"kind": "crashed", "at": draw.choice([None, 3.5]), "text": "exit 3"}
        gpus = [
            {
                "index": 0,
                "name": "NVIDIA H200",
                "power_limit_w": draw.choice([700, 0]),
                "memory_bytes": 10**11,
            }
        ]
        watcher(
            where,
            ended=draw.choice(["exit 0", "exit 1"]),
            ended_at=BEGAN + draw.choice([15, 40]),
            gpus=gpus,
            quota_cores=draw.choice([None, 1.5]),
            argv=["train.py"],
            hz=2,
            **({"ending": ending} if draw.random() < 0.5 else {}),
        )
        if draw.random() < 0.5:
            clock = {"boot": "c", "offset_s": BEGAN + 50}
            facts = {"title": "other", "pid": 4, "cpus": 2, "samples": True, "began": BEGAN + 50, "node": "c"}
            write_meta(
                where / "node-c-1.json", {**facts, "clock": clock, "ended": "exit 2", "ended_at": BEGAN + 60}
            )
        for rank in range(draw.randint(1, 3)):
            for turn in range(draw.choice([1, 1, 2])):
                _process(draw, where, rank, turn)
        for kind in ("host-b", "gpu-b-0"):
            rows = Rows(where / f"{kind}.rows")
            for t in range(draw.randint(1, 30)):
                rows.add(t / 2, {"cpu": t, **({"util": 50 + t} if t > 3 else {})})
            rows.close()
        read = columns(read_recording(where))
        return {**read, "title": "" if name.endswith(read["title"]) else read["title"]}


def _process(draw: random.Random, where: Path, rank: int, turn: int) -> None:
    boot, late = draw.choice([("b", 0.0), ("c", 50.0)])
    loader = {"num_workers": 2, "prefetch_factor": 2}
    process = Process(
        where,
        rank=rank,
        pid=10 * rank + turn,
        boot=boot,
        offset_s=BEGAN + late * draw.choice([1, 0.9]),
        params=draw.choice([0, 100]),
        loader=loader,
        missing=["one thing"],
        what_if=draw.choice([[], [{"cached": True, "at": 2.0}]]),
    )
    begin = 20.0 * turn * draw.choice([0, 1])
    process.span("startup", begin, begin + 0.5)
    for number in range(draw.choice([0, 3, 9, 80])):
        at = begin + 0.5 + number * 0.2
        process.span("data", at, at + 0.05, step=number)
        process.span("data", at + 0.01, at + 0.04, step=number)
        process.span("collective", at + 0.1, at + 0.15 + 0.001 * (number % 3), step=number)
        process.span(
            draw.choice(["load.wait", "load.assemble", "load.copy"]),
            at + 0.05,
            at + 0.06,
            step=number,
            thread=draw.choice([0, 0, 1]),
        )
        if draw.random() < 0.3:
            process.spans.write("load.tokens", at + 0.1, at + 0.1, -1, 128 * number, 0)
        process.step(number, at, at + 0.19, tokens=draw.choice([-1, 64]))
    event = {"t": begin + 1.5, "what": "stack", "text": "train.py:3 main", "facts": {"seconds": 1.5}}
    (where / f"events-{process.key}.jsonl").write_text(json.dumps(event) + "\n")


def trace(seed: int) -> Any:
    """What torch's profiler writes, of one rank or two."""
    draw = random.Random(100 + seed)
    made = []
    for rank in range(draw.choice([1, 1, 2])):
        one: Made = training(
            steps=draw.choice([1, 2, 6]),
            kernels=draw.choice([3, 20]),
            kernel_us=draw.choice([4.0, 100.0]),
            launch_us=draw.choice([6.0, 400.0]),
            data_us=draw.choice([0.0, 4000.0]),
            reduce_us=draw.choice([0.0, 700.0]),
            sync=draw.random() < 0.5,
            name=draw.choice([GEMM, SGEMM, ADD]),
            rank=rank,
            world=draw.choice([2, 4]),
            origin=draw.choice([1.7e15, 1.7e15 + 2000 * rank, 5e12 * (rank + 1)]),
        )
        for _ in range(12):
            at = draw.uniform(0, 6000)
            one.kernel(
                draw.choice([H2D, NCCL, "Memcpy DtoH", "Memset", ADD]),
                at + 10,
                draw.uniform(1, 300),
                at=at,
                bytes=4096,
            )
            kind = draw.choice(["user_annotation", "python_function", "cpu_op", "cuda_runtime"])
            named = draw.choice(
                [
                    LOADER,
                    "Optimizer.step#SGD.step",
                    "save_checkpoint",
                    "train.py(31): get_batch",
                    "validate",
                    "/usr/lib/python3.11/random.py(5): shuffle",
                    "cudaDeviceSynchronize",
                    "cudaMemcpyAsync",
                    "gloo:all_reduce",
                ]
            )
            one.host(named, at, draw.choice([10.0, 499.0, 500.0, 2500.0]), cat=kind)
        if draw.random() < 0.3:  # without the profiler's own steps
            one.events = [event for event in one.events if not str(event["name"]).startswith("ProfilerStep")]
        made.append(one)
    with tempfile.TemporaryDirectory() as name:
        for rank, one in enumerate(made):
            one.write(Path(name) / f"rank{rank}.json")
        read = columns(read_recording(Path(name) if len(made) > 1 else Path(name) / "rank0.json"))
        return {**read, "title": ""}


def odd() -> Any:
    """What is no recording, or hardly one: whether it looks like a trace, and what is said of it."""
    event = {
        "ph": "X",
        "cat": "kernel",
        "name": ADD,
        "ts": 5.0,
        "dur": 2.0,
        "args": {"device": 1, "correlation": 3},
    }
    whole = json.dumps(
        {"schemaVersion": 1, "traceEvents": [event, {**event, "ts": 9.0}], "baseTimeNanoseconds": 10**9}
    )
    texts = [
        "",
        " ",
        "[",
        "[]",
        "[1]",
        "{",
        "{}",
        "null",
        "[{",
        '[{"ph": "X"}]',
        whole,
        " \n" + whole,
        "\ufeff" + whole,
        '{"schemaVersion": 1',
        '{"traceEvents": {}}',
        '{"traceEvents": [',
        '{"traceEvents": [1 2]}',
        '{"a" 1}',
        "{1: 2}",
        '{"traceEvents": [], "a": 12',
        '{"kind": "step", "t": 1}',
        '{"kind": "step", "t": 1}\n[]\n7\n',
        '{"kind": "gpu"}',
        '{"kind": "header", "format": 5}\n{"kind": "step", "t": 1}',
        '{"kind": "header", "format": null}\n{"kind": "host", "t": 0.5}',
        '{"kind": "step", "t": 1e9}',
        '{"kind": "step", "t": 999999999, "total": 1}',
        '{"kind": "step", "t": -3, "total": 1}',
        '{"kind": "step", "t": "2"}',
        '{"kind": "step", "t": 1}\nx\n{"kind": "step", "t": 2}',
        '{"kind": "step", "t": 1}\nx',
        *(json.dumps({"traceEvents": [{**event, **change}, event]}) for change in _CHANGES),
        *(whole[:cut] for cut in range(0, len(whole), 61)),
    ]
    found = []
    with tempfile.TemporaryDirectory() as name:
        for text in texts:
            for file in ("a.json", "a.jsonl", "a.json.gz", "a.txt"):
                path = Path(name) / file
                path.write_bytes(
                    gzip.compress(text.encode(), mtime=0) if file.endswith("gz") else text.encode()
                )
                try:
                    said = columns(read_recording(path))
                except StokerError as error:
                    said = re.sub(
                        r"(is not JSON|cannot be read): .*", r"\1", f"{error.message} / {error.hint}"
                    )
                found.append([text[:60], file, is_trace(path), said])
                path.write_bytes(path.read_bytes()[:-5])
                found[-1].append(is_trace(path))
    return json.loads(json.dumps(found).replace(name, ""))


_CHANGES: tuple[dict[str, Any], ...] = (
    {"ts": 1e18},
    {"ts": -1e18},
    {"ts": 9e17},
    {"dur": 1e15},
    {"dur": 0},
    {"dur": -1},
    {"dur": "3"},
    {"ts": True},
    {"cat": "gpu_memset"},
    {"cat": "Memcpy"},
    {"cat": None},
    {"ph": "B"},
    {"name": 5},
    {"args": 5},
    {"name": "ncclKernel_x"},
    {"name": "NCCLDevKernel"},
    {"name": "Memset (Device)"},
    {"name": "Memcpy HtoD"},
    {"name": "CopyHostToDevice"},
    {"name": "Memcpy DtoH"},
    {"name": "dma"},
    {"cat": "gpu_memcpy"},
    {"args": {"device": 1 << 17}},
    {"args": {"bytes": 2**62, "correlation": "x"}},
    {"args": {}},
    {"cat": "cpu_op"},
    {"cat": "cpu_op", "tid": [1]},
    {"cat": "python_function", "dur": 500.0},
    {"cat": "python_function", "dur": 499.9},
)


def what_ifs() -> Any:
    """Ceilings and fits of drawn step times."""
    found = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        run = _steps(rng)
        found.append([plain(ceiling(run)), plain(timed(run, batch=8))])
        sizes = [Timed(batch=batch, step_s=float(rng.uniform(0.1, 2)), steps=3) for batch in (4, 8, 16, 8)]
        one = split(8, sizes[: int(rng.integers(1, 5))])
        found[-1].append(one and plain(one.as_dict()))
    return found


def _steps(rng: np.random.Generator) -> Recording:
    with tempfile.TemporaryDirectory() as name:
        path, t = Path(name) / "a.jsonl", 0.0
        lines = []
        for number in range(60):
            took = float(rng.choice([0.1, 0.4, 0.4, 5.0], p=[0.3, 0.3, 0.35, 0.05]))
            t += took
            lines.append({"kind": "step", "t": t, "step": number, "total": took})
        windows = [{"cached": bool(n % 2), "at": n * t / 4} for n in range(int(rng.integers(0, 5)))]
        header = {
            "kind": "header",
            "what_if": windows,
            "loader": {"num_workers": int(rng.integers(0, 3)), "prefetch_factor": 2},
        }
        path.write_text("\n".join(json.dumps(one) for one in [header, *lines]) + "\n")
        return read_flat(path)


def rows() -> dict[str, Any]:
    found = {f"flat {seed}": flat(seed) for seed in range(FLAT)}
    found |= {f"folder {seed}": folder(seed) for seed in range(FOLDERS)}
    found |= {f"trace {seed}": trace(seed) for seed in range(TRACES)}
    return {**found, "what ifs": what_ifs(), "odd": odd()}


if __name__ == "__main__":
    keep(KEPT / "recordings.json", rows())
