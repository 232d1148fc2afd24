"""What does watching cost a training loop, for each step and in all?

Method: one loop (DataLoader, forward, backward, optimizer; sized to about 3 ms a step) in processes of its
own, run in rounds: plain, plain again (the null control), under `stoker watch`, under traceml-ai where it is
installed, under torch.profiler. The order within a round turns from round to round, so that a machine that
becomes slower hurts all alike. Each process throws its first steps away and prints the median time of the
others and the CPU time of its main thread for each. A cost is the difference to the plain run of the same
round; given are the median over rounds and the middle half. The difference of the two plain runs says what
this machine can tell apart at all.

Whole processes differ by more than hooks cost, so the hooks are measured by themselves inside one process:
`hook_cost.py` says how. (An earlier version turned hooks off by their own switches, block by block. Such a
hook still passes calls on, and to the watching thread the silence is a gap in which it may take stacks.)

The sampler beside the job is measured by itself: CPU time of the watching process for each second.

    python benchmarks/watch_overhead.py                     # 8 rounds, some 6 minutes
    python benchmarks/watch_overhead.py --rounds 2 --steps 300 --no-write     # does it work?
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata, util
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
WARM = 100


# --- the loop, in a process of its own ----------------------------------------------------------------


def loop(mode: str, steps: int, width: int, device: str) -> dict[str, float]:
    """Run the loop; seconds a step by the wall and by the main thread's CPU."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    data = TensorDataset(torch.randn(16 * (steps + WARM), width))
    around = step_context(mode, model)
    walls, cpu_began = [], 0.0
    with profiler(mode):
        began = time.perf_counter()
        for number, (batch,) in enumerate(DataLoader(data, batch_size=16)):
            with around():
                model(batch.to(device)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            now = time.perf_counter()
            walls.append(now - began)
            began = now
            if number == WARM:
                cpu_began = time.thread_time()
        cpu_s = time.thread_time() - cpu_began
    return {"wall_s": statistics.median(walls[WARM:]), "cpu_s": cpu_s / (len(walls) - WARM - 1)}


def step_context(mode: str, model: object):
    if mode != "traceml":
        return contextlib.nullcontext
    import traceml_ai  # for it a plain loop has to mark its steps

    traceml_ai.init(mode="auto")

    return lambda: traceml_ai.trace_step(model)


def profiler(mode: str):
    if mode != "torch.profiler":
        return contextlib.nullcontext()
    import torch

    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


# --- rounds -------------------------------------------------------------------------------------------


def run_block(mode: str, options: argparse.Namespace) -> dict[str, float]:
    """One process of the loop; of the watching process also its own CPU time for each second."""
    loop_command = [__file__, "--loop", mode, "--steps", str(options.steps), "--width", str(options.width)]
    loop_command += ["--device", options.device]
    with tempfile.TemporaryDirectory() as folder:
        command = {
            "stoker": [
                sys.executable,
                "-m",
                "stoker.cli",
                "watch",
                "--out",
                f"{folder}/run",
                "--",
                sys.executable,
            ],
            "traceml": ["traceml", "run", "--logs-dir", folder, "--aggregator-port", str(free_port())],
        }.get(mode, [sys.executable])
        if mode == "traceml":
            command = [str(Path(sys.executable).parent / command[0]), *command[1:]]
            loop_command = [loop_command[0], "--args", *loop_command[1:]]
        report = Path(folder) / "report.json"
        environ = {**os.environ, "STOKER_BENCH_REPORT": str(report)}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [*command, *loop_command], env=environ, capture_output=True, text=True, cwd=folder
        )
        if not report.exists():
            raise RuntimeError(f"{mode} gave no report:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return json.loads(report.read_text())


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def sampler_share(seconds: float = 20.0) -> float:
    """CPU seconds a second of a watcher at 1 Hz beside a command that does nothing, once it has started."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "stoker.cli", "watch", "--out", f"{folder}/run", "--"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        with subprocess.Popen(
            [*command, "sleep", str(seconds + 4)],
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as watcher:
            time.sleep(3)
            began = cpu_s_of(watcher.pid)
            time.sleep(seconds)
            return (cpu_s_of(watcher.pid) - began) / seconds


def cpu_s_of(pid: int) -> float:
    """CPU time of all threads of a process, in the scheduler's nanoseconds."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in threads) / 1e9


def hooks() -> dict[str, object]:
    """What hook_cost.py finds, in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("hook_cost.py"))]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def costs(blocks: list[dict[str, dict[str, float]]], mode: str, clock: str) -> dict[str, float]:
    """Microseconds a step over the plain run of the same round."""
    found = [1e6 * (one[mode][clock] - one["plain"][clock]) for one in blocks]
    low, _, high = statistics.quantiles(found, n=4) if len(found) > 1 else (found[0],) * 3
    plain = statistics.median(1e6 * one["plain"][clock] for one in blocks)
    middle = statistics.median(found)
    return {"us": middle, "us_low": low, "us_high": high, "percent": 100 * middle / plain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-write", action="store_true", help="do not touch benchmarks/results")
    parser.add_argument("--loop", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop:
        report = loop(options.loop, options.steps, options.width, options.device)
        Path(os.environ["STOKER_BENCH_REPORT"]).write_text(json.dumps(report))
        return
    modes = ["plain", "null", "stoker", "torch.profiler"]
    modes += ["traceml"] if util.find_spec("traceml_ai") else []
    blocks = []
    for number in range(options.rounds):
        turn = number % len(modes)
        blocks.append({mode: run_block(mode, options) for mode in modes[turn:] + modes[:turn]})
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    report = {
        "question": __doc__.partition("\n")[0],
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "device": options.device},
        "versions": {name: version(name) for name in ("torch", "traceml-ai")},
        "plain_step_ms": statistics.median(1e3 * one["plain"]["wall_s"] for one in blocks),
        "wall": {mode: costs(blocks, mode, "wall_s") for mode in modes if mode != "plain"},
        "cpu": {mode: costs(blocks, mode, "cpu_s") for mode in modes if mode != "plain"},
        "hooks": hooks(),
        "sampler_percent_of_a_core": 100 * sampler_share(),
        "rounds": blocks,
    }
    print(json.dumps({name: value for name, value in report.items() if name != "rounds"}, indent=1))
    if not options.no_write:
        name = "watch_overhead.json" if options.device == "cpu" else f"watch_overhead_{options.device}.json"
        (RESULTS / name).write_text(json.dumps(report, indent=1) + "\n")


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()
