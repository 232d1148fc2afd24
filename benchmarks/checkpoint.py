"""What does a checkpoint cost a training loop, and how soon is it safe, beside what people use today?

Method, on the CPU: a model of some 700 parameters with AdamW, about 2 GiB and 2,900 tensors of state. Each
way to save runs in a process of its own, all ways in turn, round after round; medians. In each process:
  stall     how long the call that saves keeps the loop (after a first save, which may allocate)
  durable   from that call until everything is on disk and synced
  lost      how much longer the loop's steps take until then, beside steps just before the save
  memory    the most resident memory of the process and its children during saves, beyond the state itself
  load      from a cold page cache into a new model and optimizer (torch.load maps; ours is verified)
and once: the disk's O_DIRECT ceiling for the same bytes, and resident memory over 20 saves of ours. And with
20,000 small tensors (`many`): the stall of a save whose cost is in their number, not in their bytes. And with
480 MiB (`small`): the stall without overlap of a state that is copied in a tenth of a second.

    python benchmarks/checkpoint.py                        # about ten minutes
    python benchmarks/checkpoint.py --rounds 1             # five: every run is kept, tables take the last
    python benchmarks/checkpoint.py --gigabytes 0.2 --rounds 1    # does it work?
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import torch

from kept_runs import keep

RESULTS = Path(__file__).parent / "results" / "checkpoint.json"
WAYS = [
    "torch.save", "safetensors", "dcp.save", "dcp.async_save thread", "dcp.async_save process",
    "stoker", "stoker overlap",
]  # fmt: skip
MANY = ["dcp.async_save thread", "stoker", "stoker overlap"]  # with many small tensors
MANY_TENSORS = 20_000
SMALL = ["dcp.async_save thread", "dcp.async_save process", "stoker"]  # of a small state, without overlap
SMALL_GIGABYTES = 480 / 1024
BLOCKS = 121


# --- the job ------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """Six parameters, as in a small transformer block: two large, four small."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.norm = torch.nn.LayerNorm(width)


def make_job(gigabytes: float, *, fill: bool):
    """A model and its optimizer, whose state is made without a step: the values do not matter."""
    width = int((gigabytes * 2**30 / (4 * 3 * 8 * BLOCKS)) ** 0.5)
    model = torch.nn.Sequential(*(Block(width) for _ in range(BLOCKS)))
    optimizer = torch.optim.AdamW(model.parameters())
    if fill:
        for parameter in model.parameters():
            optimizer.state[parameter] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.randn_like(parameter),
                "exp_avg_sq": torch.rand_like(parameter),
            }
    return model, optimizer


