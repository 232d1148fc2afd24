"""Do `stoker bench` and `stoker tune` hold on a real card, beside ceilings and grids of others?

Method, on one machine with one GPU in one run:
  copy        `stoker bench copy`, and its pinned copies to the card in turns with `gpu_feed.py`'s ceiling:
              copies of 32 MiB
  path        `stoker bench path --gpu`, and its way from disk to card in turns with `gpu_feed.py`'s bare
              O_DIRECT reads of the same files, that from the page cache in turns with its pinned copies
  collective  NCCL on one rank; two ranks on one card, which NCCL refuses: what does the user read?
  tune        `stoker tune` on `gpu_imagenet.py`, whose DataLoader is bad; then a grid of loaders in a process
              of its own, and the best of them in turns with what tune found and with what was there. A full
              grid is not run: its time is the number of its cells times what a cell takes, by tune's cheapest
              trial, and by the grid's own mean, which starts no program anew

    python benchmarks/gpu_bench.py                         # 310 s
    python benchmarks/gpu_bench.py --only copy,path,collective
    python benchmarks/gpu_bench.py --device cpu --tiny     # does it work?
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]

import gpu_imagenet  # noqa: E402 - the path to it is set just above
from gpu_feed import direct_reads, drop_from_cache, make_corpus, pinned_copy  # noqa: E402
from kept_runs import RESULTS, keep  # noqa: E402
from stoker.bench.card import copying, reading  # noqa: E402
from stoker.bench.drive import Workload  # noqa: E402

PARTS = ("copy", "path", "collective", "tune")
CELL = "cell "  # begins a line of the grid's process
# Every number of workers up to the cores, as a full grid has; which of them are run is the budget's matter.
PREFETCH = (2, 4, 8)


def stoker(*words: str, seconds: float = 120.0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A command as a user types it."""
    environ = {**os.environ, "PYTHONPATH": str(HERE.parent / "src"), "STOKER_HISTORY": "off"}
    command = [sys.executable, "-m", "stoker.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environ, cwd=cwd)


def answer(*words: str, **options) -> dict:
    """The JSON of a command; where there is none, what it said."""
    begun = time.monotonic()
    done = stoker(*words, **options)
    if done.returncode not in (0, 1) or not done.stdout.strip():
        raise RuntimeError(f"stoker {' '.join(words)}: exit {done.returncode}: {done.stderr.strip()[-800:]}")
    return {**json.loads(done.stdout), "wall_s": time.monotonic() - begun}


def tell(*words: object) -> None:
    print(*words, flush=True)


def rates(found: dict) -> dict[str, float]:
    return {one["name"]: one["value"] for one in found["figures"]}


def show(found: dict) -> None:
    for one in found["figures"]:
        value = (
            f"{one['value'] / 1e9:9.3f} GB/s" if one["unit"] == "B/s" else f"{one['value']:.4g} {one['unit']}"
        )
        tell(f"  {one['name']:62} {value}  {one['limit']}")
    for line in [*found["advice"], *found["notes"]]:
        tell(f"  - {line}")


def turns_of(count: int, ours, ceiling) -> dict:
    """Ceiling, ours, ceiling, ours …: each of ours over the mean of the ceilings beside it. In GB/s."""
    ceilings, measured = [ceiling()], []
    for _ in range(count):
        measured.append(ours())
        ceilings.append(ceiling())
    shares = [one / statistics.mean(ceilings[at : at + 2]) for at, one in enumerate(measured)]
    return {
        "ceilings_gb_s": ceilings,
        "gb_s": measured,
        "shares": shares,
        "share": statistics.median(shares),
    }


# --- copy ---------------------------------------------------------------------------------------------


def measure_copy(given: argparse.Namespace, report: dict) -> None:
    seconds, turns = (0.02, 2) if given.tiny else (0.3, 4)
    sizes = ["--sizes", "64KiB,1MiB"] if given.tiny else []
    report["command"] = answer(
        "bench", "copy", "--json", "--device", given.device, *sizes, "--seconds", "0.1"
    )
    tell(f"stoker bench copy: {report['command']['of']}, {report['command']['wall_s']:.0f} s")
    show(report["command"])
    size = 32 << 20

    def ours() -> float:
        job = {"device": given.device, "sizes": [size], "seconds": seconds, "room": size, "cores": None}
        found = copying.measure({**job, "peers": False}, lambda *said: None)
        best = next(one for one in found["copies"] if one["way"] == copying.TO and one["card"] == 0)
        return best["bytes_s"] / 1e9  # pinned ones come first, where there is a card

    report["to_card_32_mib"] = turns_of(turns, ours, lambda: pinned_copy(given.device, seconds))
    tell(f"copy: pinned, 32 MiB to the card: {report['to_card_32_mib']['share']:.3f} of gpu_feed's ceiling,",
         f"{statistics.median(report['to_card_32_mib']['ceilings_gb_s']):.1f} GB/s")  # fmt: skip


# --- path ---------------------------------------------------------------------------------------------


def measure_path(given: argparse.Namespace, report: dict, folder: Path) -> None:
    seconds, turns = (0.05, 2) if given.tiny else (0.7, 3)
    size, gigabytes = ("64MiB", 0.6) if given.tiny else ("2GiB", 2.2)
    words = [
        "--size",
        size,
        "--gpu",
        "--device",
        first(given.device),
        "--seconds",
        "0.05" if given.tiny else "0.2",
    ]
    report["command"] = answer("bench", "path", "--json", str(folder), *words)
    tell(f"stoker bench path --gpu: {report['command']['wall_s']:.0f} s")
    show(report["command"])
    corpus = make_corpus(folder / "corpus", int(gigabytes * 1e9))
    files = sorted(corpus.glob("*.bin"))
    threads = max((4, 8), key=lambda count: direct_reads(corpus, count, seconds))
    turn = itertools.count()

    def way(how: str, many: int) -> float:
        path = files[next(turn) % len(files)]
        work = asdict(Workload(block=4 << 20, threads=many, seconds=seconds))
        descriptor = os.open(path, os.O_RDONLY)
        try:
            job = {"device": first(given.device), "descriptor": descriptor, "bytes": path.stat().st_size}
            found = reading.measure(
                {**job, "trials": [{"name": how, "how": how, "work": work}]}, lambda *said: None
            )
        finally:
            os.close(descriptor)
        if not found["found"]:
            raise RuntimeError(f"{how}: {found['refused']}")
        return found["found"][0]["bytes"] / found["found"][0]["seconds"] / 1e9

    drop_from_cache(corpus)
    report["threads"] = threads
    report["disk_to_card"] = turns_of(
        turns, lambda: way("direct", threads), lambda: direct_reads(corpus, threads, seconds)
    )
    tell(f"path: disk to card: {report['disk_to_card']['share']:.3f} of bare O_DIRECT reads by {threads},",
         f"{statistics.median(report['disk_to_card']['ceilings_gb_s']):.2f} GB/s")  # fmt: skip
    report["cached_to_card"] = turns_of(
        turns, lambda: way("warm", 14), lambda: pinned_copy(given.device, min(0.4, seconds))
    )
    tell(f"path: page cache to card: {report['cached_to_card']['share']:.3f} of pinned copies,",
         f"{statistics.median(report['cached_to_card']['ceilings_gb_s']):.1f} GB/s")  # fmt: skip


def first(device: str) -> str:
    return "cuda:0" if device == "cuda" else device


# --- collective ---------------------------------------------------------------------------------------


def measure_collective(given: argparse.Namespace, report: dict) -> None:
    sizes = "8B,64KiB" if given.tiny else "8B,64KiB,1MiB,64MiB,1GiB"
    words = ["bench", "collective", "--sizes", sizes, "--seconds", "0.02" if given.tiny else "0.05"]
    report["one_rank"] = answer(*words, "--json", "--ranks", "1")
    tell(f"collective: {report['one_rank']['of']}, {report['one_rank']['wall_s']:.0f} s")
    for one in report["one_rank"]["figures"]:
        tell(f"  {one['name']:24} algorithm {one['beside']['algorithm_bytes_s'] / 1e9:9.3f} GB/s,",
             f"{one['beside']['took_s'] * 1e6:9.1f} µs")  # fmt: skip
    report["usual"] = said_of(stoker("bench", "collective", "--sizes", "8B", "--seconds", "0.01"))
    tell(f"collective: without --ranks: {report['usual']}")
    report["two_on_one_card"] = said_of(stoker(*words, "--ranks", "2"))
    tell(f"collective: --ranks 2: {report['two_on_one_card']}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environ = {**os.environ, "PYTHONPATH": str(HERE.parent / "src"), "STOKER_HISTORY": "off"}
    done = subprocess.run(
        [*command, "-m", "stoker.cli", "bench", "collective", "--sizes", "8B", "--seconds", "0.01"],
        capture_output=True, text=True, timeout=90, env=environ,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if re.search("NCCL|card|error:|hint:", line)]
    report["two_by_torchrun"] = {"rc": done.returncode, "said": lines[-12:], "out": done.stdout[-300:]}
    tell(f"collective: torchrun, two ranks: {done.returncode}")
    for line in lines[-12:]:
        tell(f"  {line}")


def said_of(done: subprocess.CompletedProcess[str]) -> dict:
    return {"rc": done.returncode, "out": done.stdout.strip()[:400], "error": done.stderr.strip()[-400:]}


# --- tune ---------------------------------------------------------------------------------------------


def job_words(given: argparse.Namespace) -> list[str]:
    tiny = ["--batch", "4", "--side", "32", "--width", "8", "--epoch", "100"] if given.tiny else []
    return ["--device", given.device, *tiny]


def measure_tune(given: argparse.Namespace, report: dict, folder: Path, until: float, kept) -> None:
    job = folder / "train.py"
    shutil.copy(HERE / "gpu_imagenet.py", job)
    words = [
        "tune",
        "--no-history",
        "--json",
        "--minutes",
        str(given.minutes),
        "--out",
        str(folder / "trials"),
    ]
    command = [sys.executable, job.name, *job_words(given)]
    most_s = 60 * given.minutes + 90
    try:
        found = answer(*words, "--", *command, seconds=most_s, cwd=folder)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        found = {"knobs": {}, "failed": str(error)[-800:], "better": False, "trials": [], "wall_s": most_s}
        tell(f"tune: failed: {error}")
    report["tune"] = {
        name: value for name, value in found.items() if name not in ("findings", "diff", "folder")
    }
    for one in found.get("tried", []):
        tell(f"  {one['setting']}: {one['times']:.2f} {one['note']}")
    if found["better"]:
        gain = found["gain"]
        tell(
            f"tune: {found['knobs']}: {gain['times']:.2f} ({gain['low']:.2f}-{gain['high']:.2f}),",
            f"{found['wall_s']:.0f} s",
        )
        tell(found["diff"])
    else:
        tell(f"tune: nothing: {found.get('why')} {found.get('verdict')}")
    kept()
    loader = {name: value for name, value in found["knobs"].items() if name in gpu_imagenet_loader()}
    report["grid"] = grid(given, {**BAD, **loader}, until)
    judge(report, given, found)


BAD = {"num_workers": 2, "prefetch_factor": 2, "pin_memory": False, "persistent_workers": False}


def gpu_imagenet_loader() -> tuple[str, ...]:
    return tuple(BAD)


def full_grid(cores: int) -> list[dict]:
    """Every number of workers up to the cores, with each of the rest."""
    rest = itertools.product(range(1, cores + 1), PREFETCH, (False, True), (False, True))
    found = [dict(zip(BAD, (n, depth, pin, stay), strict=True)) for n, depth, pin, stay in rest]
    none = [
        {"num_workers": 0, "prefetch_factor": None, "pin_memory": pin, "persistent_workers": False}
        for pin in (False, True)
    ]
    return found + none


def coarse(cores: int) -> list[dict]:
    """The order in which cells are run until the time is over: first what is most likely the best."""
    counts = dict.fromkeys([cores, 3 * cores // 4, cores - 2, 5 * cores // 8, cores // 2, cores // 4, 2, 1])
    counts = [count for count in counts if count > 0]
    best = [(n, 2, pin, True) for n in counts for pin in (True, False)]
    more = [(n, depth, True, True) for depth in (4, 8) for n in counts[:5]]
    anew = [(n, 2, True, False) for n in counts[:5]]
    return [dict(zip(BAD, one, strict=True)) for one in dict.fromkeys([*best, *more, *anew])]


def grid(given: argparse.Namespace, tuned: dict, until: float) -> dict:
    """Cells in a process of their own, which prints each as it comes."""
    left = max(20.0, until - time.monotonic() - 8)
    words = [
        "--cells",
        json.dumps({"tuned": tuned, "seconds": left, "job": job_words(given), "tiny": given.tiny}),
    ]
    command = [sys.executable, str(HERE / "gpu_bench.py"), *words]
    found: dict = {"cells": [], "turns": [], "budget_s": left}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for line in process.stdout:
            if line.startswith(CELL):
                one = json.loads(line[len(CELL) :])
                found["turns" if one["turn"] else "cells"].append(one)
                kind, step_ms = "turn" if one["turn"] else "grid", 1e3 * one["step_s"]
                tell(f"  {kind} {one['setting']}: {step_ms:.1f} ms a step, {one['took_s']:.1f} s")
        process.wait(timeout=30)
    finally:
        process.kill()
        process.wait()
    return found


def judge(report: dict, given: argparse.Namespace, found: dict) -> None:
    """What tune's setting gives of the best of the grid, by the turns; and the price of a full grid."""
    steps: dict[str, list[float]] = {}
    for one in report["grid"]["turns"]:
        steps.setdefault(json.dumps(one["setting"]), []).append(one["step_s"])
    medians = {name: statistics.median(values) for name, values in steps.items()}
    bad = json.dumps(BAD)
    tuned = json.dumps({**BAD, **{name: value for name, value in found["knobs"].items() if name in BAD}})
    best = min(medians, key=medians.get)
    took = [one["took_s"] for one in found["trials"] if one["seconds"]]
    cells = report["grid"]["cells"]
    cell_s = statistics.mean(one["took_s"] for one in cells)
    count = len(full_grid(os.cpu_count() or 2))
    verdict = {
        "best_of_grid": json.loads(best),
        "best_step_ms": 1e3 * medians[best],
        "tuned_step_ms": 1e3 * medians[tuned],
        "as_it_was_step_ms": 1e3 * medians[bad],
        "tuned_of_best": medians[best] / medians[tuned],
        "claimed_gain": found["gain"]["times"] if found.get("gain") and found["better"] else 1.0,
        "gain_in_the_grid": medians[bad] / medians[tuned],
        "cells_run": len(cells),
        "cells_of_a_full_grid": count,
        "full_grid_is_priced_not_run": True,
        "grid_in_one_process_s": count * cell_s,
        "tune_of_that": found["wall_s"] / (count * cell_s),
    }
    if took:
        verdict |= {
            "grid_of_whole_runs_s": count * min(took),  # each cell as cheap as tune's cheapest trial
            "tune_of_grid_of_whole_runs": found["wall_s"] / (count * min(took)),
        }
    report["verdict"] = verdict
    tell("tune:", json.dumps(verdict))


# --- the grid's process -------------------------------------------------------------------------------


def run_cells(told: dict) -> None:
    """Cells until the time is nearly over; then in turns the best two, what tune found, what was there."""
    begun = time.monotonic()
    job = gpu_imagenet.arguments(told["job"])
    torch.manual_seed(0)
    model = gpu_imagenet.network(job.width).to(job.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = gpu_imagenet.Images(job.epoch * job.batch, job.side)
    seconds, rounds = (0.3, 1) if told["tiny"] else (1.5, 2)

    def run(setting: dict, *, turn: bool) -> dict:
        found = {
            **cell(setting, job, model, optimizer, images, seconds),
            "turn": turn,
        }
        tell(CELL + json.dumps(found))
        return found

    run(BAD, turn=False)  # the first also waits for cuDNN: it is no cell
    cells = []
    for setting in coarse(os.cpu_count() or 2):
        each_s = statistics.mean(one["took_s"] for one in cells) if cells else 2 * seconds
        kept_back = 4.5 * rounds * each_s
        if cells and time.monotonic() - begun + each_s + kept_back > told["seconds"]:
            break
        cells.append(run(setting, turn=False))
    best = [one["setting"] for one in sorted(cells, key=lambda one: one["step_s"])[:2]]
    for number in range(rounds):
        order = [*best, told["tuned"], BAD]
        unlike = list({json.dumps(one): one for one in order}.values())
        for setting in unlike if number % 2 == 0 else reversed(unlike):
            run(setting, turn=True)


def cell(setting: dict, job, model, optimizer, images, seconds: float) -> dict:
    """Seconds a step, once the queues of the workers have run off."""
    begun = time.perf_counter()
    given = (
        dict(setting) if setting["num_workers"] else {"num_workers": 0, "pin_memory": setting["pin_memory"]}
    )
    loader = torch.utils.data.DataLoader(images, batch_size=job.batch, shuffle=True, drop_last=True, **given)
    queued = 2 * setting["num_workers"] * (setting["prefetch_factor"] or 0) + 5
    done, since, at = 0, 0.0, 0
    while True:
        for batch, labels in loader:
            gpu_imagenet.step(model, optimizer, batch.to(job.device), labels.to(job.device))
            done += 1
            now = time.perf_counter()
            if not since and (done >= queued or (done >= 5 and now - begun > 2 * seconds)):
                at, since = done, synchronized(job.device)
            elif since and now - since >= seconds and done >= at + 5:
                step_s = (synchronized(job.device) - since) / (done - at)
                del loader
                took_s = time.perf_counter() - begun
                return {"setting": setting, "step_s": step_s, "steps": done - at, "took_s": took_s}


def synchronized(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


# --- all of it ----------------------------------------------------------------------------------------


def machine(device: str) -> dict:
    facts = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    facts["decoder"] = gpu_imagenet.codec().name
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, with commas: {', '.join(PARTS)}")
    parser.add_argument("--budget", type=float, default=310, help="seconds of all parts together")
    parser.add_argument("--minutes", type=float, default=2.0, help="of stoker tune")
    parser.add_argument("--tiny", action="store_true", help="small sizes: does it work?")
    parser.add_argument("--folder", type=Path, default=None, help="where files are written")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_bench.json")
    parser.add_argument("--cells", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.cells:
        run_cells(json.loads(given.cells))
        return
    begun = time.monotonic()
    report: dict = {
        "question": (__doc__ or "").splitlines()[0],
        "machine": machine(given.device),
        "failed": {},
    }
    tell(json.dumps(report["machine"]))

    def kept() -> None:
        report["wall_s"] = time.monotonic() - begun
        keep(given.out, report)

    with tempfile.TemporaryDirectory(prefix="gpu-bench-", dir=given.folder) as place:
        parts = {
            "copy": lambda found: measure_copy(given, found),
            "path": lambda found: measure_path(given, found, Path(place)),
            "collective": lambda found: measure_collective(given, found),
            "tune": lambda found: measure_tune(given, found, Path(place), begun + given.budget, kept),
        }
        for name in given.only.split(","):
            at = time.monotonic()
            try:
                parts[name](report.setdefault(name, {}))
            except Exception as error:  # one part that fails must not stop the others
                report["failed"][name] = f"{type(error).__name__}: {error}"[-1500:]
                tell(f"{name} FAILED: {report['failed'][name]}")
                tell(traceback.format_exc()[-1500:])
            with suppress(OSError):
                shutil.rmtree(Path(place) / "corpus", ignore_errors=True)
            kept()
            tell(f"== {name}: {time.monotonic() - at:.0f} s, {time.monotonic() - begun:.0f} s in all ==")


if __name__ == "__main__":
    main()
