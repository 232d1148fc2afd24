"""What does watching cost a training loop, beside what other watchers cost it?

Method: one loop (DataLoader, forward, backward, optimizer; some 3 ms a step) in two processes at a time: a
plain one, and one that is plain too (the null control), under `stoker watch`, under traceml-ai where it is
installed, or with torch.profiler. The two take turns, a block of steps each, and who begins changes from
cycle to cycle. A cost is the difference of a block to the plain one of the same cycle, a tenth of a second
away, so that a machine that becomes slower hurts both alike; given are the median over all cycles, the middle
half and the error of the median. Two processes of one program differ too, by where their memory lies: so
there are rounds, each with new processes, and the null says what this can tell apart. (Gradients come from
the heap in all of them. By default glibc may take them anew from the kernel in every step, 17 or 700 page
faults and up to a millisecond, until something large has been freed: 0 from then on. Watchers free such.)
`wall` is the usual step of a block; `cpu` is the CPU time of all threads of the process for each step.
torch.profiler is started and stopped around each block, outside of what is timed. What a watcher does beside
the loop also falls on the plain blocks of its pair.

The hooks alone are measured in one process by `hook_cost.py`, which is run too; the sampler beside the job by
itself: CPU time of the watching process for each second.

    python benchmarks/watch_overhead.py                                   # 3 rounds, some 7 minutes
    python benchmarks/watch_overhead.py --rounds 1 --cycles 6 --quick     # does it work? writes nothing

What is known is written after every pair, so a run that is cut leaves its results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

from kept_runs import keep

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
WARM_S = 7.0  # of steps before the first block: watchers look more often at first
PATIENCE_S = 90  # for a process to begin, or to end a block
HEAP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
Cycle = dict[str, dict[str, float]]  # by mode, by clock: seconds a step


# --- the loop, in a process of its own ----------------------------------------------------------------


def loop(mode: str, options: argparse.Namespace) -> None:
    """Run a block of steps at each line read from the turns, and say what it took."""
    steps = training(mode, options)
    warm = time.monotonic() + WARM_S
    while time.monotonic() < warm:
        next(steps)
    turns, told = (Path(options.folder) / name for name in ("turns", "told"))
    with turns.open() as asked, told.open("w") as answers:
        print("ready", file=answers, flush=True)
        for _ in iter(asked.readline, "over\n"):
            with profiler(mode):
                answer = block(steps, options.steps)
            print(json.dumps(answer), file=answers, flush=True)


def block(steps: Iterator[None], count: int) -> dict[str, float]:
    next(steps)  # the first one after a pause is another one
    seconds, cpu_began = [], time.process_time()
    for _ in range(count):
        began = time.perf_counter()
        next(steps)
        seconds.append(time.perf_counter() - began)
    return {"wall": statistics.median(seconds), "cpu": (time.process_time() - cpu_began) / count}


def training(mode: str, options: argparse.Namespace) -> Iterator[None]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    width, device = options.width, options.device
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    data = TensorDataset(torch.randn(16 * 256, width))
    around = step_context(mode, model)
    while True:
        for (batch,) in DataLoader(data, batch_size=16):
            with around():
                model(batch.to(device)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            yield


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


# --- turns --------------------------------------------------------------------------------------------


class Trainer:
    """A process of the loop, under a watcher or not, that runs a block when it is told to."""

    def __init__(self, mode: str, options: argparse.Namespace) -> None:
        self.mode = mode
        self._folder = tempfile.TemporaryDirectory()
        for name in ("turns", "told"):
            os.mkfifo(Path(self._folder.name) / name)
        # Opened for both ends: neither side waits for the other to open.
        self._turns, self._told = (os.open(f"{self._folder.name}/{n}", os.O_RDWR) for n in ("turns", "told"))
        self._log = Path(self._folder.name) / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command(mode, self._folder.name, options),
                env={**os.environ, **HEAP, "PYTHONPATH": str(ROOT / "src")},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder.name,
            )  # fmt: skip

    def __enter__(self) -> Trainer:
        return self

    def answer(self) -> str:
        deadline, line = time.monotonic() + PATIENCE_S, b""
        while not line.endswith(b"\n"):
            if select.select([self._told], [], [], 1)[0]:
                line += os.read(self._told, 4096)
            elif self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.mode} does not answer:\n{self._log.read_text()[-2000:]}")
        return line.decode()

    def block(self) -> dict[str, float]:
        os.write(self._turns, b"go\n")
        return json.loads(self.answer())

    def __exit__(self, *_: object) -> None:
        os.write(self._turns, b"over\n")
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        os.close(self._turns)
        os.close(self._told)
        self._folder.cleanup()


def command(mode: str, folder: str, options: argparse.Namespace) -> list[str]:
    own = [
        "--loop", mode, "--folder", folder, "--steps", str(options.steps), "--width", str(options.width),
        "--device", options.device,
    ]  # fmt: skip
    if mode == "stoker":
        watch = [sys.executable, "-m", "stoker.cli", "watch", "--out", f"{folder}/run", "--"]
        return [*watch, sys.executable, __file__, *own]
    if mode == "traceml":
        traceml = [str(Path(sys.executable).parent / "traceml"), "run", "--logs-dir", folder]
        return [*traceml, "--aggregator-port", str(free_port()), __file__, "--args", *own]
    return [sys.executable, __file__, *own]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def pair(mode: str, options: argparse.Namespace) -> list[Cycle]:
    """The blocks of each cycle, plain and watched, of processes begun for it."""
    with Trainer("plain", options) as plain, Trainer(mode, options) as watched:
        turns = [plain, watched]
        for trainer in turns:
            trainer.answer()
        cycles = []
        for _ in range(options.cycles):
            turns.reverse()
            cycles.append({one.mode: one.block() for one in turns})
        return cycles


# --- the rest -----------------------------------------------------------------------------------------


def sampler_share(seconds: float = 20.0) -> float:
    """CPU seconds a second of a watcher at 1 Hz beside a command that does nothing, once it has started."""
    with tempfile.TemporaryDirectory() as folder:
        watch = [sys.executable, "-m", "stoker.cli", "watch", "--out", f"{folder}/run", "--"]
        with subprocess.Popen(
            [*watch, "sleep", str(seconds + 4)],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
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
    script = [sys.executable, str(Path(__file__).with_name("hook_cost.py")), "--blocks", "300"]
    return json.loads(subprocess.run(script, check=True, capture_output=True, text=True).stdout)


def costs(cycles: list[Cycle], mode: str, clock: str) -> dict[str, float]:
    """Microseconds a step over the plain block of the same cycle."""
    found = [1e6 * (one[mode][clock] - one["plain"][clock]) for one in cycles]
    plain = statistics.median(1e6 * one["plain"][clock] for one in cycles)
    low, middle, high = statistics.quantiles(found, n=4)
    error = 1.25 * (high - low) / 1.35 / len(found) ** 0.5
    return {"us": middle, "us_low": low, "us_high": high, "error": error, "percent": 100 * middle / plain}


def summary(rounds: dict[str, list[list[Cycle]]], options: argparse.Namespace) -> dict[str, object]:
    """`rounds` holds the cycles of each round by mode."""
    cycles = {mode: [one for each in found for one in each] for mode, found in rounds.items() if found}
    plain = [one["plain"]["wall"] for found in cycles.values() for one in found]
    return {
        "question": __doc__.partition("\n")[0],
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "device": options.device},
        "versions": {name: version(name) for name in ("torch", "traceml-ai")},
        "cycles": options.cycles,
        "steps_a_block": options.steps,
        "plain_step_ms": 1e3 * statistics.median(plain),
        "wall": {mode: costs(found, mode, "wall") for mode, found in cycles.items()},
        "cpu": {mode: costs(found, mode, "cpu") for mode, found in cycles.items()},
        "wall_us_by_round": {
            mode: [costs(each, mode, "wall")["us"] for each in rounds[mode]] for mode in cycles
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cycles", type=int, default=60)
    parser.add_argument("--steps", type=int, default=40, help="of a block")
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="no hook_cost.py, no sampler, nothing written")
    parser.add_argument("--loop", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop:
        loop(options.loop, options)
        return
    began = time.monotonic()
    modes = ["null", "stoker", "torch.profiler", *(["traceml"] if util.find_spec("traceml_ai") else [])]
    rounds, report = {mode: [] for mode in modes}, {}
    for number in range(options.rounds):
        for mode in modes:
            rounds[mode].append(pair(mode, options))
            report = summary(rounds, options)
            said = f"{mode} {report['wall_us_by_round'][mode][-1]:.0f} us"
            print(f"round {number + 1}, {time.monotonic() - began:.0f} s: {said}", file=sys.stderr)
            write(report, options)
    if not options.quick:
        report["sampler_percent_of_a_core"] = 100 * sampler_share()
        write(report, options)
        print(f"sampler measured, {time.monotonic() - began:.0f} s; now the hooks", file=sys.stderr)
        report["hooks"] = hooks()
        write(report, options)
    print(json.dumps(report, indent=1))


def write(report: dict[str, object], options: argparse.Namespace) -> None:
    name = "watch_overhead.json" if options.device == "cpu" else f"watch_overhead_{options.device}.json"
    if not options.quick:
        keep(RESULTS / name, report)


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()
