"""The recordings of ../shared/traces, whole and spoiled in the ways of real life."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

Lines = list[dict[str, Any]]

FOLDER = Path(__file__).parents[2].parent / "shared" / "traces"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jsonl"))
_COUNTERS = (
    "graphics_util",
    "sm_util",
    "sm_occupancy",
    "integer_util",
    "any_tensor_util",
    "dram_bw_util",
    "fp32_util",
    "fp16_util",
    "pcie_tx_mib",
    "pcie_rx_mib",
)


def read_lines(name: str) -> Lines:
    return [json.loads(row) for row in (FOLDER / f"{name}.jsonl").read_text("utf-8").splitlines()]


def write_lines(path: Path, lines: Lines) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def without_gpm(lines: Lines) -> Lines:
    return _fields(lines, "gpu", lambda name: name not in _COUNTERS)


def utilisation_and_power_only(lines: Lines) -> Lines:
    return _fields(lines, "gpu", lambda name: name in ("kind", "t", "util", "power_w"))


def without_gpu(lines: Lines) -> Lines:
    return [line for line in lines if line["kind"] != "gpu"]


def without_host(lines: Lines) -> Lines:
    return [line for line in lines if line["kind"] != "host"]


def without_steps(lines: Lines) -> Lines:
    return [line for line in lines if line["kind"] != "step"]


def step_lengths_only(lines: Lines) -> Lines:
    return _fields(lines, "step", lambda name: name in ("kind", "t", "step", "total"))


def step_ends_only(lines: Lines) -> Lines:
    return _fields(lines, "step", lambda name: name in ("kind", "t", "step"))


def steps_alone(lines: Lines) -> Lines:
    return without_gpu(without_host(lines))


def without_header(lines: Lines) -> Lines:
    return lines[1:]


def without_facts(lines: Lines) -> Lines:
    return _fields(lines, "header", lambda name: name in ("kind", "format", "gpu"))


def with_nulls(lines: Lines) -> Lines:
    draw = random.Random(1)
    keep = {"kind", "t", "step", "total", "format"}

    def holes(line: dict[str, Any]) -> dict[str, Any]:
        return {k: None if k not in keep and draw.random() < 0.15 else v for k, v in line.items()}

    return [holes(line) for line in lines]


def once_a_second(lines: Lines) -> Lines:
    kept: Lines = []
    sums = {"disk_read": 0, "disk_write": 0}
    for number, line in enumerate(lines):
        if line["kind"] == "host":
            sums = {name: total + line[name] for name, total in sums.items()}
        if line["kind"] in ("gpu", "host"):
            nth = sum(one["kind"] == line["kind"] for one in lines[:number])
            if nth % 10 != 9:
                continue
        if line["kind"] == "host":
            line, sums = {**line, **sums}, dict.fromkeys(sums, 0)
        kept.append(line)
    return kept


def first_half(lines: Lines) -> Lines:
    return [line for line in lines if line.get("t", 0.0) <= lines[-1]["t"] / 2]


def second_half(lines: Lines) -> Lines:
    return [line for line in lines if line.get("t", 1e9) > lines[-1]["t"] / 2]


def on_an_a100(lines: Lines) -> Lines:
    header = {**lines[0], "gpu": "NVIDIA A100-SXM4-80GB", "power_limit_w": 400.0}
    slower = {"power_w": 4 / 7, "sm_mhz": 1410 / 1980}
    scaled = [{k: v * slower[k] if k in slower else v for k, v in one.items()} for one in lines[1:]]
    return [header, *scaled]


def on_eight_cores(lines: Lines) -> Lines:
    found = [{**one, "cpu": sorted(one["cpu"])[8:]} if one["kind"] == "host" else one for one in lines]
    return [{**found[0], "cpus": 8}, *found[1:]]


def _fields(lines: Lines, kind: str, keep: Callable[[str], bool]) -> Lines:
    return [{k: v for k, v in one.items() if one["kind"] != kind or keep(k)} for one in lines]


SPOILED: tuple[Callable[[Lines], Lines], ...] = (
    without_gpm,
    utilisation_and_power_only,
    without_gpu,
    without_host,
    without_steps,
    step_lengths_only,
    step_ends_only,
    steps_alone,
    without_header,
    without_facts,
    with_nulls,
    once_a_second,
    first_half,
    second_half,
    on_an_a100,
    on_eight_cores,
)
