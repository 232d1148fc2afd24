"""Traces of torch's profiler, read as recordings: the same numbers as counting by hand, whatever the file."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kineto_traces import ADD, GEMM, H2D, NCCL, Made, training
from stoker.diagnose.activity import worked
from stoker.diagnose.ledger import ledger
from stoker.diagnose.rules import diagnose
from stoker.diagnose.timeline import timeline
from stoker.errors import UnreadableError, UsageError
from stoker.recording import Recording
from stoker.watch.runs import read_job, read_recording, traceevents


def counted(trace: Made, path: Path) -> dict[str, int]:
    """Busy, compute, collective and both, microsecond by microsecond: slow and plain."""
    length = 4000
    is_on = {what: np.zeros(length, bool) for what in ("any", "compute", "collective")}
    for event in trace.events:
        if event.get("cat") in ("kernel", "gpu_memcpy"):
            first = int(event["ts"] - trace.origin)
            where = slice(first, first + int(event["dur"]))
            is_on["any"][where] = True
            name = str(event["name"])
            if name == NCCL:
                is_on["collective"][where] = True
            elif not name.startswith("Memcpy"):
                is_on["compute"][where] = True
    found = {what: int(on.sum()) for what, on in is_on.items()}
    at = np.flatnonzero(is_on["any"])
    return {
        **found,
        "both": int((is_on["compute"] & is_on["collective"]).sum()),
        "kernel": int(at[-1] - at[0] + 1),
    }


pieces = st.tuples(
    st.sampled_from([GEMM, ADD, NCCL, H2D]), st.integers(0, 3000), st.integers(1, 400), st.integers(7, 9)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(pieces, min_size=1, max_size=30))
def test_breakdowns_are_what_counting_microseconds_gives(tmp_path_factory, kernels) -> None:
    trace = Made()
    for name, start, lasts, stream in kernels:
        trace.kernel(name, start, lasts, at=start, stream=stream)
    path = trace.write(tmp_path_factory.mktemp("trace") / "trace.json.gz")
    (rank,) = read_recording(path).ranks
    seen, told = worked(rank.looks[0]), counted(trace, path)
    us = 1e6
    assert seen.kernel_s * us == pytest.approx(told["kernel"], abs=0.6)
    assert seen.idle_s * us == pytest.approx(told["kernel"] - told["any"], abs=0.6)
    assert seen.compute_s * us == pytest.approx(told["compute"], abs=0.6)
    moved = {one.kind: one for one in seen.moved}
    if told["collective"]:
        assert moved["collective"].seconds * us == pytest.approx(told["collective"], abs=0.6)
        hidden = moved["collective"].overlap * moved["collective"].seconds * us
        assert hidden == pytest.approx(told["both"], abs=0.6)


def test_the_last_step_is_left_out_with_the_kernels_it_queued(tmp_path) -> None:
    trace = training(steps=5, kernels=10)
    recording = read_recording(trace.write(tmp_path / "trace.json"))
    assert recording.ranks[0].steps.number.tolist() == [1, 2, 3, 4]
    assert len(recording.ranks[0].looks[0].start) == 40


def test_both_sides_of_the_ledger_sum_to_the_wall_time(tmp_path) -> None:
    trace = training(data_us=4000, reduce_us=700, kernel_us=12, launch_us=20)
    recording = read_recording(trace.write(tmp_path / "trace.json"))
    line = timeline(recording.ranks[0], wall_s=recording.wall_s)
    assert sum(line.seconds().values()) == pytest.approx(recording.wall_s)
    told = ledger(recording, (line,))
    assert told is not None
    assert told.busy + sum(told.idle.values()) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ({"kernel_us": 100}, "healthy"),
        ({"kernel_us": 4, "launch_us": 12}, "launch_bound"),
        ({"data_us": 30_000, "sync": True}, "data_starvation"),
        ({"reduce_us": 12_000}, "communication_bound"),
        ({"kernel_us": 100, "name": "ampere_sgemm_128x64_nn"}, "precision"),
    ],
)
def test_a_traces_first_verdict_is_what_was_put_in(tmp_path, shape, kind) -> None:
    path = training(**shape).write(tmp_path / "trace.json.gz")
    findings = diagnose(read_recording(path)).findings
    assert [one.kind for one in findings[:1]] == [kind], findings


def test_a_price_is_no_more_than_the_busy_card_leaves(tmp_path) -> None:
    """Waits while the card works off its queue gain what the card leaves, not what the host waits."""
    path = training(kernel_us=60, launch_us=5, data_us=9000).write(tmp_path / "trace.json")
    recording = read_recording(path)
    told = ledger(recording, (timeline(recording.ranks[0], wall_s=recording.wall_s),))
    assert told is not None
    for finding in diagnose(recording).findings:
        assert finding.speedup_if_gone <= 1 / told.busy + 0.01


def test_a_launch_bound_price_is_said_to_be_an_upper_bound(tmp_path) -> None:
    path = training(kernel_us=4, launch_us=12).write(tmp_path / "trace.json")
    (finding, *_) = diagnose(read_recording(path)).findings
    assert finding.at_most


def test_a_line_of_the_program_owns_the_time_that_nothing_else_claims(tmp_path) -> None:
    trace, host = Made(), 0.0
    for number in range(1, 9):
        trace.step(number, host, 22_000)
        trace.host("train.py(10): main", host, 22_000, cat="python_function")
        trace.host("train.py(31): get_batch", host, 18_000, cat="python_function")
        trace.host("/usr/lib/python3.11/random.py(5): shuffle", host, 17_000, cat="python_function")
        for at in range(20):
            trace.kernel(GEMM, host + 18_000 + 200 * at, 190, at=host + 18_000 + 10 * at)
        host += 22_000
    (finding, *_) = diagnose(read_recording(trace.write(tmp_path / "trace.json"))).findings
    assert finding.kind == "host_code"
    assert "train.py:31 get_batch" in finding.summary


def test_traces_of_two_ranks_are_one_job_and_of_one_rank_two_runs(tmp_path) -> None:
    ranks = [training(rank=rank, world=2).write(tmp_path / f"rank{rank}.json.gz") for rank in (0, 1)]
    (job,) = read_job(ranks)
    assert [rank.rank for rank in job.ranks] == [0, 1]
    assert len(job.gpus) == 2
    again = training(rank=0, world=2).write(tmp_path / "again.json")
    assert [isinstance(one, Recording) for one in read_job([ranks[0], again])] == [True, True]
    with pytest.raises(UsageError, match="3 recordings"):
        read_job([ranks[0], again, again])
    with pytest.raises(UnreadableError, match="same rank"):
        read_recording(tmp_path)


def test_a_folder_of_traces_is_one_job(tmp_path) -> None:
    for rank in (0, 1):
        training(rank=rank, world=2, steps=4, kernels=20).write(tmp_path / f"host_{rank}.pt.trace.json.gz")
    assert len(read_recording(tmp_path).ranks) == 2


def test_ranks_whose_clocks_have_nothing_in_common_are_laid_over_each_other(tmp_path) -> None:
    near = training(rank=0, world=2, kernels=20).write(tmp_path / "a.json")
    far = training(rank=1, world=2, kernels=20, origin=5e12).write(tmp_path / "b.json")
    (job,) = read_job([near, far])
    assert job.wall_s < 1
    assert any("do not overlap" in line for line in job.facts["missing"])


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.97, 0.9999])
@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_that_breaks_off_is_refused(tmp_path, keep, name) -> None:
    whole = training(steps=3, kernels=30).write(tmp_path / name)
    data = whole.read_bytes()
    whole.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(UnreadableError) as caught:
        read_recording(whole)
    assert caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        '{"schemaVersion": 1}',
        '{"schemaVersion": 1, "traceEvents": []}',
        '{"schemaVersion": 1, "traceEvents": [{"ph": "X" "cat"}]}',
        '{"schemaVersion": 1, "traceEvents": 7}',
        '{"schemaVersion": 1, "traceEvents": [1, null, {"ph": "X", "cat": "kernel", "ts": "soon"}]}',
        '{"schemaVersion": 1, "traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1e400, "dur": 1}]}',
    ],
)
def test_what_is_no_trace_is_refused_with_a_hint(tmp_path, text) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(UnreadableError) as caught:
        read_recording(path)
    assert caught.value.hint


def test_odd_events_do_not_matter(tmp_path) -> None:
    trace = training(steps=4, kernels=20)
    odd = [
        {"ph": "X", "cat": "kernel", "name": "torn", "ts": None, "dur": 5},
        {"ph": "X", "cat": "kernel", "name": "back", "ts": trace.origin, "dur": -5},
        {"ph": "X", "cat": "cpu_op", "name": 7, "ts": trace.origin, "dur": 5, "args": [1], "tid": [2]},
        {"ph": "X"},
    ]
    plain = read_recording(trace.write(tmp_path / "plain.json"))
    trace.events[3:3] = odd
    path = trace.write(tmp_path / "odd.json")
    path.write_bytes(path.read_bytes().replace(b"vectorized", b"vect\xff\xfeized"))
    assert worked(read_recording(path).ranks[0].looks[0]) == worked(plain.ranks[0].looks[0])


def test_a_list_alone_is_a_trace_too(tmp_path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(training(steps=4, kernels=20).events))
    assert len(read_recording(path).ranks[0].steps.end) == 3


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_where_a_piece_ends_does_not_matter(tmp_path, monkeypatch, size) -> None:
    path = training(steps=3, kernels=2).write(tmp_path / "trace.json")
    whole = read_recording(path)
    monkeypatch.setattr(traceevents, "_PIECE", size)
    assert worked(read_recording(path).ranks[0].looks[0]) == worked(whole.ranks[0].looks[0])


@pytest.mark.long
def test_memory_grows_with_kernels_and_not_with_the_file(tmp_path) -> None:
    path = tmp_path / "trace.json.gz"
    trace = training(steps=3, kernels=10)
    inner = ({"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 100, "tid": 100, "ts": trace.origin + 1,
              "dur": 1, "args": {"Call stack": "x" * 500}} for _ in range(120_000))  # fmt: skip
    with gzip.open(path, "wt", compresslevel=1) as file:
        head, tail = trace.text().split('"traceEvents": [', 1)
        file.write(head + '"traceEvents": [')
        for event in inner:
            file.write(json.dumps(event) + ",")
        file.write(tail)
    tracemalloc.start()
    try:
        read_recording(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20, "of a file of 80 MB"


def test_what_torch_itself_writes_is_read(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile, schedule

    path = tmp_path / "cpu.json"
    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=5),
        on_trace_ready=lambda one: one.export_chrome_trace(str(path)),
        acc_events=True,
    ) as profiler:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(16, 32)).sum().backward()
            optimizer.step()
            profiler.step()
    recording = read_recording(path)
    assert len(recording.ranks[0].steps.end) == 4
    assert recording.gpus == ()
    assert any("without CUDA activity" in line for line in recording.facts["missing"])


def test_a_trace_without_steps_is_no_hang(tmp_path) -> None:
    trace = Made()
    trace.kernel(GEMM, 0, 100, at=0)
    trace.host("aten::mm", 40_000_000, 10)
    verdict = diagnose(read_recording(trace.write(tmp_path / "trace.json")))
    assert not any(one.kind.endswith("_hang") for one in verdict.findings)


def test_zipped_json_of_another_kind_is_refused_as_a_trace(tmp_path) -> None:
    path = tmp_path / "et.json.gz"
    path.write_bytes(gzip.compress(b'{"schema": "1.0.1", "nodes": []}'))
    with pytest.raises(UnreadableError, match="holds no traceEvents"):
        read_recording(path)
