"""The program's own code, endings and the cards' ledger, of recordings made here."""

from __future__ import annotations

import math
from collections.abc import Iterable
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
    HostRecord,
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
    return Recording(title="train.py", ranks=(rank,), **{"hosts": (), **whole})


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


def read_host(**readings: float) -> HostRecord:
    """Of two cores, read ten times a second while the hundred steps go on."""
    t = np.arange(0.1, STEPS * STEP_S, 0.1)
    columns = {"core.0": 100.0, "core.1": 20.0, "trainer_cores": 1.0, "trainer_delay": 0.0, **readings}
    samples = Samples(t=t, columns={name: np.full(len(t), value) for name, value in columns.items()})
    return HostRecord(node="a", cpus=2, quota_cores=math.inf, samples=samples)


def loading(run: Recording, *, late: Iterable[int], wait_s: float) -> Recording:
    """The same with waits for batches: those of these steps are long."""
    (rank,) = run.ranks
    starts = rank.steps.start + 0.01
    ends = starts + np.where(np.isin(np.arange(STEPS), list(late)), wait_s, 0.0001)
    spans = Spans(
        kind=np.concatenate([rank.spans.kind, np.full(STEPS, KINDS.index("data"), np.uint8)]),
        start=np.concatenate([rank.spans.start, starts]),
        end=np.concatenate([rank.spans.end, ends]),
        step=np.concatenate([rank.spans.step, rank.spans.step]),
        bytes=np.zeros(2 * STEPS, np.int64),
    )
    return replace(run, ranks=(replace(rank, spans=spans),))


def test_workers_started_anew_at_every_epoch_are_named_and_kept_and_none_are_taken_away() -> None:
    firsts = range(1, STEPS, 10)
    events = tuple(Event(t=i * STEP_S + 0.01, what="workers started", text="") for i in firsts)
    run = recording(
        events=events,
        facts={"loader": {"num_workers": 16}},
        hosts=(read_host(workers=16.0, workers_cpu=0.5),),
    )
    found = first(loading(run, late=firsts, wait_s=0.089))
    assert (found.kind, found.cause) == ("data_starvation", "startup")
    assert "persistent_workers=True" in found.remedy[0]
    assert not any("num_workers=" in one for one in found.remedy)


def test_a_full_shm_is_no_finding_of_a_job_whose_loader_has_no_workers() -> None:
    full = read_host(shm_used=95e9, shm_total=100e9, workers=0.0)
    run = recording(hosts=(full,), facts={"loader": {"num_workers": 0}})
    assert first(run).kind == "healthy"
    busy = recording(hosts=(read_host(shm_used=95e9, shm_total=100e9, workers=2.0),))
    assert first(busy).kind == "shm_pressure"


def test_a_disk_that_others_read_is_not_what_a_job_waits_for() -> None:
    """With idle cores and a loop that sleeps in its own dataset: it was called small reads."""
    others = {"disk_read": 5e6, "disk_reads": 800.0, "core.0": 10.0, "core.1": 10.0, "trainer_cpu": 0.05}
    told = {}
    for name, own in (("own", 5e6), ("others'", 0.0)):
        host = read_host(**others, trainer_disk=own, workers=0.0, workers_cpu=0.0, workers_disk=0.0)
        told[name] = first(loading(recording(computing=0.3, hosts=(host,)), late=range(STEPS), wait_s=0.06))
    assert {name: (one.kind, one.cause) for name, one in told.items()} == {
        "own": ("data_starvation", "small_reads"),
        "others'": ("data_starvation", "lock"),
    }
    assert "num_workers=0" in told["others'"].summary
    assert "DataLoader(num_workers=" in told["others'"].remedy[0]


@pytest.mark.parametrize(
    ("workers", "wait_s", "steps", "kind"),
    [
        (0, 0.008, STEPS, "healthy"),  # collating in the loop itself is a part of the step
        (1, 0.008, STEPS, "data_starvation"),
        (0, 0.02, STEPS, "data_starvation"),
        (1, 0.08, 2, "healthy"),  # 160 ms in all
    ],
)
def test_waits_that_are_a_part_of_a_step_or_a_moment_are_no_starvation(
    workers: int, wait_s: float, steps: int, kind: str
) -> None:
    host = read_host(workers=float(workers), workers_cpu=float(workers), trainer_cpu=1.0, workers_running=1.0)
    run = recording(hosts=(host,), facts={"loader": {"num_workers": workers}})
    assert first(loading(run, late=range(steps), wait_s=wait_s)).kind == kind


def test_a_loop_that_gets_no_core_because_of_others_is_not_told_that_its_workers_sleep() -> None:
    """As recorded on two cores with eighteen processes that wanted them."""
    crowd = {
        "core.0": 100.0,
        "core.1": 100.0,
        "trainer_cores": 0.2,
        "trainer_cpu": 0.2,
        "trainer_delay": 0.62,
    }
    host = read_host(**crowd, workers=1.0, workers_running=0.08, workers_cpu=0.1, workers_delay=0.05)
    run = recording(hosts=(host,), facts={"loader": {"num_workers": 1}})
    assert first(loading(run, late=range(0, STEPS, 2), wait_s=0.08)).cause == "contention"


def test_a_thread_that_holds_the_interpreter_is_named_also_without_a_free_core() -> None:
    """As recorded with `taskset -c 0`: the loop wants the core as well as the interpreter."""
    line = "/home/me/train.py:109 count (thread monitor)"
    stacks = Stacks(seconds=10.0, looks=88, late=34, threads={line: 33})
    crowded = read_host(**{"core.0": 100.0, "core.1": 100.0, "trainer_cpu": 0.25, "trainer_delay": 0.42})
    looked = replace(stacks, seen=(seen("compute", "/home/me/train.py:61 main", inside="forward"),))
    found = first(recording(stacks=looked, hosts=(crowded,)))
    assert (found.kind, found.cause) == ("host_code", "gil")
    assert line in found.summary


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
