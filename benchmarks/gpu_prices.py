"""Is a price what is gained when its cause is gone, and is the idle ledger what a profiler's trace says?

Method, on one GPU in one run: the programs of `priced/` know nothing of stoker, and each has a cause that
one of its own switches takes away. Each is run under `stoker watch` with its cause, where the first finding
has to name it, and again without; the ratio of their steps is the real gain, held against the price. What a
switch cannot make quicker must have no price. The idle ledger of a watched run is held against a trace that
torch's profiler wrote of the same program in a process of its own, read here with nothing of stoker in it:
what the card works in a step always, shares of the time only where the profiler left steps their length.
A deep look costs what the steps of its window take longer than those beside it. Watching costs the
difference of two processes of one program, watched and not, which take turns (watch_overhead.py).

    python benchmarks/gpu_prices.py --seconds 280 --cards cards.txt
    python benchmarks/gpu_prices.py --only own_loop,copies --steps 8
    CUDA_VISIBLE_DEVICES= python benchmarks/gpu_prices.py --steps 1      # without a card: does it work?

Each case says its line and is kept when it is done. While one program steps, the next one imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src")]

from kept_runs import keep  # noqa: E402
from stoker.diagnose.features import features  # noqa: E402
from stoker.diagnose.rules import diagnose  # noqa: E402
from stoker.report.card import card_text  # noqa: E402
from stoker.report.summary import summarise  # noqa: E402
from stoker.watch.runs import read_recording  # noqa: E402
from watch_overhead import costs, pair  # noqa: E402

PROGRAMS = HERE / "priced"
WARM = 8  # steps that no pace counts: so that saves and epochs are counted as often as by the price
LAST_S = 40.0  # that a program may take beyond its steps: to start, and to end
WITHIN = 0.10
POINTS = 0.03
LEAST_TRACED = 5  # whole steps: those after a profiler's start are not usual ones

# The next program's interpreter imports torch while the one before it steps, and then waits for its turn: of
# a run of twelve seconds three are imports.
_AHEAD = """\
import os, sys, time
_turn = os.environ.get("PRICES_TURN")
if _turn and len(sys.orig_argv) > 1 and sys.orig_argv[1] == os.environ.get("PRICES_PROGRAM"):
    if os.environ.get("PRICES_AHEAD"):
        import torch
    while not os.path.exists(_turn):
        time.sleep(0.01)