def make_many(count: int):
    """As many tensors, small ones: a fourth of them parameters, the rest AdamW's."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(count // 8)))
    return make_job_like(model)


def state_of(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def state_bytes(model, optimizer) -> int:
    return sum(tensor.nbytes for tensor in tensors(state_of(model, optimizer)))


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors(one)


class Loop:
    """A loop that computes with all cores and leaves the state as it is."""

    def __init__(self) -> None:
        self._a = torch.randn(1024, 1024)
        self.normal()

    def normal(self) -> float:
        """Seconds of a step now: a shared machine is not always as fast."""
        return statistics.median(self.step() for _ in range(10))

    def step(self) -> float:
        began = time.perf_counter()
        for _ in range(8):
            torch.mm(self._a, self._a)
        return time.perf_counter() - began

    def run_until(self, done, *, normal_s: float) -> float:
        """Seconds lost beside normal steps until `done()`."""
        lost = 0.0
        while not done():
            lost += self.step() - normal_s
        return lost


# --- ways to save -------------------------------------------------------------------------------------


class Way:
    """A way to save: `save` begins, `done` says whether it is durable, `wait` when that was."""

    def __init__(self, folder: Path, model, optimizer) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer
        self.path = folder / "none"

    def save(self, number: int) -> None:
        raise NotImplementedError

    def done(self) -> bool:
        return True

    def wait(self, began: float) -> float:
        """Seconds from `began` to the moment it was durable: most are when the call returns."""
        return time.perf_counter() - began

    def load(self, model, optimizer) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


class TorchSave(Way):
    def save(self, number: int):
        self.path = self.folder / f"{number}.pt"
        with self.path.open("wb") as file:
            torch.save(state_of(self.model, self.optimizer), file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, model, optimizer) -> None:
        state = torch.load(self.path, mmap=True, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        for one in tensors(optimizer.state_dict()):
            one.add_(0)  # a mapped page is not loaded before it is touched, and a first step touches all


class Safetensors(Way):
    def save(self, number: int):
        from safetensors.torch import save_file

        self.path = self.folder / f"{number}.safetensors"
        state = {f"model.{name}": one for name, one in self.model.state_dict().items()}
        for at, slots in self.optimizer.state_dict()["state"].items():
            state.update({f"optimizer.{at}.{name}": one for name, one in slots.items()})
        save_file(state, self.path)
        with self.path.open("rb") as file:
            os.fsync(file.fileno())

    def load(self, model, optimizer) -> None:
        from safetensors.torch import load_file

        state = load_file(self.path)
        model.load_state_dict({k[6:]: v for k, v in state.items() if k.startswith("model.")})
        slots: dict = {}
        for key, one in state.items():
            if key.startswith("optimizer."):
                _, at, name = key.split(".")
                slots.setdefault(int(at), {})[name] = one
        optimizer.load_state_dict({"state": slots, "param_groups": optimizer.state_dict()["param_groups"]})


class Dcp(Way):
    kind = "save"

    def save(self, number: int):
        import torch.distributed.checkpoint as dcp

        self.path = self.folder / f"dcp-{number}"
        state = state_of(self.model, self.optimizer)
        if self.kind == "save":
            dcp.save(state, checkpoint_id=self.path)
            return
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        kind = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}[self.kind]
        self._ended: list[float] = []
        self._future = dcp.async_save(state, checkpoint_id=self.path, async_checkpointer_type=kind)
        self._future.add_done_callback(lambda _: self._ended.append(time.perf_counter()))

    def done(self) -> bool:
        return self.kind == "save" or bool(self._ended)

    def wait(self, began: float) -> float:
        if self.kind == "save":
            return super().wait(began)
        self._future.result()
        while not self._ended:  # a callback may come after those who wait
            time.sleep(0.001)
        return self._ended[0] - began

    def load(self, model, optimizer) -> None:
        import torch.distributed.checkpoint as dcp

        _, filled = make_job_like(model)
        state = {"model": model.state_dict(), "optimizer": filled.state_dict()}
        dcp.load(state, checkpoint_id=self.path)
        optimizer.load_state_dict(state["optimizer"])


class DcpThread(Dcp):
    kind = "thread"


class DcpProcess(Dcp):
    kind = "process"


class Stoker(Way):
    overlap = False

    def __init__(self, folder: Path, model, optimizer) -> None:
        super().__init__(folder, model, optimizer)
        import stoker

        self.checkpointer = stoker.Checkpointer(folder, overlap=self.overlap, keep=1)

    def save(self, number: int) -> None:
        self.checkpointer.save(number, model=self.model, optimizer=self.optimizer)

    def done(self) -> bool:
        return not self.checkpointer.is_saving

    def wait(self, began: float) -> float:
        self.checkpointer.wait()
        return self.checkpointer.report().durable_s

    def load(self, model, optimizer) -> None:
        import stoker

        with stoker.Checkpointer(self.folder) as checkpointer:
            assert not checkpointer.restore(model=model, optimizer=optimizer).fresh

    def close(self) -> None:
        self.checkpointer.close()
        self.path = max(path for path in self.folder.iterdir() if path.is_dir())


class StokerOverlap(Stoker):
    overlap = True


KINDS = dict(
    zip(WAYS, (TorchSave, Safetensors, Dcp, DcpThread, DcpProcess, Stoker, StokerOverlap), strict=True)
)


def make_job_like(model):
    """An optimizer with empty state of the right shapes: dcp.load reads into what it is given."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.empty_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.empty_like(parameter, requires_grad=False),
        }
    return model, optimizer


# --- measuring ----------------------------------------------------------------------------------------


