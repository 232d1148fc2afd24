"""The program's own code, endings and the cards' ledger, of recordings made here."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from stoker.diagnose.features import features
from stoker.diagnose.ledger import ledger
from stoker.diagnose.rules import diagnose
from stoker.diagnose.timeline import timeline
from stoker.recording import (
    KINDS,
    Event,
    GpuRecord,
    RankRecord,
    Recording,
    Samples,
    Seen,
    Spans,
    Stacks,
    Steps,
)  # fmt: skip

if TYPE_CHECKING:
    from stoker.findings import Finding

STEP_S, STEPS = 0.1, 100
NOBODY_LOOKED = Stacks()


def recording(
    *, computing: float = 1.0, stacks: Stacks = NOBODY_LOOKED, events: tuple[Event, ...] = (), **more: Any
) -> Recording:
    """A hundred steps of a tenth of a second; each computes for a part of it and is in no span then."""
    start = np.arange(STEPS) * STEP_S
    end = start + STEP_S
    spans = Spans(
        kind=np.full(STEPS, KINDS.index("compute"), np.uint8),
        start=start,
        end=start + computing * STEP_S,
        step=np.arange(STEPS),
        bytes=np.zeros(STEPS, np.int64),
    )
    unknown = np.full(STEPS, np.nan)
    steps = Steps(number=np.arange(STEPS), start=start, end=end, tokens=unknown, flops=unknown)
    nothing = Samples(t=np.zeros(0), columns={})
    rank = RankRecord(
        rank=0, node="a", gpu=0, spans=spans, steps=steps, memory=nothing, events=events, stacks=stacks
    )
    whole: dict[str, Any] = {"wall_s": STEPS * STEP_S, "ended": "exit 0", "gpus": (), "facts": {}, **more}
    return Recording(title="train.py", ranks=(rank,), hosts=(), **whole)


def seen(what: str, line: str, *, inside: str = "", share: float = 1.0) -> Seen:
    return Seen(inside=inside, what=what, line=line, seconds=10 * share, looks=round(40 * share))


def first(run: Recording) -> Finding:
    return diagnose(run).findings[0]


@pytest.mark.parametrize("ended", ["exit 0", "killed by SIGTERM", "running"])
@pytest.mark.parametrize(
    ("what", "kind", "cause"),
    [
        ("batch", "data_starvation", "own_loop"),
        ("logging", "host_code", "logging"),
        ("io", "host_code", "io"),
        ("lock", "host_code", "other"),
    ],
)
def test_time_outside_every_span_has_an_owner_with_a_line_whatever_the_ending(
    what: str, kind: str, cause: str, ended: str
) -> None:
    stacks = Stacks(seconds=10.0, looks=40, seen=(seen(what, "/home/me/train.py:12 work", share=0.5),))
    found = first(recording(computing=0.5, stacks=stacks, ended=ended))
    assert (found.kind, found.cause) == (kind, cause)
    assert "/home/me/train.py:12 work" in found.summary
    assert found.speedup_if_gone == pytest.approx(2.0, rel=0.05)


def test_the_models_own_arithmetic_outside_spans_is_no_fault() -> None:
    stacks = Stacks(seconds=10.0, looks=40, seen=(seen("compute", "/home/me/train.py:12 loss"),))
    assert first(recording(computing=0.6, stacks=stacks)).kind == "healthy"


def test_an_optimizer_of_ones_own_is_named_also_inside_its_span() -> None:
    stacks = Stacks(
        seconds=10.0,
        looks=40,
        seen=(seen("optimizer", "/home/me/lion.py:9 step", inside="optimizer", share=0.5),),
    )
    found = first(recording(stacks=stacks))
    assert (found.kind, found.cause) == ("host_code", "optimizer")


def test_a_crash_comes_first_and_a_preemption_after_what_slows_the_job() -> None:
    stacks = Stacks(seconds=10.0, looks=40, seen=(seen("logging", "/home/me/train.py:12 log", share=0.5),))
    ending = {
        "kind": "crashed",
        "cause": "signal",
        "text": "rank 3 killed by SIGKILL",
        "rank": 3,
        "at": 9.0,
        "chain": ["OSError: disk"],
    }
    found = diagnose(
        recording(computing=0.5, stacks=stacks, ended="exit 1", facts={"ending": ending})
    ).findings
    assert [one.kind for one in found] == ["crashed", "host_code"]
    assert "rank 3 killed by SIGKILL" in found[0].summary
    assert any("OSError: disk" in one for one in found[0].evidence)
    told = {"kind": "preempted", "cause": "signal", "text": "SIGTERM came from outside"}
    found = diagnose(recording(computing=0.5, stacks=stacks, ended="exit 1", facts={"ending": told})).findings
    assert [one.kind for one in found] == ["host_code", "preempted"]


@pytest.mark.parametrize("what", ["leaving", "exception", "exit"])
def test_time_after_the_loop_was_left_is_no_hang(what: str) -> None:
    left = Event(t=10.2, what=what, text="ValueError is under way")
    run = recording(events=(left,), wall_s=40.0, ended="exit 1")
    assert "host_hang" not in {one.kind for one in diagnose(run).findings}
    assert timeline(run.ranks[0], wall_s=40.0, ended="exit 1").seconds()["stalled"] == 0
    assert diagnose(recording(wall_s=40.0, ended="running")).findings[0].kind == "host_hang"


def test_what_the_interpreter_takes_apart_when_the_program_is_over_is_not_judged() -> None:
    over = Event(t=10.0, what="leaving", text="the program is over")
    assert features(recording(wall_s=40.0, events=(over,))).judged_s == pytest.approx(10.0)
    assert features(recording(wall_s=40.0, events=(over,), ended="exit 1")).judged_s == pytest.approx(40.0)


def test_the_cards_ledger_sums_to_the_whole_and_says_what_the_host_did_meanwhile() -> None:
    t = np.arange(1.0, 11.0)
    card = GpuRecord(
        node="a", index=0, name="NVIDIA H200", power_limit_w=700.0, memory_bytes=1 << 37,
        samples=Samples(t=t, columns={"util": np.full(10, 40.0)}),
    )  # fmt: skip
    run = recording(computing=0.7, gpus=(card,))
    found = ledger(run, (timeline(run.ranks[0], wall_s=run.wall_s),))
    assert found is not None
    assert found.busy + sum(found.idle.values()) == pytest.approx(1.0)
    assert found.busy == pytest.approx(0.4, abs=0.01)
    assert found.idle["unattributed"] == pytest.approx(0.3, abs=0.02)
    assert found.launching == pytest.approx(0.3, abs=0.02)


def test_what_is_computed_in_an_evaluation_is_evaluation() -> None:
    run = recording()
    spans = run.ranks[0].spans
    around = Spans(
        kind=np.append(spans.kind, np.uint8(KINDS.index("evaluation"))),
        start=np.append(spans.start, 2.0),
        end=np.append(spans.end, 6.0),
        step=np.append(spans.step, -1),
        bytes=np.append(spans.bytes, 0),
    )
    seconds = timeline(replace(run.ranks[0], spans=around), wall_s=run.wall_s).seconds()
    assert seconds["evaluation"] == pytest.approx(4.0)
    assert seconds["compute"] == pytest.approx(6.0)