"""


@dataclass(kw_only=True)
class Run:
    """One process of one program."""

    name: str
    program: str
    switches: dict[str, str] = field(default_factory=dict)
    watch: tuple[str, ...] | None = ("--hz", "10")  # None: not watched
    profile: bool = False
    seconds: float = 8.0
    warm: int = WARM
    least: int = 0  # readings below it say nothing


@dataclass(frozen=True, kw_only=True)
class Price:
    """A cause and its removal. `kinds` may be named; empty: no price may be given of `free`."""

    name: str
    fault: str
    mended: str
    kinds: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    free: str = ""
    on_host: bool = False  # can be judged without a card
    pace: str = ""  # the run that tells what steps take with the cause, where it is not `fault`
    line: tuple[str, ...] = ()  # words that the named line of the source has to hold


RUNS = {
    one.name: one
    for one in (
        Run(name="own_loop", program="own_loop"),
        Run(name="own_loop mended", program="own_loop", switches={"LOCAL": "1"}, seconds=5),
        Run(name="own_loop traced", program="own_loop", watch=None, profile=True, seconds=4),
        Run(name="data", program="data"),
        Run(name="data mended", program="data", switches={"DECODED": "1"}, seconds=5),
        Run(name="host_sync", program="host_sync"),
        Run(name="host_sync mended", program="host_sync", switches={"ON_CARD": "1"}, seconds=5),
        Run(name="host_sync traced", program="host_sync", watch=None, profile=True, seconds=3),
        Run(name="launches", program="launches"),
        Run(name="launches unread", program="launches", switches={"LOG_EVERY": "1000"}, seconds=5),
        Run(name="launches graphed", program="launches", switches={"GRAPH": "1"}, seconds=4),
        Run(name="launches looked", program="launches", watch=("--hz", "10", "--look", "200"), seconds=7),
        Run(name="checkpoint", program="checkpoint", seconds=9),
        Run(name="checkpoint mended", program="checkpoint", switches={"SAVE_EVERY": "0"}, seconds=5),
        Run(name="copies", program="copies"),
        Run(name="copies mended", program="copies", switches={"PREFETCH": "1"}, seconds=5),
        Run(name="precision", program="precision"),
        Run(name="precision mended", program="precision", switches={"TF32": "1"}, seconds=5),
        Run(name="precision looked", program="precision", watch=("--hz", "10", "--look", "40"), seconds=5),
        Run(name="epochs", program="epochs", seconds=9),
        Run(name="epochs mended", program="epochs", switches={"PERSISTENT": "1"}, seconds=5),
    )
}
PRICES = (
    Price(
        name="own_loop", fault="own_loop", mended="own_loop mended", kinds=("data_starvation",),
        causes=("own_loop",), on_host=True, line=("time.sleep(fetch_s",),
    ),
    Price(name="data", fault="data", mended="data mended", kinds=("data_starvation",), on_host=True),
    Price(
        name="epochs", fault="epochs", mended="epochs mended", kinds=("data_starvation",),
        causes=("startup",), on_host=True,
    ),
    Price(
        name="checkpoint", fault="checkpoint", mended="checkpoint mended", kinds=("checkpoint_stall",),
        on_host=True,
    ),
    Price(name="host_sync", fault="host_sync", mended="host_sync mended", kinds=("host_sync",)),
    Price(name="host_sync free", fault="launches", mended="launches unread", free="host_sync"),
    Price(name="launch_bound", fault="launches", mended="launches graphed", kinds=("launch_bound",)),
    Price(
        name="looked launch_bound", fault="launches looked", mended="launches graphed",
        kinds=("launch_bound",), pace="launches",
    ),
    Price(name="copies", fault="copies", mended="copies mended", kinds=("h2d_copy",)),
    Price(name="precision", fault="precision", mended="precision mended", kinds=("precision",)),
    Price(
        name="looked precision", fault="precision looked", mended="precision mended", kinds=("precision",),
        pace="precision",
    ),
)  # fmt: skip
LEDGERS = (("own_loop", "own_loop traced"), ("host_sync", "host_sync traced"))
LOOKS = ("launches looked", "precision looked")


# --- running ------------------------------------------------------------------------------------------


class Started:
    """A program that runs, or waits for its turn with torch imported."""

    def __init__(self, run: Run, folder: Path, options: argparse.Namespace) -> None:
        self.run, name = run, run.name.replace(" ", "-")
        self.place = folder / name
        self.place.mkdir()
        self.turn, self.times = self.place / "turn", self.place / "times.json"
        self.trace, self.folder = self.place / "trace.json", self.place / "run"
        self._log = (self.place / "log").open("w")
        program = str(PROGRAMS / f"{run.program}.py")
        command = [sys.executable, program]
        if run.watch is not None:
            told = [*run.watch, *([] if options.gpu else ["--gpu", "none"]), "--no-history"]
            command = [
                sys.executable,
                "-m",
                "stoker.cli",
                "watch",
                *told,
                "--out",
                str(self.folder),
                "--",
                *command,
            ]
        paths = [str(folder / "ahead"), str(HERE.parent / "src")]
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command,
            cwd=self.place,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                # A trace has as many steps in it as it has, however short the rest of the run is made.
                "SECONDS": str(run.seconds * (1.0 if run.profile else min(options.steps / 8, 1.0))),
                "TIMES": str(self.times),
                "PRICES_TURN": str(self.turn),
                "PRICES_PROGRAM": program,
                "PRICES_AHEAD": "1" if options.ahead else "",
                **run.switches,
                **({"PROFILE": str(self.trace)} if run.profile else {}),
            },
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    def go(self) -> None:
        self.began = time.monotonic()
        self.turn.touch()

    def stepped(self, until: float) -> bool:
        """Wait for the last step: what follows it is beside the next program's beginning."""
        while time.monotonic() < until:
            if self.times.exists() or self.process.poll() is not None:
                return self.times.exists()
            time.sleep(0.01)
        return False

    def close(self, patience_s: float) -> None:
        try:
            self.process.wait(max(patience_s, 0.1))
        except subprocess.TimeoutExpired:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()

    @property
    def log(self) -> str:
        return (self.place / "log").read_text(errors="replace")[-1500:]