def measure(name: str, folder: Path, *, gigabytes: float, saves: int) -> dict:
    torch.manual_seed(0)
    model, optimizer = make_job(gigabytes, fill=True)
    size = state_bytes(model, optimizer)
    loop, way = Loop(), KINDS[name](folder, model, optimizer)
    before = resident_bytes()
    runs = []
    with peak() as most:
        way.save(0)
        optimizer.step()  # without gradients: nothing changes, but an overlapped save may wait for it
        way.wait(0.0)
        clear(folder, way)
        for number in range(1, saves + 1):
            runs.append(one_save(way, loop, number))
            if number < saves:
                clear(folder, way)
    way.close()
    report = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    report |= {"memory": (most[0] - before) / size, "state_bytes": size}
    del model, optimizer, way.model, way.optimizer
    gc.collect()
    return report | {"load_s": cold_load(way, gigabytes)}


def measure_many(name: str, folder: Path, *, tensors: int, saves: int) -> dict:
    model, optimizer = make_many(tensors)
    way, stalls = KINDS[name](folder, model, optimizer), []
    for number in range(saves + 2):
        began = time.perf_counter()
        way.save(number)
        stalls.append(time.perf_counter() - began)
        optimizer.step()
        way.wait(began)
        clear(folder, way)
    way.close()
    # the first plans, and may allocate
    return {"tensors": tensors, "stall_s": statistics.median(stalls[1:]), "first_s": stalls[0]}


def one_save(way: Way, loop: Loop, number: int) -> dict:
    normal_s = loop.normal()
    began = time.perf_counter()
    way.save(number)
    stall = time.perf_counter() - began
    lost = loop.run_until(way.done, normal_s=normal_s)
    return {
        "stall_s": stall,
        "durable_s": way.wait(began),
        "lost_s": max(0.0, lost),
        "normal_step_s": normal_s,
    }


def clear(folder: Path, way: Way) -> None:
    """Only the newest stays: the others' disk space, not their loop, is what this is about."""
    if isinstance(way, Stoker):
        return
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.sync()


def cold_load(way: Way, gigabytes: float) -> float:
    for path in [way.path] if way.path.is_file() else way.path.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    model, optimizer = make_job(gigabytes, fill=False)
    began = time.perf_counter()
    way.load(model, optimizer)
    return time.perf_counter() - began


