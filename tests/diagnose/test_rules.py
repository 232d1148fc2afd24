"""What single rules say, and what they charge and advise."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from synthetic import FED, Run, Shows, copying, full_shm, healthy, record, red_herring, starved

from stoker.diagnose.features import features
from stoker.diagnose.rules import Verdict, diagnose, judge
from stoker.diagnose.thresholds import THRESHOLDS
from stoker.recording import KINDS, Event, HostRecord, RankRecord, Recording, Samples, Spans, Steps
from stoker.watch.runs.flat import read_flat

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COLLECTIVE = KINDS.index("collective")


@pytest.fixture
def verdict_on(tmp_path: Path) -> Callable[[Run], Verdict]:
    def on(run: Run, seed: int = 0) -> Verdict:
        return diagnose(read_flat(record(run, np.random.default_rng(seed), tmp_path / "run.jsonl")))

    return on


def loop_rank(rank: int, *, steps: int, step_s: float, events: tuple[Event, ...] = ()) -> RankRecord:
    """A rank of steps that only compute."""
    ends = step_s * np.arange(1, steps + 1)
    starts = ends - step_s
    none = np.full(steps, math.nan)
    return RankRecord(
        rank=rank,
        node="",
        gpu=None,
        spans=Spans(
            kind=np.full(steps, 6, np.uint8),
            start=starts,
            end=ends,
            step=np.arange(steps),
            bytes=np.zeros(steps, np.int64),
        ),
        steps=Steps(number=np.arange(1, steps + 1), start=starts, end=ends, tokens=none, flops=none),
        memory=Samples(t=np.zeros(0), columns={}),
        events=events,
    )


def exchanging(rank: int, *, share: float, steps: int = 60, step_s: float = 0.1) -> RankRecord:
    """A rank that spends a share of every step in collectives and computes in the rest."""
    one = loop_rank(rank, steps=steps, step_s=step_s)
    turn = one.steps.start + (1 - share) * step_s
    both = one.spans.kind, np.full(steps, COLLECTIVE, np.uint8)
    spans = replace(
        one.spans,
        kind=np.concatenate(both),
        start=np.concatenate([one.steps.start, turn]),
        end=np.concatenate([turn, one.steps.end]),
        step=np.tile(one.spans.step, 2),
        bytes=np.tile(one.spans.bytes, 2),
    )
    return replace(one, spans=spans)


def two_cores(*, wall_s: float, busy: float = 1.3, **readings: float) -> HostRecord:
    """A host read ten times a second, of which the ranks keep 1.3 cores busy unless told otherwise."""
    t = np.arange(0.1, wall_s, 0.1)
    columns = {
        "core.0": 50 * busy,
        "core.1": 50 * busy,
        "trainer_cores": 1.3,
        "trainer_delay": 0.01,
        **readings,
    }
    samples = Samples(t=t, columns={name: np.full(len(t), value) for name, value in columns.items()})
    return HostRecord(node="", cpus=2, quota_cores=math.inf, samples=samples)


def run_of(*ranks: RankRecord, wall_s: float, ended: str = "running", **facts: Any) -> Recording:
    return Recording(title="run", wall_s=wall_s, ended=ended, ranks=ranks, gpus=(), hosts=(), facts=facts)


def hung(*, t: float, text: str, in_collective: bool, seq: int) -> Event:
    facts = {"in_collective": in_collective, "collective_seq": seq, "inside": ""}
    return Event(t=t, what="hang", text=text, facts=facts)


def test_a_rank_that_never_joined_is_named_with_its_stack() -> None:
    waits = hung(t=14.0, text="collective: all_reduce", in_collective=True, seq=41)
    away = hung(t=14.0, text="train.py:7 sleep", in_collective=False, seq=40)
    run = run_of(
        loop_rank(0, steps=40, step_s=0.1, events=(waits,)),
        loop_rank(1, steps=40, step_s=0.1, events=(away,)),
        wall_s=20.0,
    )
    found = diagnose(run).findings
    assert [one.kind for one in found] == ["collective_hang"]
    assert "rank 1 never joined" in found[0].summary
    assert any("train.py:7" in text for text in found[0].evidence)
    assert found[0].summary.endswith("rank 1 never joined but stood in train.py:7 sleep")


def test_a_rank_that_skipped_a_collective_is_named_by_its_count() -> None:
    ranks = [
        loop_rank(n, steps=40, step_s=0.1, events=(hung(t=14.0, text="x", in_collective=True, seq=seq),))
        for n, seq in ((0, 41), (1, 40), (2, 41))
    ]
    found = diagnose(run_of(*ranks, wall_s=20.0)).findings
    assert "rank 1 never joined" in found[0].summary


def pausing(*, every: int, pause_s: float, frame: str) -> RankRecord:
    """A rank that does something else after every so many steps, and whose stack was seen meanwhile."""
    one = loop_rank(0, steps=120, step_s=0.1)
    later = pause_s * (np.arange(120) // every)
    frames = {"seconds": 1.0, "frames": ["/home/me/train.py:1 <module>", frame]}
    middles = (one.steps.start + later)[every::every] - pause_s / 2
    return replace(
        one,
        spans=replace(one.spans, start=one.spans.start + later, end=one.spans.end + later),
        steps=replace(one.steps, start=one.steps.start + later, end=one.steps.end + later),
        events=tuple(Event(t=float(t), what="stack", text=frame, facts=frames) for t in middles),
    )


def test_what_a_loop_does_between_its_steps_is_no_save_unless_it_was_seen_to_save() -> None:
    """Rollouts of a reinforcement learner come as regularly as saves."""
    rank = pausing(every=20, pause_s=3.0, frame="/home/me/train.py:8 rollout")
    run = run_of(rank, wall_s=float(rank.steps.end[-1]), ended="exit 0")
    found = diagnose(replace(run, hosts=(two_cores(wall_s=run.wall_s, disk_write=1e9),)))
    assert found.findings == ()
    assert "the loop was mostly in /home/me/train.py:8 rollout" in found.abstained[-1].why
    rank = pausing(every=20, pause_s=3.0, frame="/home/me/train.py:9 save_arrays")
    assert [one.kind for one in diagnose(replace(run, ranks=(rank,))).findings] == ["checkpoint_stall"]


@pytest.mark.parametrize(("counts", "kinds"), [((3, 3, 4), ["healthy"]), ((0, 10, 50), ["memory_pressure"])])
def test_an_allocator_that_retries_now_and_then_is_no_finding(
    counts: tuple[int, ...], kinds: list[str]
) -> None:
    memory = Samples(t=np.array([0.1, 90.0, 190.0]), columns={"retries": np.array(counts, float)})
    rank = replace(loop_rank(0, steps=2000, step_s=0.1), memory=memory)
    assert [one.kind for one in diagnose(run_of(rank, wall_s=200.0, ended="exit 0")).findings] == kinds


def test_an_exchange_that_takes_long_on_an_idle_machine_is_named() -> None:
    run = run_of(exchanging(0, share=0.4), exchanging(1, share=0.4), wall_s=6.0, ended="exit 0")
    found = diagnose(replace(run, hosts=(two_cores(wall_s=6.0),))).findings
    assert [one.kind for one in found] == ["communication_bound"]


def test_waiting_in_turns_for_whoever_is_late_is_not_the_exchange() -> None:
    ranks = [exchanging(n, share=0.01) for n in range(2)]
    for n, rank in enumerate(ranks):  # each waits 30% of every other step for the other
        late = np.arange(len(rank.spans.kind)) % 2 == n
        start = np.where(late & (rank.spans.kind == COLLECTIVE), rank.spans.end - 0.03, rank.spans.start)
        ranks[n] = replace(rank, spans=replace(rank.spans, start=start))
    assert diagnose(run_of(*ranks, wall_s=6.0, ended="exit 0")).healthy


@pytest.mark.parametrize("crowd", [{"trainer_delay": 0.2}, {"busy": 2.0}])
def test_waiting_for_a_rank_that_has_no_core_is_not_called_the_exchange(crowd: dict[str, float]) -> None:
    run = run_of(exchanging(0, share=0.4), exchanging(1, share=0.4), wall_s=6.0, ended="exit 0")
    verdict = diagnose(replace(run, hosts=(two_cores(wall_s=6.0, **crowd),)))
    assert verdict.healthy
    assert any("while every rank has its core" in text for text in verdict.findings[0].missing)


def test_a_loader_that_leaves_the_loop_no_core_starves_it_though_batches_are_in_time() -> None:
    run = run_of(loop_rank(0, steps=60, step_s=0.1), wall_s=6.0, ended="exit 0")
    crowd = {"workers": 4.0, "workers_cpu": 1.4, "workers_delay": 1.8, "trainer_cores": 0.6}
    host = two_cores(wall_s=6.0, trainer_delay=0.5, busy=2.0, **crowd)
    (found,) = diagnose(replace(run, hosts=(host,))).findings
    assert (found.kind, found.cause, found.share) == ("data_starvation", "cpu", 0.5)
    idle = two_cores(
        wall_s=6.0, trainer_delay=0.5, busy=2.0, **{**crowd, "workers_cpu": 0.1, "workers_delay": 0.1}
    )
    assert diagnose(replace(run, hosts=(idle,))).healthy, "others keep the loop from its core"


def test_a_loop_that_stands_without_any_rank_waiting_is_a_host_hang() -> None:
    away = hung(t=14.0, text="train.py:7 wait", in_collective=False, seq=0)
    found = diagnose(run_of(loop_rank(0, steps=40, step_s=0.1, events=(away,)), wall_s=20.0)).findings
    assert [one.kind for one in found] == ["host_hang"]
    assert any("train.py:7" in text for text in found[0].evidence)
    assert "train.py:7 wait" in found[0].summary, "the headline has the line that the card knows"


@pytest.mark.parametrize(
    ("reason", "is_lost"),
    [
        ("RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4711", True),
        (
            "RuntimeError: [gloo/transport/tcp/pair.cc:534] Read error: Connection reset by peer",
            True,
        ),
        ("OSError: [Errno 104] Connection reset by peer, of a store", False),
    ],
)
def test_a_rank_that_died_is_known_by_what_the_others_say(reason: str, is_lost: bool) -> None:
    run = run_of(loop_rank(0, steps=40, step_s=0.1), wall_s=6.0, ended=f"exit 1: {reason}")
    assert ("collective_hang" in [one.kind for one in diagnose(run).findings]) == is_lost


def test_what_follows_the_last_step_of_a_run_that_ended_well_is_no_hang() -> None:
    run = run_of(loop_rank(0, steps=100, step_s=0.1), wall_s=25.0, ended="exit 0")
    assert [one.kind for one in diagnose(run).findings] == ["healthy"]


def test_a_bus_error_explains_why_the_loop_stopped() -> None:
    died = Event(t=5.0, what="exception", text="DataLoader worker killed by signal: Bus error", facts={})
    run = run_of(loop_rank(0, steps=40, step_s=0.1, events=(died,)), wall_s=30.0, ended="exit 1")
    assert [one.kind for one in diagnose(run).findings] == ["shm_pressure"]


def test_the_price_is_the_wait_and_the_gain_follows_from_it(verdict_on: Callable[[Run], Verdict]) -> None:
    run = Run(label="data_starvation", shows={"compute": Shows(util=98, sm=90, power=0.9), "data": Shows()})
    run.pieces = lambda step, compute: [("data", compute), ("compute", compute)]
    found = verdict_on(run).findings[0]
    assert found.share == pytest.approx(0.5, abs=0.03)
    assert found.gpu_seconds == pytest.approx(0.5 * 150 * 0.12, rel=0.08)
    assert found.speedup_if_gone == pytest.approx(2.0, abs=0.15)


def test_workers_are_advised_only_as_far_as_cores_are_allowed(verdict_on: Callable[[Run], Verdict]) -> None:
    found = verdict_on(red_herring(np.random.default_rng(3))).findings[0]
    assert found.cause == "cpu"
    assert "num_workers" not in " ".join(found.remedy), "two workers are not too many for one loop"
    assert "2 workers for 2 cores" in found.remedy[0]


def test_shm_is_sized_from_workers_prefetch_and_batch(verdict_on: Callable[[Run], Verdict]) -> None:
    run = full_shm(np.random.default_rng(1))
    run.header |= {"num_workers": 8, "prefetch_factor": 2, "batch_bytes": 256 << 20}
    found = verdict_on(run).findings[0]
    assert "8 workers × (2 + 1) batches × 256 MiB = 6 GiB" in found.remedy[0]
    assert "--shm-size=9g" in found.remedy[0]


def test_a_batch_that_does_not_fit_into_shm_any_more_is_pressure(
    verdict_on: Callable[[Run], Verdict],
) -> None:
    run = Run(label="shm_pressure", shows={"compute": FED}, shm=lambda t: np.full(len(t), 0.67))
    run.header = {"num_workers": 2, "batch_bytes": 24 << 30}  # of 64 GiB
    assert [one.kind for one in verdict_on(run).findings] == ["shm_pressure"]


def test_healthy_names_the_next_ceiling(verdict_on: Callable[[Run], Verdict]) -> None:
    run = healthy(np.random.default_rng(0))
    run.shows["compute"] = Shows(util=98, sm=89, tensor=34, power=0.99, cores=1.0, reasons=4)
    found = verdict_on(run).findings[0]
    assert (found.kind, "power limit" in found.summary) == ("healthy", True)


@pytest.mark.parametrize("make", [healthy, starved, copying, full_shm])
def test_findings_are_plain_json_without_a_nan(
    make: Callable[[np.random.Generator], Run], verdict_on: Callable[[Run], Verdict]
) -> None:
    for finding in verdict_on(make(np.random.default_rng(5))).findings:
        text = json.dumps(finding.as_dict(), allow_nan=False)
        assert " nan" not in text.lower()
        assert finding.summary
        assert finding.evidence


def test_nothing_seen_is_no_verdict() -> None:
    verdict = diagnose(run_of(wall_s=10.0))
    assert verdict.findings == ()
    assert not verdict.healthy


def test_judging_is_pure(tmp_path: Path) -> None:
    seen = features(
        read_flat(record(starved(np.random.default_rng(2)), np.random.default_rng(2), tmp_path / "a"))
    )
    assert judge(seen) == judge(seen)


def test_every_threshold_says_why() -> None:
    assert all(len(threshold.why) > 20 for threshold in THRESHOLDS.values())


def test_a_first_step_that_loads_its_kernels_is_no_fault(verdict_on: Callable[[Run], Verdict]) -> None:
    """It is booked as computing, while the card has nothing to do."""
    shows = {"compute": FED, "slow": Shows(cores=1.0)}
    run = Run(label="healthy", steps=80, shows=shows)
    run.pieces = lambda step, compute: [*([("slow", 3.0)] if step == 1 else []), ("compute", compute)]
    assert [finding.kind for finding in verdict_on(run).findings] == ["healthy"]


def test_a_late_first_batch_is_still_looked_at(verdict_on: Callable[[Run], Verdict]) -> None:
    run = Run(label="data_starvation", steps=80, shows={"compute": FED, "data": Shows()})
    run.pieces = lambda step, compute: [("data", 3.0 if step == 1 else compute), ("compute", compute)]
    assert verdict_on(run).findings[0].kind == "data_starvation"


def test_a_loader_that_stands_with_half_of_shm_filled_lacks_room_for_the_next_batch() -> None:
    stands = Event(t=12.0, what="hang", text="data: train.py:9", facts={"inside": "data"})
    rank = loop_rank(0, steps=0, step_s=0.1, events=(stands,))
    host = two_cores(wall_s=20.0, busy=0.1, shm_total=24e6, shm_used=16e6, workers=2.0)

    def kinds(host: HostRecord) -> list[str]:
        run = replace(run_of(rank, wall_s=20.0), hosts=(host,))
        return [finding.kind for finding in diagnose(run).findings]

    assert kinds(host) == []  # somebody else's, from the beginning
    host.samples.columns["shm_used"][:10] = 0.0  # one batch came, the other worker's did not
    assert kinds(host) == ["shm_pressure"]