@dataclass(kw_only=True)
class Done:
    """What a run has shown."""

    ends: list[float]
    step_s: float
    recording: Any = None
    findings: Sequence[Any] = ()
    report: dict[str, Any] = field(default_factory=dict)
    trace: Path | None = None


def read(one: Started) -> Done:
    ends = json.loads(one.times.read_text())
    step_s = pace(ends, one.run.warm)
    done = Done(ends=ends, step_s=step_s, trace=one.trace if one.trace.exists() else None)
    if one.run.watch is None:
        done.report = {"step_ms": 1e3 * step_s, "steps": len(ends)}
        return done
    recording = read_recording(one.folder)
    verdict, seen = diagnose(recording), features(recording)
    summary = summarise(recording, verdict.findings)
    done.recording, done.findings = recording, verdict.findings
    done.report = {
        "step_ms": 1e3 * step_s,
        "steps": len(ends),
        "steps_seen": max((len(rank.steps.end) for rank in recording.ranks), default=0),
        "findings": [{name: getattr(found, name) for name in _TOLD} for found in verdict.findings],
        "abstained": {one.kind: one.why for one in verdict.abstained},
        "share": rounded(seen.loop.share),
        "ledger": rounded({"busy": seen.ledger.busy, **seen.ledger.idle}) if seen.ledger else None,
        "paced": paced(seen),
        "card": rounded(numbers(seen.card)) if seen.card else None,
        "columns": rounded({k: gpu.samples.mean(k) for gpu in recording.gpus for k in gpu.samples.columns}),
        "looked": worked(seen.worked),
        "host_busy": seen.host.busy if seen.host else None,
        "card_text": card_text(summary),
    }  # fmt: skip
    return done


_TOLD = ("kind", "cause", "share", "speedup_if_gone", "at_most", "summary", "evidence")


def numbers(row: Any) -> dict[str, float]:
    return {name: value for name, value in asdict(row).items() if isinstance(value, (int, float))}


def paced(seen: Any) -> dict[str, Any] | None:
    if seen.paced is None:
        return None
    told = seen.paced.ledger
    idle = rounded({"busy": told.busy, **told.idle}) if told else None
    return {"whole": seen.paced.whole, "share": rounded(seen.paced.share), "ledger": idle}


def worked(seen: Any) -> dict[str, Any] | None:
    if seen is None:
        return None
    return {**numbers(seen), "busy": seen.busy, "kernels": [asdict(one) for one in seen.kernels]}


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 5) for name, value in values.items() if value == value}


