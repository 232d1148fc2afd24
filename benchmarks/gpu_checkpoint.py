"""Does a checkpoint stop a GPU, beside torch.distributed.checkpoint, and can a job leave its GPU and return?

Method, all on one machine in one run, with a GPT of 870 M parameters and AdamW (10.4 GB of state):
  1. ceiling: device to pinned host memory, 1 GiB at a time
  2. snapshot: our copy of the whole state into the reused pinned arena, as a share of 1
  3. steps: a training step without a save
  4. overlap: `save` with overlap=True in the same loop: how long the call takes, how long the hook before the
     optimizer keeps the thread, and every step until the save is durable, beside 3
     With --batch 16 a step is about as long as the copy (bytes / 1): in a shorter one its end shows
  5. dcp: `dcp.async_save` with its pinned stager, blocking and in the background; its first save, which
     allocates, is left out, as ours is
  6. restore: the newest checkpoint, verified, into the model, from a cold page cache
  7. suspend: a training process leaves the GPU and returns: seconds, memory freed, losses equal to those of a
     process that stayed

    python benchmarks/gpu_checkpoint.py --tests         # first the GPU tests, then everything
    python benchmarks/gpu_checkpoint.py --device cpu --layers 1 --width 128 --vocabulary 99 --length 16
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

from kept_runs import keep

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import stoker
from stoker.checkpoint.agree import Rounds, agreed_plan
from stoker.checkpoint.board import SoloBoard
from stoker.checkpoint.snapshot.arena import Arena
from stoker.checkpoint.snapshot.copy import Snapshot
from stoker.checkpoint.snapshot.state import flatten
from stoker.world import World

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gpu_checkpoint.json"


# --- the job ------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 128)
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


class Job:
    """A GPT and its optimizer; a step is a whole one."""

    def __init__(self, given: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device = given.device
        with torch.device(given.device):
            self.embed = torch.nn.Embedding(given.vocabulary, given.width)
            blocks = [Block(given.width) for _ in range(given.layers)]
            self.model = torch.nn.Sequential(self.embed, *blocks, torch.nn.LayerNorm(given.width))
            self.ids = torch.randint(0, given.vocabulary, (given.batch, given.length + 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def objects(self) -> dict:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> float:
        """Seconds of a step, with everything it asked of the device."""
        began = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.startswith("cuda")):
            hidden = self.model(self.ids[:, :-1])
            logits = hidden @ self.embed.weight.t()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), self.ids[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()
        synchronize(self.device)
        return time.perf_counter() - began


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


# --- measuring ----------------------------------------------------------------------------------------


def ceiling(device: str) -> float:
    """Device to pinned host memory, bytes a second, the best of some copies."""
    size = (1 << 30) if device.startswith("cuda") else (1 << 26)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty(size, dtype=torch.uint8, pin_memory=device.startswith("cuda"))
    best = 0.0
    for _ in range(6):
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(device)
        best = max(best, size / (time.perf_counter() - began))
    return best


def snapshot_rate(job: Job) -> dict:
    """Our copy of everything into the arena."""
    flat = flatten(job.objects())
    plan = agreed_plan(Rounds(SoloBoard(), World(), timeout_s=1), job.objects(), flat)
    arena, times = Arena(), []
    began = time.perf_counter()
    arena.ensure(plan.bytes, pinned=job.device.startswith("cuda"))
    pinning = time.perf_counter() - began
    for _ in range(5):
        synchronize(job.device)
        began = time.perf_counter()
        Snapshot(arena, plan, plan.tensors(flat), chunk_bytes=8 << 20).copy()
        times.append(time.perf_counter() - began)
    arena.close()
    return {
        "state_bytes": plan.bytes,
        "tensors": len(plan.writes),
        "pin_s": pinning,
        "seconds": statistics.median(times),
        "bytes_per_s": plan.bytes / statistics.median(times),
    }


def plain_steps(job: Job, count: int) -> list[float]:
    for _ in range(3):
        job.step()
    return [job.step() for _ in range(count)]


def ours(job: Job, folder: Path, *, saves: int, overlap: bool) -> dict:
    runs = []
    with stoker.Checkpointer(folder, overlap=overlap, keep=1, world=World()) as checkpointer:
        for number in range(saves + 1):
            synchronize(job.device)
            began = time.perf_counter()
            checkpointer.save(number, **job.objects())
            call = time.perf_counter() - began
            during = []
            while checkpointer.is_saving:
                during.append(job.step())
            checkpointer.wait()
            seen = checkpointer.report()
            if number:  # the first allocates
                hook = max(0.0, seen.stall_s - call)
                runs.append({"call_s": call, "hook_s": hook, "durable_s": seen.durable_s, "step_s": during})
    return summed(runs)


def make_stagers(device: str, *, background: bool) -> list[tuple[str, object]]:
    """The peer's stagers, the best first. torch 2.11 closes a stager it was given after every save, and a
    closed one cannot copy again (KeyError: <class 'type'>): this one stays open, with its pinned memory."""
    from torch.distributed.checkpoint.staging import (
        BlockingAsyncStager,
        DefaultStager,
        StagingOptions,
    )

    class KeptStager(DefaultStager):
        def close(self) -> None:
            pass

    on_gpu = device.startswith("cuda")
    options = StagingOptions(on_gpu, False, background and on_gpu, on_gpu)
    kept = ("DefaultStager, pinned, kept open", KeptStager(options))
    cached = ("BlockingAsyncStager, pinned, cached", BlockingAsyncStager(cache_staged_state_dict=on_gpu))
    return [kept] if background else [kept, cached]


def dcp_runs(job: Job, folder: Path, *, saves: int, background: bool) -> dict:
    """dcp.async_save with its pinned stager; where one stager fails, with the next."""
    failed = []
    for name, stager in make_stagers(job.device, background=background):
        try:
            runs = [dcp_save(job, folder / f"dcp-{number}", stager) for number in range(saves + 1)]
            return summed(runs[1:]) | {"stager": name, "failed": failed}  # the first allocates
        except (KeyError, TypeError, RuntimeError, AssertionError) as error:
            failed.append(f"{name}: {error!r}")
    raise SystemExit(f"no stager of dcp.async_save works here: {failed}")


def dcp_save(job: Job, path: Path, stager: object) -> dict:
    """One save; staged in the background, the loop waits before it changes the state."""
    import torch.distributed.checkpoint as dcp

    state = plain({"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()})
    synchronize(job.device)
    began = time.perf_counter()
    answer = dcp.async_save(state, checkpoint_id=path, async_stager=stager)
    call, waited, future = time.perf_counter() - began, 0.0, answer
    if hasattr(answer, "staging_completion"):
        # the state must not change before it is staged: the earliest that a loop can go on changing it
        before = time.perf_counter()
        answer.staging_completion.result()
        waited, future = time.perf_counter() - before, answer.upload_completion
    during = []
    while not future.done():
        during.append(job.step())
    future.result()
    durable = time.perf_counter() - began
    shutil.rmtree(path)
    return {"call_s": call, "hook_s": waited, "durable_s": durable, "step_s": during}


def plain(state):
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return [plain(value) for value in state] if isinstance(state, (list, tuple)) else state


def summed(runs: list[dict]) -> dict:
    steps = [step for run in runs for step in run["step_s"]]
    report = {key: statistics.median(run[key] for run in runs) for key in ("call_s", "hook_s", "durable_s")}
    return report | {
        "stall_s": statistics.median(run["call_s"] + run["hook_s"] for run in runs),
        "first_step_s": statistics.median(run["step_s"][0] for run in runs) if steps else 0.0,
        "mean_step_s": statistics.fmean(steps) if steps else 0.0,
        "median_step_s": statistics.median(steps) if steps else 0.0,
        "steps": len(steps),
    }


def restore(job: Job, folder: Path) -> dict:
    for path in folder.rglob("*.bin"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with stoker.Checkpointer(folder, world=World()) as checkpointer:
        synchronize(job.device)
        began = time.perf_counter()
        checkpointer.restore(**job.objects())
        synchronize(job.device)
        seconds = time.perf_counter() - began
        size = checkpointer.latest().manifest.bytes
    return {"seconds": seconds, "bytes_per_s": size / seconds}


def suspend_and_resume(gigabytes: float) -> dict:
    from stoker.checkpoint.suspend import resume, suspend

    facts: dict = {}

    def away(pid: int) -> None:
        free = torch.cuda.mem_get_info()[0]
        facts["suspend_s"] = suspend(pid).seconds
        facts["freed_bytes"] = torch.cuda.mem_get_info()[0] - free
        facts["resume_s"] = resume(pid).seconds

    disturbed, quiet = child_losses(gigabytes, away), child_losses(gigabytes, None)
    return facts | {"gigabytes": gigabytes, "steps": len(quiet), "equal_losses": disturbed == quiet}


def child_losses(gigabytes: float, disturb) -> list[str]:
    command = [sys.executable, ROOT / "tests" / "gpu" / "suspended_job.py", str(gigabytes), "60"]
    found = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        for line in job.stdout:
            found.append(line.strip())
            if len(found) == 10 and disturb:
                disturb(job.pid)
    if job.returncode:
        raise SystemExit("the training process failed")
    return found


# --- the run ------------------------------------------------------------------------------------------


def verdicts(report: dict) -> dict:
    """What was asked for, and what came out: each a number and whether it is good enough."""
    normal = (report["normal_step_s"] + report["normal_again_step_s"]) / 2  # before and after
    mine, theirs = report["overlap"], report["dcp_pinned"]
    found = {
        "state >= 10 GB": (
            report["snapshot"]["state_bytes"] / 1e9,
            report["snapshot"]["state_bytes"] >= 10e9,
        ),
        "overlap stall / dcp <= 0.1": _at_most(mine["stall_s"] / theirs["stall_s"], 0.1),
        "mean step during a save / normal <= 1.02": _at_most(mine["mean_step_s"] / normal, 1.02),
        "snapshot / copy ceiling >= 0.9": _at_least(
            report["snapshot"]["bytes_per_s"] / report["ceiling_bytes_per_s"], 0.9
        ),
    }
    if "suspend" in report:
        away = report["suspend"]
        found["losses equal after suspend"] = (away["steps"], away["equal_losses"])
        found["memory freed / held >= 0.9"] = _at_least(away["freed_bytes"] / (away["gigabytes"] * 1e9), 0.9)
    return {name: {"value": value, "good": bool(good)} for name, (value, good) in found.items()}


def _at_most(value: float, limit: float) -> tuple[float, bool]:
    return value, value <= limit


def _at_least(value: float, limit: float) -> tuple[float, bool]:
    return value, value >= limit


def machine(device: str) -> dict:
    facts = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def run_tests() -> None:
    environment = {**os.environ, "STOKER_REQUIRE_CUDA": "1"}
    tests = ROOT / "tests" / "gpu" / "test_checkpoint.py"
    subprocess.run([sys.executable, "-m", "pytest", str(tests), "-q"], check=False, env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=None, help="where checkpoints are written")
    parser.add_argument("--suspend-gigabytes", type=float, default=10.0)
    parser.add_argument("--tests", action="store_true", help="run the GPU tests first")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.tests:
        run_tests()
    report: dict = {"machine": machine(given.device)}

    def note(name: str, value) -> None:
        """Write what is known so far: a later part may fail."""
        report[name] = value
        keep(given.out, report)
        print(name, json.dumps(value), flush=True)

    note("ceiling_bytes_per_s", ceiling(given.device))
    if given.device.startswith("cuda"):
        note("suspend", suspend_and_resume(given.suspend_gigabytes))
    job = Job(given)
    job.step()
    note("snapshot", snapshot_rate(job))
    note("normal_step_s", statistics.fmean(plain_steps(job, given.steps)))
    with tempfile.TemporaryDirectory(prefix="gpu-checkpoint-", dir=given.folder) as name:
        folder = Path(name)
        note("overlap", ours(job, folder / "overlap", saves=given.saves, overlap=True))
        note("normal_again_step_s", statistics.fmean(plain_steps(job, given.steps)))
        note("restore", restore(job, folder / "overlap"))
        shutil.rmtree(folder / "overlap")
        note("blocking", ours(job, folder / "blocking", saves=2, overlap=False))
        shutil.rmtree(folder / "blocking")
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        note("dcp_pinned", dcp_runs(job, folder, saves=2, background=False))
        note("verdicts", verdicts(report))
        note("dcp_pinned_background", dcp_runs(job, folder, saves=2, background=True))
    for name, verdict in report["verdicts"].items():
        print(f"{'good' if verdict['good'] else 'NOT YET'}  {name}: {verdict['value']:.3f}")


if __name__ == "__main__":
    main()
