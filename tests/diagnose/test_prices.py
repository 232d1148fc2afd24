"""A price is what steps gain when a cause alone is gone: on simulated cards, and as an H200 was recorded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from degraded import FOLDER
from queued import Do, ran, recorded

from stoker.diagnose.features import features
from stoker.diagnose.rules import diagnose
from stoker.findings import Finding
from stoker.recording import Activity
from stoker.watch.runs.flat import read_flat

FETCH = "/home/me/train.py:9 batch"
LOG = "/home/me/train.py:40 logging"


def model(*, host_s: float, card_s: float) -> list[Do]:
    """Forward, backward and optimizer: a third of the work, and two."""
    return [
        Do(what="forward", host_s=host_s / 3, card_s=card_s / 3, pieces=20),
        Do(what="backward", host_s=host_s / 2, card_s=card_s / 2, pieces=20),
        Do(what="optimizer", host_s=host_s / 6, card_s=card_s / 6, pieces=4),
    ]


def data(wait_s: float) -> Do:
    return Do(what="data", host_s=wait_s)


def fetching(host_s: float) -> Do:
    return Do(what="", host_s=host_s, line=FETCH)


def priced(step: list[Do], kind: str, *, counted: bool = True) -> Finding | None:
    found = diagnose(recorded(ran(step), counted=counted)).findings
    return next((one for one in found if one.kind == kind), None)


# What is taken away stands first. None of these waits for the card in its loop unless it says so.
HEAVY, EVEN, LIGHT = (
    {"host_s": 0.008, "card_s": 0.025},
    {"host_s": 0.02, "card_s": 0.021},
    {"host_s": 0.025, "card_s": 0.008},
)


@pytest.mark.parametrize("load", [HEAVY, EVEN, LIGHT], ids=["heavy", "even", "light"])
@pytest.mark.parametrize("wait_s", [0.02, 0.05, 0.1])
@pytest.mark.parametrize("waits", [True, False], ids=["synchronous", "queued"])
def test_waiting_for_batches_costs_what_the_card_idles_meanwhile(
    load: dict[str, float], wait_s: float, waits: bool
) -> None:
    rest = [*model(**load), *([Do(what="sync", waits=True)] if waits else [])]
    step = [data(wait_s), *rest]
    gain = ran(step).step_s / ran(rest).step_s
    found = priced(step, "data_starvation")
    if found is None:
        assert gain < 1.1, "what costs a tenth is said"
    else:
        assert found.speedup_if_gone == pytest.approx(gain, rel=0.05)


@pytest.mark.parametrize("load", [HEAVY, EVEN, LIGHT], ids=["heavy", "even", "light"])
@pytest.mark.parametrize("host_s", [0.03, 0.06])
def test_a_batch_made_while_the_card_computes_costs_what_it_then_idles(
    load: dict[str, float], host_s: float
) -> None:
    """As nanoGPT does: the next batch is cut between forward and backward."""
    forward, *rest = model(**load)
    step = [forward, fetching(host_s), *rest]
    gain = ran(step).step_s / ran([forward, *rest]).step_s
    found = priced(step, "data_starvation")
    assert found is not None
    assert found.cause == "own_loop"
    assert found.speedup_if_gone == pytest.approx(gain, rel=0.05)


@pytest.mark.parametrize("kind", ["checkpoint", "evaluation"])
def test_saving_and_evaluating_cost_their_time_also_where_the_card_computes_in_them(kind: str) -> None:
    """An evaluation takes its own work along when it goes; a save only waits."""
    card_s = 0.035 if kind == "evaluation" else 0.0
    rest = [*model(**HEAVY), Do(what="sync", waits=True)]
    step = [Do(what=kind, host_s=0.04, card_s=card_s, waits=True), *rest]
    gain = ran(step).step_s / ran(rest).step_s
    found = priced(step, {"checkpoint": "checkpoint_stall"}.get(kind, kind))
    assert found is not None
    assert found.speedup_if_gone == pytest.approx(gain, rel=0.05)


def blocks(*, host_s: float, card_s: float, reads: bool, count: int = 24) -> list[Do]:
    """A forward of so many blocks, each of which reads a number back or does not; and a backward."""
    block = [Do(what="forward", host_s=host_s / count / 2, card_s=card_s / count / 2, pieces=4)]
    if reads:
        block.append(Do(what="sync", host_s=1e-5, waits=True))
    return [*block * count, Do(what="backward", host_s=host_s / 2, card_s=card_s / 2, pieces=40)]


@pytest.mark.parametrize(("host_s", "card_s"), [(0.03, 0.03), (0.03, 0.02), (0.02, 0.03), (0.03, 0.06)])
def test_waits_for_the_card_cost_what_host_and_card_could_have_done_side_by_side(
    host_s: float, card_s: float
) -> None:
    step, mended = (blocks(host_s=host_s, card_s=card_s, reads=reads) for reads in (True, False))
    gain = ran(step).step_s / ran(mended).step_s
    found = priced(step, "host_sync")
    if found is None:
        assert gain < 1.15
    else:
        assert found.speedup_if_gone == pytest.approx(gain, rel=0.08)


def test_a_wait_in_every_step_of_a_host_that_cannot_launch_faster_has_no_price() -> None:
    """As an H200 showed it of a small GPT-2: 26.1 ms with the wait, 26.0 without, the card busy for 15.9."""
    rest = model(host_s=0.026, card_s=0.0159)
    step = [*rest, Do(what="sync", waits=True)]
    assert ran(step).step_s / ran(rest).step_s < 1.05
    assert priced(step, "host_sync") is None
    found = priced(step, "launch_bound")
    assert found is not None
    assert found.at_most
    assert found.speedup_if_gone == pytest.approx(26.0 / 15.9, rel=0.05)


def launched(*, glue_s: float, card_s: float, reads: bool, graphed: bool) -> list[Do]:
    """Layers with Python between them; or one graph of them all. Then a number is read back, or is not."""
    layers = [
        Do(what="forward", host_s=0.002, card_s=card_s / 12, pieces=10),
        Do(what="", host_s=glue_s / 12, line="/home/me/train.py:20 other"),
    ] * 12
    graph = [Do(what="forward", host_s=0.0002, card_s=card_s)]
    return [*(graph if graphed else layers), *([Do(what="sync", waits=True)] if reads else [])]


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("glue_s", [0.0, 0.001, 0.003])
@pytest.mark.parametrize("card_s", [0.004, 0.008, 0.016])
def test_launches_cost_what_a_graph_of_them_gains_with_the_python_between_them(
    card_s: float, glue_s: float, reads: bool
) -> None:
    step, mended = (
        launched(glue_s=glue_s, card_s=card_s, reads=reads, graphed=graphed) for graphed in (False, True)
    )
    found = priced(step, "launch_bound")
    assert found is not None
    assert found.at_most
    assert found.speedup_if_gone == pytest.approx(ran(step).step_s / ran(mended).step_s, rel=0.06)


@pytest.mark.parametrize("own_s", [0.01, 0.03, 0.06])
def test_own_code_that_a_graph_cannot_take_along_bounds_the_price_of_launches(own_s: float) -> None:
    own = Do(what="", host_s=own_s, line=LOG)
    step, mended = (
        [own, *launched(glue_s=0.0, card_s=0.006, reads=False, graphed=graphed)] for graphed in (False, True)
    )
    found = priced(step, "launch_bound")
    gain = ran(step).step_s / ran(mended).step_s
    assert found is not None or gain < 1.4
    assert found is None or found.speedup_if_gone == pytest.approx(gain, rel=0.06)


@pytest.mark.parametrize(("card_s", "copies_s"), [(0.03, 0.03), (0.03, 0.012), (0.01, 0.03)])
def test_a_copy_out_of_plain_memory_is_not_charged_with_what_it_waits_for(
    card_s: float, copies_s: float
) -> None:
    rest = model(host_s=0.008, card_s=card_s)
    step = [Do(what="h2d", copies_s=copies_s), *rest]
    gain = ran(step).step_s / ran(rest).step_s
    found = priced(step, "h2d_copy")
    assert found is not None
    assert found.speedup_if_gone == pytest.approx(gain, rel=0.05)


def test_a_logger_costs_what_the_card_idles_and_metrics_of_the_card_at_most_their_time() -> None:
    rest = [*model(**HEAVY), Do(what="sync", waits=True)]
    step = [Do(what="", host_s=0.03, line=LOG), *rest]
    found = priced(step, "host_code")
    assert found is not None
    assert not found.at_most
    assert found.speedup_if_gone == pytest.approx(ran(step).step_s / ran(rest).step_s, rel=0.05)
    norms = Do(what="", host_s=0.03, card_s=0.028, pieces=50, line="/home/me/train.py:50 metrics")
    found = priced([norms, *rest], "host_code")
    assert found is not None
    assert found.at_most
    assert found.speedup_if_gone >= ran([norms, *rest]).step_s / ran(rest).step_s * 0.95


def test_the_time_of_a_deep_look_is_in_no_price() -> None:
    """In its window steps take longer, and its end is the work of the profiler: the card idles."""
    usual = model(**LIGHT)
    run = ran(usual)
    began = run.ends[59]
    held = run.held(began, 1.0)
    recording = recorded(held)
    nothing = np.zeros(0)
    look = Activity(
        start_s=began, end_s=held.ends[60], names=(), name=nothing.astype(np.int32),
        kind=nothing.astype(np.uint8), start=nothing, end=nothing, launched=nothing,
        bytes=nothing.astype(np.int64),
    )  # fmt: skip
    looked = replace(recording, ranks=(replace(recording.ranks[0], looks=(look,)),))
    plain, found = (features(one).paced for one in (recorded(ran(usual)), looked))
    assert plain is not None
    assert plain.ledger is not None
    assert found is not None
    assert found.ledger is not None
    assert found.share == pytest.approx(plain.share, abs=0.02)
    assert found.ledger.busy == pytest.approx(plain.ledger.busy, abs=0.03)


# --- as recorded ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["starved_steady", "starved_cpu", "starved_burst"])
@pytest.mark.parametrize("without", [(), ("graphics_util",)], ids=["counted", "by utilisation"])
def test_a_recorded_wait_costs_what_its_steps_would_take_without_it(
    name: str, without: tuple[str, ...]
) -> None:
    run = read_flat(FOLDER / f"{name}.jsonl")
    (card,) = run.gpus
    columns = {name: column for name, column in card.samples.columns.items() if name not in without}
    card = replace(card, samples=replace(card.samples, columns=columns))
    found = diagnose(replace(run, gpus=(card,))).findings[0]
    waits = run.ranks[0].spans.kind == 1
    took = float(np.sum((run.ranks[0].spans.end - run.ranks[0].spans.start)[waits]))
    whole = float(run.ranks[0].steps.end[-1] - run.ranks[0].steps.start[0])
    assert found.speedup_if_gone == pytest.approx(whole / (whole - took), rel=0.1 if without else 0.05)


@pytest.mark.parametrize(
    "name", ["starved_steady", "starved_cpu", "starved_burst", "h2d_pinned", "h2d_pageable"]
)
def test_the_ledger_of_a_recorded_card_is_what_its_steps_say(name: str) -> None:
    """Each of these loops waits for the card in every step: when it neither waits for data nor copies, the
    card works."""
    found = features(read_flat(FOLDER / f"{name}.jsonl")).paced
    assert found is not None
    assert found.ledger is not None
    for state in ("data", "copy"):
        assert found.ledger.idle[state] == pytest.approx(found.share[state], abs=0.015)
    assert found.ledger.busy == pytest.approx(found.share["compute"] + found.share["sync"], abs=0.02)
