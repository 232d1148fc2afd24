"""The recordings of tests/recordings/runs, whole and spoiled in the ways of real life."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

Lines = list[dict[str, Any]]

FOLDER = Path(__file__).parents[1] / "recordings" / "runs"
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
    return _every(10, lines)


def every_second_sample(lines: Lines) -> Lines:
    return _every(2, lines)


def _every(nth: int, lines: Lines) -> Lines:
    """As a slower sampler had recorded it: bytes are those since the last line kept."""
    kept: Lines = []
    seen, sums = {"gpu": 0, "host": 0}, {"disk_read": 0, "disk_write": 0}
    for line in lines:
        if line["kind"] == "host":
            sums = {name: total + line[name] for name, total in sums.items()}
        if line["kind"] in seen:
            seen[line["kind"]] += 1
            if seen[line["kind"]] % nth:
                continue
        if line["kind"] == "host":
            line, sums = {**line, **sums}, dict.fromkeys(sums, 0)
        kept.append(line)
    return kept


def first_half(lines: Lines) -> Lines:
    return [line for line in lines if line.get("t", 0.0) <= lines[-1]["t"] / 2]


def second_half(lines: Lines) -> Lines:
    return [line for line in lines if line.get("t", 1e9) > lines[-1]["t"] / 2]


def with_noise(lines: Lines) -> Lines:
    """Five percent on whatever was measured."""
    draw = random.Random(2)
    exact = {"t", "step", "tokens", "flops", "event_reasons", "shm_total", "util"}

    def shaken(line: dict[str, Any]) -> dict[str, Any]:
        return {k: v * draw.gauss(1, 0.05) if _measured(v) and k not in exact else v for k, v in line.items()}

    return [lines[0], *map(shaken, lines[1:])]


def steps_twice_as_long(lines: Lines) -> Lines:
    """Everything takes twice the time and moves twice the bytes: rates stay."""
    grown = {"t", "data_wait", "h2d", "compute", "other", "total", "tokens", "flops"}
    grown |= {"disk_read", "disk_write"}
    found = [{k: 2 * v if k in grown and v else v for k, v in one.items()} for one in lines[1:]]
    return [lines[0], *found]


def hours_later(lines: Lines) -> Lines:
    return [{k: v + 12345.678 if k == "t" else v for k, v in one.items()} for one in lines]


def without_optional_columns(lines: Lines) -> Lines:
    keep = {
        "kind",
        "t",
        "util",
        "power_w",
        "sm_util",
        "fb_used",
        "event_reasons",
        "cpu",
        "iowait",
        "disk_read",
    }
    keep |= {"step", "data_wait", "h2d", "compute", "total", "flops", "disk_write"}
    return [lines[0], *({k: v for k, v in one.items() if k in keep} for one in lines[1:])]


def with_eight_workers(lines: Lines) -> Lines:
    return [{**lines[0], "num_workers": 8}, *lines[1:]]


def on_an_h100(lines: Lines) -> Lines:
    header = {**lines[0], "gpu": "NVIDIA H100 80GB HBM3", "mem_total": 85520809984}
    part = header["mem_total"] / lines[0]["mem_total"]
    return [header, *({k: v * part if k == "fb_used" else v for k, v in one.items()} for one in lines[1:])]


def on_an_h100_of_350_watts(lines: Lines) -> Lines:
    header = {**lines[0], "gpu": "NVIDIA H100 PCIe", "power_limit_w": 350.0}
    slower = {"power_w": 1 / 2, "sm_mhz": 1755 / 1980}
    return [
        header,
        *({k: v * slower.get(k, 1) if k in slower else v for k, v in one.items()} for one in lines[1:]),
    ]


def on_sixty_four_cores(lines: Lines) -> Lines:
    found = [{**one, "cpu": one["cpu"] + [0.0] * 48} if one["kind"] == "host" else one for one in lines]
    return [{**found[0], "cpus": 64}, *found[1:]]


def _measured(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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
    every_second_sample,
    with_noise,
    steps_twice_as_long,
    hours_later,
    without_optional_columns,
    with_eight_workers,
    on_an_h100,
    on_an_h100_of_350_watts,
    on_sixty_four_cores,
)
