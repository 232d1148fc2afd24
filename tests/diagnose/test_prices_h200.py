"""Programs whose cause was taken away on an H200, and what was read of them: prices beside real gains."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from stoker.diagnose.activity import Worked
from stoker.diagnose.card import Card
from stoker.diagnose.features import Features, Loop, Paced
from stoker.diagnose.ledger import Ledger
from stoker.diagnose.ranks import Together
from stoker.diagnose.timeline import STATES
from stoker.diagnose.working import host_sync, launch_bound
from stoker.findings import Finding
from stoker.gpus import peaks_of
from stoker.recording import Stacks

RUNS = json.loads((Path(__file__).parent / "h200.json").read_text("utf-8"))["runs"]
PAIRS = [
    ("own_loop", "own_loop mended"),
    ("data", "data mended"),
    ("host_sync", "host_sync mended"),
    ("checkpoint", "checkpoint mended"),
    ("copies", "copies mended"),
]


def by_state(told: dict[str, float]) -> dict[str, float]:
    return {name: told.get(name, 0.0) for name in STATES}


def ledger_of(told: dict[str, float]) -> Ledger:
    return Ledger(busy=told["busy"], idle=by_state(told), exact=True)


def looked(told: dict[str, float] | None) -> Worked | None:
    """Its numbers that a price asks for."""
    if told is None:
        return None
    return Worked(
        window_s=told["window_s"], kernel_s=0.0, idle_s=0.0, compute_s=told["compute_s"], other_s=0.0,
        kernels=(), kernel_count=int(told["kernel_count"]), moved=(), tensor=math.nan, plain=0.0,
        launch_runs=0, gap_s=told["gap_s"], launch_idle_s=0.0,
    )  # fmt: skip


def read(name: str) -> Features:
    run = RUNS[name]
    known = {one.name: run["card"].get(one.name, math.nan) for one in fields(Card)}
    more: dict[str, Any] = {"name": "NVIDIA H200", "peaks": peaks_of("NVIDIA H200"), "slowed": {}}
    share = by_state(run["share"])
    return Features(
        judged_s=5.0,
        began_s=0.0,
        cards=1,
        ended="exit 0",
        loop=Loop(steps=60, share=share, unseen=frozenset(), unattributed=share["unattributed"]),
        card=Card(**{**known, **more}),
        host=None,
        ranks=Together(ranks=1),
        stacks=Stacks(seconds=5.0, looks=60),
        ledger=ledger_of(run["ledger"]),
        paced=Paced(
            whole=run["paced"]["whole"],
            share=by_state(run["paced"]["share"]),
            ledger=ledger_of(run["paced"]["ledger"]),
        ),
        worked=looked(run.get("looked")),
    )


def busy_ms(name: str) -> float:
    return float(RUNS[name]["step_ms"] * RUNS[name]["paced"]["ledger"]["busy"])


@pytest.mark.parametrize(("fault", "mended"), PAIRS, ids=[fault for fault, _ in PAIRS])
def test_what_the_counter_calls_busy_in_a_step_is_there_also_when_the_cause_is_gone(
    fault: str, mended: str
) -> None:
    """None of these causes is the card's: its work of a step stays. (host_sync's mended program divides by
    numbers that lie on the card, which takes it 4 ms more.)"""
    assert busy_ms(fault) == pytest.approx(busy_ms(mended), rel=0.07)


@pytest.mark.parametrize("name", ["launches", "launches unread", "launches looked"])
def test_what_it_calls_busy_of_small_kernels_is_what_a_graph_of_them_takes(name: str) -> None:
    graphed = RUNS["launches graphed"]["step_ms"]
    assert busy_ms(name) == pytest.approx(graphed, rel=0.03)
    assert (
        RUNS[name]["step_ms"] * RUNS[name]["card"]["sm"] / 100 < 0.75 * graphed
    )  # SM activity is no such measure


def test_it_counts_the_moment_between_two_kernels_with_them() -> None:
    """Kernels by a profiler, and from each to the next: together what the counter says."""
    seen, steps = RUNS["launches looked"]["looked"], 3
    kernels_ms = 1e3 * (seen["compute_s"] + seen["kernel_count"] * seen["gap_s"]) / steps
    assert kernels_ms == pytest.approx(busy_ms("launches looked"), rel=0.03)


@pytest.mark.parametrize("name", ["launches", "launches unread", "launches looked"])
def test_launches_cost_at_most_what_a_graph_gains(name: str) -> None:
    found = launch_bound(read(name))
    assert isinstance(found, Finding)
    assert found.at_most
    gain = RUNS[name]["step_ms"] / RUNS["launches graphed"]["step_ms"]
    assert found.speedup_if_gone == pytest.approx(gain, rel=0.05)


def test_waits_for_the_card_are_priced_where_it_is_counted_how_little_it_idles() -> None:
    found = host_sync(read("host_sync"))
    assert isinstance(found, Finding)
    gain = RUNS["host_sync"]["step_ms"] / RUNS["host_sync mended"]["step_ms"]
    assert found.speedup_if_gone == pytest.approx(gain, rel=0.1)


@pytest.mark.parametrize("name", [name for name in RUNS if name.endswith("mended")])
def test_a_program_without_the_cause_has_no_price(name: str) -> None:
    told = read(name)
    assert not isinstance(host_sync(told), Finding)
    assert not isinstance(launch_bound(told), Finding)
