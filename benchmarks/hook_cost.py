"""How many microseconds of a training step are the hooks of `stoker watch`?

Method: a real loop in one process (DataLoader, a model of 51 modules, AdamW; some 3 ms a step on one thread),
hooked as `stoker watch` hooks it, measured in two ways that alternate in short blocks.

*direct*: at each hook, the time from torch's call to the call of the original and from its return to ours,
against the same call with no hook in place; medians over all steps, summed over the hooks. A machine whose
steps differ by a tenth can still tell single microseconds apart: what it times is the hook, not the step. And
the caches are as cold as a step leaves them, which hooks called in a row by themselves do
not show: they looked seven times cheaper. (Until 2026-11-15 the comparison was with a wrapper that does
nothing, and the thread below stood beside the sum instead of in it.)

*paired*: whole steps with the hooks in place and taken out, block by block: off, on, off, and so on. The
cost of a block is its difference to the mean of its neighbours; blocks of a switch that switches nothing
are the null.

The marks that hooks put are read by a thread of the process, which takes the interpreter while it does: its
CPU time for each step, waking up included, is the other part of the sum.

    python benchmarks/hook_cost.py                   # some 2 minutes
    python benchmarks/hook_cost.py --blocks 20       # does it work?
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kept_runs import keep

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "src"))

Function = Callable[..., object]
BLOCK = 10  # steps; the first two of a block are thrown away
READ_BLOCKS = 500  # some 20 seconds
MODULES = ("torch.utils.data.dataloader", "torch.autograd", "torch.optim.optimizer")


class Point:
    """One place where torch calls a hook: taken out, in place, or timed beside no hook."""

    def __init__(self, owner: type | object, name: str, *, label: str) -> None:
        self.owner, self.name, self.label = owner, name, label
        self.began = self.ended = 0.0
        self.spent: dict[str, list[float]] = {"hook": [], "no hook": []}
        self.plain = self._stamped(getattr(owner, name))
        setattr(owner, name, self.plain)

    def hooked_as(self, hook: Function, *, owner: object = None) -> None:
        """The hook that now stands around what this point had."""
        self.owner = owner or self.owner
        self.choices = {"out": self.plain, "in": hook}
        self.choices |= {
            "timed hook": self._timed(hook, "hook"),
            "timed no hook": self._timed(self.plain, "no hook"),
        }

    def set(self, choice: str) -> None:
        setattr(self.owner, self.name, self.choices[choice])

    def _stamped(self, original: Function) -> Function:
        def call(*args: object, **kwargs: object) -> object:
            self.began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.ended = time.perf_counter()

        return call

    def _timed(self, hook: Function, kind: str) -> Function:
        spent = self.spent[kind]

        def call(*args: object, **kwargs: object) -> object:
            before = time.perf_counter()
            result = hook(*args, **kwargs)
            after = time.perf_counter()
            spent.append(self.began - before + after - self.ended)
            return result

        return call


class StepHooks(Point):
    """The same for torch's own list of functions to call before or after an optimizer's step."""

    def __init__(self, hooks: dict[int, Function], *, label: str) -> None:
        ((self.key, hook),) = hooks.items()
        self.hooks, self.label = hooks, label
        self.spent = {"hook": [], "no hook": []}
        self.choices = {"out": None, "in": hook, "timed hook": self._timed(hook)}
        self.choices["timed no hook"] = self._untimed

    def set(self, choice: str) -> None:
        self.hooks.clear()
        if self.choices[choice] is not None:
            self.hooks[self.key] = self.choices[choice]

    def _timed(self, hook: Function) -> Function:
        spent = self.spent["hook"]

        def call(*args: object) -> None:
            before = time.perf_counter()
            hook(*args)
            spent.append(time.perf_counter() - before)

        return call

    def _untimed(self, *args: object) -> None:
        """What taking the time takes by itself."""
        before = time.perf_counter()
        self.spent["no hook"].append(time.perf_counter() - before)


def watched_loop(width: int) -> tuple[Iterator[None], list[Point]]:
    """Steps without end, and the points where they are hooked."""
    import torch
    from torch.optim import optimizer as optimizers
    from torch.utils.data import DataLoader, TensorDataset, dataloader

    from stoker.watch.inside import hooks

    torch.set_num_threads(1)
    loader = Point(dataloader._BaseDataLoaderIter, "__next__", label="loader")
    backward = Point(torch.autograd, "backward", label="backward")
    forward = Point(model_class(), "__call__", label="forward")
    for name in MODULES:
        hooks.after_import(sys.modules[name])
    kind = type("Model", (forward.owner,), {})
    model = kind(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
    data = TensorDataset(torch.randint(0, 9, (4096, width)))  # looks like text: its tokens are counted

    def steps() -> Iterator[None]:
        while True:
            for (batch,) in DataLoader(data, batch_size=16):
                model(batch.float()).backward()
                optimizer.step()
                optimizer.zero_grad()
                yield

    endless = steps()
    for _ in itertools.islice(endless, 100):
        pass
    loader.hooked_as(loader.owner.__next__)
    backward.hooked_as(torch.autograd.backward)
    forward.hooked_as(kind.__call__, owner=kind)
    before = StepHooks(optimizers._global_optimizer_pre_hooks, label="before the optimizer's step")
    after = StepHooks(optimizers._global_optimizer_post_hooks, label="after the optimizer's step")
    return endless, [loader, forward, backward, before, after]


def model_class() -> type:
    import torch

    class Block(torch.nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm, self.act = torch.nn.LayerNorm(width), torch.nn.GELU()
            self.up, self.down = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.act(self.up(self.norm(x))))

    class Blocks(torch.nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.blocks = torch.nn.Sequential(*[Block(width) for _ in range(10)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(x).square().mean()

    return Blocks


def measure(blocks: int, width: int) -> dict[str, object]:
    steps, points = watched_loop(width)
    thread = next(one.native_id for one in threading.enumerate() if one.name == "stoker-watch")
    means: dict[str, list[float]] = {"in": [], "out": []}
    last = block(steps, points, "out")
    usual = []
    for number in range(blocks):
        which = "in" if number % 2 else "out"  # "out" again: the null
        here = block(steps, points, which)
        after = block(steps, points, "out")
        means[which].append(here - (last + after) / 2)
        last = after
        usual.append(after)
        for timed in ("timed hook", "timed no hook"):
            block(steps, points, timed)
    each = {point.label: cost_us(point) for point in points}
    loop_us, reader_us = sum(each.values()), reading_us(thread, steps, points)
    return {
        "step_us": 1e6 * statistics.median(usual),
        "hooks_us": each,
        "loop_us": loop_us,
        "reader_us": reader_us,
        "sum_us": loop_us + reader_us,
        "paired_us": spread(means["in"]),
        "paired_null_us": spread(means["out"]),
    }


def reading_us(thread: int, steps: Iterator[None], points: list[Point]) -> float:
    """CPU time of the reading thread for each step with the hooks in place."""
    block(steps, points, "in")
    before_s = thread_cpu_s(thread)
    for _ in range(READ_BLOCKS):
        block(steps, points, "in")
    return 1e6 * (thread_cpu_s(thread) - before_s) / (BLOCK * READ_BLOCKS)


def block(steps: Iterator[None], points: list[Point], choice: str) -> float:
    """Seconds of the usual step of a block."""
    for point in points:
        point.set(choice)
    seconds = []
    for _ in range(BLOCK):
        began = time.perf_counter()
        next(steps)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])


def cost_us(point: Point) -> float:
    return 1e6 * (statistics.median(point.spent["hook"]) - statistics.median(point.spent["no hook"]))


def thread_cpu_s(thread: int) -> float:
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def spread(values: list[float]) -> dict[str, float]:
    """Median, middle half, and the error of the median."""
    low, middle, high = statistics.quantiles(values, n=4)
    error = 1.25 * (high - low) / 1.35 / len(values) ** 0.5
    return {"median": 1e6 * middle, "low": 1e6 * low, "high": 1e6 * high, "error": 1e6 * error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=500)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--write", action="store_true", help="keep it in benchmarks/results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["STOKER_WATCH"] = folder
        found = measure(options.blocks, options.width)
        report = {"question": __doc__.partition("\n")[0], "cores": os.cpu_count(), **found}
        print(json.dumps(report, indent=1))
        if options.write:
            keep(RESULTS / "hook_cost.json", report)


if __name__ == "__main__":
    main()