def pace(ends: list[float], warm: int) -> float:
    """Seconds a step, the first ones left out."""
    warm = min(warm, max(len(ends) // 3, 1))
    return (ends[-1] - ends[warm - 1]) / (len(ends) - warm)


# --- prices -------------------------------------------------------------------------------------------


def judge_price(price: Price, done: dict[str, Done], *, on_card: bool) -> dict[str, Any]:
    fault, mended = done[price.fault], done[price.mended]
    fault_s = done[price.pace or price.fault].step_s
    real = fault_s / mended.step_s
    first = fault.findings[0] if fault.findings else None
    row: dict[str, Any] = {
        "fault_ms": round(1e3 * fault_s, 3),
        "mended_ms": round(1e3 * mended.step_s, 3),
        "real": round(real, 3),
        "first": f"{first.kind}/{first.cause}" if first else "nothing",
        "mended_first": f"{mended.findings[0].kind}/{mended.findings[0].cause}"
        if mended.findings
        else "nothing",
        "judged": on_card or price.on_host,
    }
    if price.free:
        said = [found.speedup_if_gone for found in fault.findings if found.kind == price.free]
        row |= {"claimed": max(said, default=1.0), "off": max(said, default=1.0) / real - 1}
        row["right"] = row["claimed"] <= max(real, 1.0) * (1 + WITHIN)
    else:
        named = [found for found in fault.findings if found.kind in price.kinds]
        claimed = named[0].speedup_if_gone if named else 1.0
        row |= {"claimed": claimed, "at_most": bool(named and named[0].at_most), "off": claimed / real - 1}
        is_first = first is not None and first.kind in price.kinds
        caused = is_first and (not price.causes or first.cause in price.causes)
        row["named"] = bool(caused)
        row["right"] = bool(caused) and abs(row["off"]) <= WITHIN
        if price.line and first is not None:
            row["line"] = named_line(first)
            row["line_right"] = any(word in row["line"]["text"] for word in price.line)
        if price.causes == ("startup",) and first is not None:
            row["remedy"] = first.remedy[0] if first.remedy else ""
            row["remedy_right"] = "persistent_workers=True" in row["remedy"]
    row["off"] = round(row["off"], 4)
    return row


def named_line(finding: Any) -> dict[str, str]:
    """The `file:line function` that a finding names, and what stands there."""
    said = next((one for one in finding.evidence if one.startswith("seen in ")), "")
    place = said.removeprefix("seen in ").rpartition(" ")[0]
    path, _, number = place.rpartition(":")
    try:
        text = Path(path).read_text().splitlines()[int(number) - 1].strip()
    except (OSError, ValueError, IndexError):
        text = ""
    return {"said": said, "text": text}


# --- the ledger beside a trace ------------------------------------------------------------------------


def judge_ledger(watched: Done, traced: Done) -> dict[str, Any]:
    """What the card works in a step, and points of difference in every line of the ledger: what the trace
    says is read here by itself. A profiler makes launching slower, and where steps grew longer by it,
    shares of the time are those of another program: they are said, and not judged."""
    mine = watched.report["paced"] and watched.report["paced"]["ledger"]
    if not mine or traced.trace is None:
        return {"judged": False, "right": False, "why": "no card was read, or no trace written"}
    theirs, steps, traced_s = ledger_of_trace(traced.trace)
    if steps < LEAST_TRACED:
        return {"judged": False, "right": False, "why": f"{steps} whole steps were traced"}
    told = {
        "busy": mine["busy"],
        "launching": mine["compute"] + mine["collective"] + mine["copy"],
        "waiting": mine["sync"],
        "own_code": sum(
            mine.get(name, 0.0) for name in ("data", "unattributed", "stalled", "checkpoint", "evaluation")
        ),
    }
    off = {name: round(told[name] - theirs[name], 4) for name in told}
    works = {"watched": 1e3 * told["busy"] * watched.step_s, "traced": 1e3 * theirs["busy"] * traced_s}
    longer = traced_s / watched.step_s
    alike = abs(longer - 1) <= POINTS
    agree = abs(works["watched"] / works["traced"] - 1) <= WITHIN if works["traced"] > 0 else False
    return {
        "judged": True,
        "watched": rounded(told),
        "traced": rounded(theirs),
        "points": off,
        "points_judged": alike,
        "card_ms_a_step": rounded(works),
        "traced_steps": steps,
        "traced_step_ms": round(1e3 * traced_s, 3),
        "watched_step_ms": round(1e3 * watched.step_s, 3),
        "right": agree and (not alike or all(abs(one) <= POINTS for one in off.values())),
    }  # fmt: skip


def say_ledger(row: dict[str, Any]) -> str:
    if not row["judged"]:
        return str(row["why"])
    works = row["card_ms_a_step"]
    said = f"the card works {works['watched']:.1f} ms a step, {works['traced']:.1f} by the trace"
    steps = f"steps of {row['watched_step_ms']:.1f} ms, {row['traced_step_ms']:.1f} traced"
    return f"{said}; {steps}; points off{'' if row['points_judged'] else ' (not judged)'} {row['points']}"


def ledger_of_trace(path: Path) -> tuple[dict[str, float], int, float]:
    """Of the steps of a Kineto trace but the last: in which kernels ran, and what the host did when none did:
    nothing of torch's or CUDA's (own code), waiting for the card, or calling torch (launching). And how many
    steps those were, and how long one."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", errors="replace") as file:
        told = json.load(file)["traceEvents"]
    events = [one for one in told if one.get("ph") == "X" and "dur" in one]
    steps = sorted(
        (float(one["ts"]), float(one["ts"]) + float(one["dur"]))
        for one in events
        if str(one["name"]).startswith("ProfilerStep") and str(one.get("cat")) == "user_annotation"
    )
    if len(steps) < 2:
        return {}, 0, 0.0
    begin, end = steps[0][0], steps[-1][0]

    def spans(keep: Callable[[str, str], bool]) -> list[tuple[float, float]]:
        chosen = [
            (float(one["ts"]), float(one["ts"]) + float(one["dur"]))
            for one in events
            if keep(str(one.get("cat", "")).lower(), str(one["name"]))
        ]
        return union([(max(a, begin), min(b, end)) for a, b in chosen if b > begin and a < end])

    kernels = spans(lambda category, name: category in ("kernel", "concurrent_kernel"))
    calls = spans(lambda category, name: category in ("cpu_op", "cuda_runtime", "cuda_driver"))
    waits = spans(
        lambda category, name: (
            category == "cuda_runtime" and ("Synchronize" in name or name == "cudaMemcpyAsync")
        )
    )
    # Between two operators lies Python on its way to the next one: as short as that, it is launching.
    calls = union(calls, closing_us=200)
    named = spans(lambda category, name: category == "user_annotation" and name == "get_batch")
    idle = inverse(kernels, begin, end)
    window = end - begin
    waiting = shared(idle, waits) / window
    calling = (shared(idle, calls) - shared(idle, crossed(named, calls))) / window
    busy = sum(b - a for a, b in kernels) / window
    shares = {
        "busy": busy,
        "waiting": waiting,
        "launching": max(calling - waiting, 0.0),
        "own_code": 1 - busy - max(calling, waiting),
    }
    count = len(steps) - 1
    return shares, count, window / 1e6 / max(count, 1)


def union(spans: list[tuple[float, float]], *, closing_us: float = 0.0) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1] + closing_us:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def inverse(spans: list[tuple[float, float]], begin: float, end: float) -> list[tuple[float, float]]:
    edges = [begin, *(one for span in spans for one in span), end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]


def crossed(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The parts that lie in both."""
    both = [(max(a, c), min(b, d)) for a, b in some for c, d in others if c < b and d > a]
    return union(both)


def shared(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    total, at = 0.0, 0
    for start, end in some:
        while at < len(others) and others[at][1] <= start:
            at += 1
        here = at
        while here < len(others) and others[here][0] < end:
            total += min(end, others[here][1]) - max(start, others[here][0])
            here += 1
    return total


# --- what a deep look costs ---------------------------------------------------------------------------


def judge_look(done: Done) -> dict[str, Any]:
    """A look begins when step N has ended and ends when step N + 3 has: that one holds the stop."""
    steps = [b - a for a, b in zip(done.ends[:-1], done.ends[1:], strict=True)]  # steps[i]: step i + 2
    usual = statistics.median(steps[WARM:])
    looks = [
        next(int(word) for word in event.text.split() if word.isdigit())
        for rank in done.recording.ranks
        for event in rank.events
        if event.what == "look"
    ]
    took = {number + 2: step for number, step in enumerate(steps)}
    whole = [at for at in looks if at + 3 in took and at in took]
    if not whole:
        return {"judged": False, "right": False, "why": f"{len(looks)} looks"}
    inside = [took[at + more] / usual for at in whole for more in (1, 2)]
    return {
        "judged": True,
        "looks": len(whole),
        "usual_ms": round(1e3 * usual, 3),
        "inside_over_usual": round(statistics.median(inside), 4),
        "first_start_ms": round(1e3 * (took[whole[0]] - usual), 2),
        "start_ms": round(1e3 * statistics.median(took[at] - usual for at in whole[1:] or whole), 2),
        "stop_ms": [round(1e3 * (took[at + 3] - usual), 1) for at in whole],
        "kernels": done.report["looked"]["kernel_count"] if done.report["looked"] else None,
        "right": True,
    }


# --- what watching costs ------------------------------------------------------------------------------


def measure_overhead(seconds: float, *, on_card: bool) -> dict[str, Any]:
    """Two processes of watch_overhead.py's loop that take turns, the sampler on: as many turns as fit."""
    options = SimpleNamespace(
        steps=40, width=512 if on_card else 256, device="cuda" if on_card else "cpu", cycles=4
    )
    found: dict[str, list[Any]] = {}
    until, took = time.monotonic() + seconds, 0.0
    for mode in ("stoker", "null"):
        if found and time.monotonic() + took > until:
            break
        began = time.monotonic()
        left = (until - began) / (2 if mode == "stoker" else 1)
        options.cycles = max(4, min(60, int((left - 18) / 0.35)))
        found[mode] = pair(mode, options)
        took = time.monotonic() - began
    took_s = [one["plain"]["wall"] for cycles in found.values() for one in cycles]
    rows = {mode: {clock: costs(cycles, mode, clock) for clock in ("wall", "cpu")}
            for mode, cycles in found.items()}  # fmt: skip
    wall = rows["stoker"]["wall"]
    right = wall["us"] <= 25 or wall["percent"] < 1
    return {"judged": True, "step_ms": 1e3 * statistics.median(took_s), **rows, "right": right}


# --- all of it ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """What needs some runs, and says one line of them."""

    name: str
    runs: tuple[str, ...]
    judge: Callable[[dict[str, Done]], dict[str, Any]]
    say: Callable[[dict[str, Any]], str]


def cases(*, on_card: bool) -> list[Case]:
    found = [
        Case(
            name=one.name,
            runs=(one.fault, one.mended, *filter(None, [one.pace])),
            judge=lambda done, one=one: judge_price(one, done, on_card=on_card),
            say=say_price,
        )
        for one in PRICES
    ]
    found += [
        Case(
            name=f"ledger of {watched}",
            runs=(watched, traced),
            judge=lambda done, pair=(watched, traced): judge_ledger(done[pair[0]], done[pair[1]]),
            say=say_ledger,
        )
        for watched, traced in LEDGERS
    ]
    found += [
        Case(
            name=f"look at {name.partition(' ')[0]}",
            runs=(name,),
            judge=lambda done, name=name: judge_look(done[name]),
            say=lambda row: str({key: row[key] for key in row if key not in ("judged", "right")}),
        )
        for name in LOOKS
    ]
    return found


def say_price(row: dict[str, Any]) -> str:
    most = "at most " if row.get("at_most") else ""
    return (
        f"claimed {most}{row['claimed']:.2f}, real {row['real']:.2f} ({100 * row['off']:+.1f}%),"
        f" first {row['first']}, {row['fault_ms']:.1f} → {row['mended_ms']:.1f} ms,"
        f" then {row['mended_first']}"
        + (f", line {row['line']['said']!r} is {row['line']['text']!r}" if "line" in row else "")
        + (f", remedy {row['remedy'][:60]!r}" if "remedy" in row else "")
    )


def say_overhead(row: dict[str, Any]) -> str:
    walls = {mode: row[mode]["wall"] for mode in ("stoker", "null") if mode in row}
    said = [
        f"{mode} {one['us']:.1f} ± {one['error']:.1f} us, {one['percent']:.2f}%"
        for mode, one in walls.items()
    ]
    return f"{'; '.join(said)} of {row['step_ms']:.2f} ms"


def main() -> None:
    options = arguments()
    began = time.monotonic()
    until = began + options.seconds
    chosen = [
        one for one in cases(on_card=options.gpu) if not options.only or matches(one.name, options.only)
    ]
    wanted = [name for name in RUNS if any(name in case.runs for case in chosen)]
    report: dict[str, Any] = {
        "question": __doc__.strip().splitlines()[0],
        "machine": machine(on_card=options.gpu),
        "cases": {},
        "runs": {},
    }
    with tempfile.TemporaryDirectory(prefix="gpu-prices-") as name:
        folder = Path(name)
        (folder / "ahead").mkdir()
        (folder / "ahead" / "sitecustomize.py").write_text(_AHEAD)
        with contextlib.suppress(KeyboardInterrupt):
            run_all(wanted, chosen, folder, until, options, report)
        if matches("overhead", options.only or ["overhead"]):
            left = until - time.monotonic()
            if left > (40 if options.gpu else 30) or options.only:
                spent = min(max(left - 5, 30), 80)
                overhead = lambda: measure_overhead(spent, on_card=options.gpu)  # noqa: E731
                judged(report, "overhead", overhead, say_overhead)
            else:
                print(f"overhead: not run, {left:.0f} s are left", flush=True)
            write(report, options)
    rows = [row for row in report["cases"].values() if row.get("judged")]
    print(f"{sum(bool(row['right']) for row in rows)} of {len(rows)} right, {time.monotonic() - began:.0f} s")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=280, help="in all: what does not fit is not run")
    parser.add_argument("--steps", type=float, default=8, help="seconds of steps of a usual run")
    parser.add_argument("--only", default="", help="cases by their beginnings, with commas; and overhead")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu_prices.json")
    parser.add_argument("--cards", type=Path, help="the verdict card of every watched run, as text")
    given = parser.parse_args()
    given.only = [one.strip() for one in given.only.split(",") if one.strip()]
    import torch

    given.gpu = torch.cuda.is_available()
    # With few cores the next program's imports would be what is measured.
    given.ahead = (os.cpu_count() or 1) >= 8
    return given


def machine(*, on_card: bool) -> dict[str, Any]:
    import torch

    told = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    return {**told, "gpu": torch.cuda.get_device_name()} if on_card else told


def matches(name: str, only: Sequence[str]) -> bool:
    return any(name.startswith(one) for one in only)


def run_all(
    wanted: list[str],
    chosen: list[Case],
    folder: Path,
    until: float,
    options: argparse.Namespace,
    report: dict[str, Any],
) -> None:
    """One program steps at a time; the one before it is read meanwhile, the one after it gets ready."""
    done: dict[str, Done] = {}
    failed: set[str] = set()
    open_cases = list(chosen)
    before: Started | None = None
    ready: Started | None = None

    def settle(one: Started | None) -> None:
        if one is None:
            return
        one.close(LAST_S)
        try:
            done[one.run.name] = read(one)
            report["runs"][one.run.name] = {
                key: value for key, value in done[one.run.name].report.items() if key != "card_text"
            }
        except Exception as error:
            failed.add(one.run.name)
            report["runs"][one.run.name] = {"failed": repr(error), "log": one.log}
            print(f"{one.run.name}: failed: {error!r}\n{one.log}", flush=True)
        note_card(one, done.get(one.run.name), options.cards)
        for case in [case for case in open_cases if set(case.runs) <= set(done)]:
            open_cases.remove(case)
            judged(report, case.name, lambda case=case: case.judge(done), case.say)
        write(report, options)

    try:
        for number, name in enumerate(wanted):
            run = RUNS[name]
            if time.monotonic() + run.seconds * options.steps / 8 + 6 > until:
                print(f"{name}: not run, {until - time.monotonic():.0f} s are left", flush=True)
                continue
            now = ready if ready is not None and ready.run is run else Started(run, folder, options)
            now.go()
            ready = None
            if options.ahead and number + 1 < len(wanted):
                ready = Started(RUNS[wanted[number + 1]], folder, options)
            settle(before)
            before = now
            stepped = now.stepped(min(time.monotonic() + run.seconds + LAST_S, until))
            print(f"  {name}: {time.monotonic() - now.began:.1f} s", flush=True)
            if not stepped or not options.ahead:
                settle(now)
                before = None
        settle(before)
        before = None
    finally:
        for one in (before, ready):
            if one is not None:
                one.process.terminate()
                one.close(5)
    for case in open_cases:
        gone = [name for name in case.runs if name not in done]
        print(f"{case.name}: not judged, without {', '.join(gone)}", flush=True)


def judged(
    report: dict[str, Any],
    name: str,
    judge: Callable[[], dict[str, Any]],
    say: Callable[[dict[str, Any]], str],
) -> None:
    """A case that fails says so and stops no other."""
    try:
        row = judge()
        word = "not judged" if not row["judged"] else "right" if row["right"] else "WRONG"
        print(f"{word:10} {name}: {say(row)}", flush=True)
    except Exception as error:
        row = {"judged": True, "right": False, "failed": traceback.format_exc()[-1500:]}
        print(f"FAILED     {name}: {error!r}", flush=True)
    report["cases"][name] = row


def note_card(one: Started, done: Done | None, path: Path | None) -> None:
    if path is None or done is None or "card_text" not in done.report:
        return
    with path.open("a") as file:
        file.write(f"===== {one.run.name} =====\n{done.report['card_text']}\n")


def write(report: dict[str, Any], options: argparse.Namespace) -> None:
    """After each part: what is cut short has said what it saw."""
    rows = [row for row in report["cases"].values() if row.get("judged")]
    counted = {**report, "right": sum(bool(row["right"]) for row in rows), "of": len(rows)}
    keep(options.out, json.loads(json.dumps(counted, default=plain)))


def plain(value: Any) -> Any:
    """What numpy calls its own."""
    return value.item() if hasattr(value, "item") else str(value)


if __name__ == "__main__":
    main()
