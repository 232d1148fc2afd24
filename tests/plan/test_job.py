"""Jobs as people write them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stoker.errors import UsageError
from stoker.plan.job import make_job, read_job
from stoker.plan.measured import of_recording, read_measured
from stoker.recording import KINDS, GpuRecord, HostRecord, RankRecord, Recording, Samples, Spans, Steps

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_values_have_units() -> None:
    job = make_job(
        {"step": "500ms", "sample": "3.1MB", "store_rate": "10GB/s", "parameters": "8B", "mtbf": "2d"}
    )
    assert (job.step, job.sample, job.store_rate, job.parameters) == (0.5, 3_100_000, 1e10, 8e9)
    assert job.mtbf == 2 * 86400


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nodes": "many"}, "nodes: 'many' is no count"),
        ({"nodes": 1.5}, "nodes: 1.5 is no count"),
        ({"nodes": -3}, "nodes: -3 is no count"),
        ({"nodes": 0}, "nodes: 0 cannot work"),
        ({"snapshot_rate": 0}, "snapshot_rate: 0 cannot work"),
        ({"gpu_flops": 0}, "gpu_flops: 0 cannot work"),
        ({"nodes": True}, "nodes: True is no value"),
        ({"nodes": [1]}, "nodes: [1] is no count"),
        ({"sample": "3 parsecs"}, "sample: '3 parsecs' is no size"),
        ({"step": "soon"}, "step: 'soon' is no time"),
        ({"read_rate": "fast"}, "read_rate: 'fast' is no rate"),
        ({"node_rate": "100Gb/s"}, "node_rate: '100Gb/s' is no rate in bytes"),
        ({"node_rate": "100gb/s"}, "node_rate: '100gb/s' is no rate in bytes"),
        ({"store_rate": "100kb/s"}, "store_rate: '100kb/s' is no rate in bytes"),
        ({"store_rate": "100 mib"}, "store_rate: '100 mib' is no rate in bytes"),
        ({"step": "1e-400"}, "step: '1e-400' is not between"),
        ({"sample": "0.4"}, "sample: '0.4' is not between"),
        ({"nodes": "000"}, "nodes: '000' begins with a zero"),
        ({"parameters": "nan"}, "parameters: 'nan' is no number"),
        ({"loader": "magic"}, "loader: 'magic' is unknown"),
        ({"mfu": 2}, "mfu: 2.0 is no share"),
        ({"memory": "32GiB", "shm": "32GiB"}, "are not inside memory"),
        ({"gpus_per_nodes": 8}, "gpus_per_nodes is nothing a job has"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_its_reason(values: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        make_job(values)
    assert said in refused.value.message
    assert refused.value.hint


def test_a_near_miss_is_guessed() -> None:
    with pytest.raises(UsageError, match="is gpus_per_node meant"):
        make_job({"gpus_per_nodes": 8})


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_flag_counts_more_than_the_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"job{suffix}"
    path.write_text('{"nodes": 4, "dataset": "2TB"}')  # JSON is YAML
    job = read_job(path, nodes="8", batch=None)
    assert (job.nodes, job.dataset) == (8, 2 * 10**12)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", b"nodes: [1"),
        ("a.json", b"{"),
        ("a.yaml", b"7"),
        ("a.yaml", b"step: 2026-13-01"),
        ("a.yaml", b"1: 2"),
        ("a.yaml", b"nodes: 4\nnodes: 8"),
        ("a.json", b'{"nodes": 4, "nodes": 8}'),
        ("a.yaml", b"name: \xff"),
        ("b.yaml", None),
    ],
)
def test_a_file_that_is_no_job_is_refused(tmp_path: Path, name: str, text: bytes | None) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text)
    with pytest.raises(UsageError):
        read_job(tmp_path / name)


def test_a_byte_order_mark_is_no_part_of_a_job(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text('{"nodes": 4}', "utf-8-sig")
    assert read_job(path).nodes == 4


# --- measurements ---------------------------------------------------------------------------------


def _recording(*, step_s: float, wait_s: float, batch_bytes: int, steps: int = 20) -> Recording:
    starts = np.arange(steps) * step_s
    spans = Spans(
        kind=np.full(steps, KINDS.index("data"), np.uint8),
        start=starts,
        end=starts + wait_s,
        step=np.arange(steps),
        bytes=np.full(steps, batch_bytes),
    )
    unknown = np.full(steps, np.nan)
    made = Steps(number=np.arange(steps), start=starts, end=starts + step_s, tokens=unknown, flops=unknown)
    rank = RankRecord(
        rank=0, node="n0", gpu=0, spans=spans, steps=made, memory=Samples(t=np.empty(0), columns={})
    )
    return Recording(title="run", wall_s=steps * step_s, ended="exit 0", ranks=(rank,), gpus=(), hosts=())


def test_a_recorded_run_gives_the_step_without_its_wait() -> None:
    values = of_recording(_recording(step_s=1.0, wait_s=0.6, batch_bytes=80_000_000), source="run").values
    assert values["step"] == pytest.approx(0.4)
    assert values["read_rate"] == pytest.approx(200e6)


def test_a_run_on_one_node_does_not_make_a_job_of_sixteen_smaller(tmp_path: Path) -> None:
    none = Samples(t=np.empty(0), columns={})
    card = GpuRecord(node="n0", index=0, name="H200", power_limit_w=700, memory_bytes=1, samples=none)
    host = HostRecord(node="n0", cpus=24, quota_cores=np.inf, samples=none)
    recording = replace(_recording(step_s=1.0, wait_s=0.6, batch_bytes=1), gpus=(card,), hosts=(host,))
    measured = of_recording(recording, source="run")
    path = tmp_path / "job.json"
    path.write_text('{"nodes": 16, "gpus_per_node": 8, "step": "1s"}')
    job = read_job(path, unless_said=measured.machines, **measured.values)
    assert (job.nodes, job.gpus_per_node, job.cores) == (16, 8, 24)
    assert job.step == pytest.approx(0.4)


def test_a_run_without_steps_measures_nothing() -> None:
    with pytest.raises(UsageError, match="no two steps"):
        of_recording(_recording(step_s=1.0, wait_s=0.6, batch_bytes=1, steps=1), source="run")


def test_a_result_of_the_feeding_benchmark_gives_the_disk_and_the_copy() -> None:
    values = read_measured(RESULTS / "gpu_feed.json").values
    assert 1e9 < values["nvme_rate"] < 1e10
    assert 2e10 < values["snapshot_rate"] < 1e11


def test_anybodys_numbers_are_taken_under_measured(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"measured": {"step": "310ms"}}))
    assert read_job(**read_measured(path).values).step == 0.31
    path.write_text(json.dumps({"measured": {"stepp": 1}}))
    with pytest.raises(UsageError, match="stepp is nothing a job has"):
        read_measured(path)
    for other in ({}, {"paths": 7}, {"paths": {"pinned_copy_gb_s": 50}}):
        path.write_text(json.dumps(other))
        with pytest.raises(UsageError, match="no result that is known"):
            read_measured(path)