@contextmanager
def peak():
    """The most resident memory while the block runs, this process and its children."""
    most, stop = [resident_bytes()], threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            most[0] = max(most[0], resident_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    yield most
    stop.set()
    thread.join()


def resident_bytes() -> int:
    total = 0
    for pid in [os.getpid(), *children(os.getpid())]:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
        except OSError:
            continue
    return total


def children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in map(int, path.read_text().split()):
                found += [child, *children(child)]
        except OSError:
            continue
    return found


def growth(folder: Path, *, gigabytes: float, saves: int = 20) -> dict:
    """Resident memory after the first and after the last of many saves."""
    model, optimizer = make_job(gigabytes, fill=True)
    seen = []
    way = Stoker(folder, model, optimizer)
    for number in range(saves):
        way.save(number)
        way.wait(0.0)
        seen.append(resident_bytes())
    way.close()
    return {"saves": saves, "grown_bytes": seen[-1] - seen[1], "state_bytes": state_bytes(model, optimizer)}


def ceiling(folder: Path, *, gigabytes: float) -> dict:
    """The disk's own speed: the same bytes, reserved, written O_DIRECT in 8 MiB by two threads, synced."""
    import mmap

    size, step = int(gigabytes * 2**30) // (8 << 20) * (8 << 20), 8 << 20
    memory = mmap.mmap(-1, step)
    times = []
    for number in range(3):
        path = folder / f"ceiling-{number}"
        handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
        began = time.perf_counter()
        os.posix_fallocate(handle, 0, size)

        def write(first: int, handle: int = handle) -> None:
            for at in range(first * step, size, 2 * step):
                os.pwrite(handle, memory, at)

        threads = [threading.Thread(target=write, args=(first,)) for first in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.fsync(handle)
        times.append(time.perf_counter() - began)
        os.close(handle)
        path.unlink()
    return {"bytes": size, "seconds": min(times)}


# --- the run ------------------------------------------------------------------------------------------


def child(given: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    folder = Path(given.folder)
    if given.one == "growth":
        found = growth(folder, gigabytes=given.gigabytes)
    elif given.one == "ceiling":
        found = ceiling(folder, gigabytes=given.gigabytes)
    else:
        if "dcp" in given.one:
            torch.distributed.init_process_group(
                "gloo", store=torch.distributed.FileStore(f"{folder}.store", 1), rank=0, world_size=1
            )
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
        if given.one.startswith("many "):
            way = given.one.removeprefix("many ")
            found = measure_many(way, folder, tensors=given.tensors, saves=given.saves)
        elif given.one.startswith("small "):
            way = given.one.removeprefix("small ")
            found = measure(way, folder, gigabytes=given.small_gigabytes, saves=given.saves)
        else:
            found = measure(given.one, folder, gigabytes=given.gigabytes, saves=given.saves)
    print("REPORT", json.dumps(found), flush=True)
    os._exit(0)  # the checkpoint process of dcp is not ours to wait for


def ask(one: str, given: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=given.folder) as folder:
        os.mkdir(f"{folder}/data")
        done = subprocess.run(
            [sys.executable, __file__, "--one", one, "--folder", f"{folder}/data",
             "--gigabytes", str(given.gigabytes), "--saves", str(given.saves),
             "--tensors", str(given.tensors), "--small-gigabytes", str(given.small_gigabytes)],
            stdout=subprocess.PIPE, text=True, timeout=600,
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    if not lines:
        raise SystemExit(f"{one} failed")
    return json.loads(lines[-1].removeprefix("REPORT "))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.85, help="GiB of state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=3, help="saves measured in each process")
    parser.add_argument("--tensors", type=int, default=MANY_TENSORS, help="of the case with many")
    parser.add_argument("--small-gigabytes", type=float, default=SMALL_GIGABYTES, help="of the small case")
    parser.add_argument(
        "--ways", default=",".join(WAYS), help="of them these; '': many and small tensors only"
    )
    parser.add_argument("--folder", default=None)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        return child(given)
    runs: dict[str, list[dict]] = {}
    for number in range(given.rounds):
        cases = [*(f"many {way}" for way in MANY), *(f"small {way}" for way in SMALL)]
        for name in ["ceiling", *filter(None, given.ways.split(",")), *cases]:
            runs.setdefault(name, []).append(ask(name, given))
            print(number, name, {k: round(v, 3) for k, v in runs[name][-1].items()}, flush=True)
            write_report(runs, given.out)  # what is measured stays, whatever comes later
    if given.ways and "growth" not in runs:
        runs["growth"] = [ask("growth", given)]
    print(json.dumps(write_report(runs, given.out), indent=1))
    return None


def write_report(runs: dict[str, list[dict]], path: Path) -> dict:
    medians = {
        name: {key: statistics.median(run[key] for run in some) for key in some[0]}
        for name, some in runs.items()
    }
    # a ceiling is the best that was seen, in whichever round
    medians["ceiling"] = min(runs["ceiling"], key=lambda run: run["seconds"])
    report = {
        "machine": {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()},
        "rounds": len(runs["ceiling"]),
        "median": medians,
        "verdicts": verdicts(medians),
    }
    keep(path, report | {"runs": runs})
    return report


def verdicts(medians: dict[str, dict]) -> dict:
    """What was asked for, and what came out."""
    needed = {"stoker", "dcp.async_save thread", "torch.save", "dcp.save", "growth", "many stoker overlap"}
    needed |= {f"small {way}" for way in SMALL}
    if not needed <= medians.keys():
        return {}
    ours, theirs, growth = medians["stoker"], medians["dcp.async_save thread"], medians["growth"]
    small = [medians[f"small {way}"]["stall_s"] for way in SMALL]
    return {
        "stall of 480 MiB / the best dcp.async_save's (0.6)": small[-1] / min(small[:-1]),
        "stall / dcp.async_save (0.5)": ours["stall_s"] / theirs["stall_s"],
        "dcp.async_save durable / ours (3)": theirs["durable_s"] / ours["durable_s"],
        "durable / O_DIRECT ceiling (1.5)": ours["durable_s"] / medians["ceiling"]["seconds"],
        "lost in background / dcp (0.25)": ours["lost_s"] / max(theirs["lost_s"], 1e-9),
        "memory / state (1.05)": ours["memory"],
        "load / torch.load mmap (0.7)": ours["load_s"] / medians["torch.save"]["load_s"],
        "load / dcp.load (0.35)": ours["load_s"] / medians["dcp.save"]["load_s"],
        "grown over 20 saves / state": growth["grown_bytes"] / growth["state_bytes"],
        "overlapped stall with 20,000 tensors, seconds (0.04)": medians["many stoker overlap"]["stall_s"],
    }


if __name__ == "__main__":
    main()
