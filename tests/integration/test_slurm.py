"""`stoker prepare --on slurm` on a real cluster of two nodes, through the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from clusters import FILES, MARKED_TASK, Bench, make_bench, wait_until, write_corpus
from PIL import Image
from slurm_cluster import SlurmCluster, slurm_cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.integration

MAX_ARRAY_SIZE = 2
ON_SLURM = ("--on", "slurm")


@pytest.fixture(scope="module")
def daemons(
    require_binary: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmCluster]:
    for name in ("munged", "slurmctld", "slurmd"):
        require_binary(name)
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), max_array_size=MAX_ARRAY_SIZE) as cluster:
        yield cluster


@pytest.fixture
def cluster(daemons: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster, on which a test leaves nothing queued or running."""
    yield daemons
    daemons.ask("scancel", "--quiet", "--user", daemons.user)
    wait_until(daemons.is_idle, "the queue is empty")


@pytest.fixture(scope="module")
def cluster_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def bench(tmp_path: Path, cluster_corpus: Path, tokenizer_path: Path) -> Bench:
    return make_bench(tmp_path, corpus=cluster_corpus, tokenizer=tokenizer_path)


def test_more_tasks_than_an_array_may_have_elements_make_the_same_dataset_as_here(
    cluster: SlurmCluster, bench: Bench
) -> None:
    before = cluster.jobs("map")
    done = bench.run("out", *ON_SLURM, "--workers", "1", environment=cluster.environment)
    assert done.returncode == 0, done.stderr
    assert FILES > MAX_ARRAY_SIZE
    assert _new(cluster.jobs("map"), before) == [MAX_ARRAY_SIZE]
    assert bench.dataset("out") == bench.made_here()
    assert not list((bench.folder / "out").glob(".*")), "scratch was left behind"


def test_a_failing_task_is_named_the_others_land_and_the_same_command_runs_only_what_is_missing(
    cluster: SlurmCluster, bench: Bench
) -> None:
    options = (*ON_SLURM, "--filter", "trouble:fail")
    before = cluster.jobs("map")
    bench.flag.touch()
    failed = bench.run("out", *options, environment=cluster.environment)
    assert failed.returncode == 1
    assert f"1 of {FILES} map tasks not done, 1 failed" in failed.stderr
    assert f"map task {MARKED_TASK}: " in failed.stderr
    assert "the filter trouble:fail: RuntimeError: the flag is up" in failed.stderr
    assert bench.done("out") == FILES - 1
    assert not (bench.folder / "out/manifest.json").exists()

    bench.flag.unlink()
    done = bench.run("out", *options, environment=cluster.environment)
    assert done.returncode == 0, done.stderr
    assert f"{FILES - 1} of {FILES} tasks done before" in done.stderr
    assert _new(cluster.jobs("map"), before) == [MAX_ARRAY_SIZE, 1]
    assert bench.dataset("out") == bench.made_here("--filter", "trouble:fail")


def test_a_detached_run_finishes_by_itself(cluster: SlurmCluster, bench: Bench) -> None:
    options = ("--near-dedup", "0.9")
    done = bench.run("out", *ON_SLURM, *options, "--detach", "--json", environment=cluster.environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert list(report["jobs"]) == ["map", "match", "confirm", "cluster", "write", "merge"]
    assert report["look"].startswith("squeue --job ")
    wait_until((bench.folder / "out/manifest.json").exists, "the merge job has written the manifest")
    wait_until(cluster.is_idle, "the merge job has ended")
    assert bench.dataset("out") == bench.made_here(*options)


def test_a_detached_run_with_a_failing_task_says_so_in_the_merge_log_and_can_be_submitted_again(
    cluster: SlurmCluster, bench: Bench
) -> None:
    options = (*ON_SLURM, "--filter", "trouble:fail", "--detach", "--json")
    before = cluster.jobs("map")
    bench.flag.touch()
    with cluster.held():
        report = json.loads(bench.run("out", *options, environment=cluster.environment).stdout)
        again = json.loads(bench.run("out", *options, environment=cluster.environment).stdout)
    assert again["jobs"]["merge"] == report["jobs"]["merge"], "it was submitted twice"
    wait_until(cluster.is_idle, "the chain has ended")
    log = bench.folder / "out" / report["log"].rpartition("/")[2]
    assert f"map task {MARKED_TASK}: " in log.read_text()
    assert "RuntimeError: the flag is up" in log.read_text()

    bench.flag.unlink()
    bench.run("out", *options, environment=cluster.environment)
    wait_until(cluster.is_idle, "the second chain has ended")
    assert _new(cluster.jobs("map"), before) == [MAX_ARRAY_SIZE, 1]
    assert bench.dataset("out") == bench.made_here("--filter", "trouble:fail")


def test_jobs_outlive_a_killed_driver_and_the_same_command_waits_for_them(
    cluster: SlurmCluster, bench: Bench
) -> None:
    options = (*ON_SLURM, "--filter", "trouble:block")
    before = {stage: cluster.jobs(stage) for stage in ("map", "write")}
    bench.flag.touch()
    with bench.started_run("out", *options, environment=cluster.environment) as driver:
        wait_until(bench.started.exists, "the marked task runs")
        driver.kill()
    with bench.started_run("out", *options, environment=cluster.environment) as second:
        wait_until(lambda: "waiting for job" in bench.said("out"), "the second driver has found the job")
        bench.flag.unlink()
        assert second.wait(timeout=90) == 0, bench.said("out")
    assert _new(cluster.jobs("map"), before["map"]) == [MAX_ARRAY_SIZE]
    assert len(_new(cluster.jobs("write"), before["write"])) == 1
    assert bench.dataset("out") == bench.made_here("--filter", "trouble:block")


def test_a_task_whose_element_slurm_ended_is_named_with_slurms_reason(
    cluster: SlurmCluster, bench: Bench
) -> None:
    bench.flag.touch()
    options = (*ON_SLURM, "--filter", "trouble:block")
    with bench.started_run("out", *options, environment=cluster.environment) as driver:
        wait_until(bench.started.exists, "the marked task runs")
        wait_until(lambda: bench.done("out") == FILES - 1, "the other tasks are done")
        cluster.ask("scancel", "--user", cluster.user)
        assert driver.wait(timeout=90) == 1
    assert f"map task {MARKED_TASK}: array element" in bench.said("out")
    assert "ended CANCELLED" in bench.said("out")


def test_a_task_whose_element_is_killed_is_tried_again(cluster: SlurmCluster, bench: Bench) -> None:
    bench.flag.touch()
    options = (*ON_SLURM, "--filter", "trouble:die_once")
    done = bench.run("out", *options, environment=cluster.environment)
    assert done.returncode == 0, done.stderr
    assert "died with their element; trying again" in done.stderr
    assert bench.dataset("out") == bench.made_here("--filter", "trouble:die_once")


def test_a_curated_dataset_is_the_same_as_here(cluster: SlurmCluster, bench: Bench) -> None:
    options = ("--curate", str(Path(__file__).with_name("recipe.json")))
    done = bench.run("out", *ON_SLURM, *options, environment=cluster.environment)
    assert done.returncode == 0, done.stderr
    for workers in ("1", "2"):
        assert bench.dataset("out") == bench.made_here(*options, "--workers", workers)


def test_media_is_the_same_as_here(cluster: SlurmCluster, bench: Bench, tmp_path: Path) -> None:
    for number in range(24):
        folder = tmp_path / "photos" / ("cat" if number % 3 else "hot dog")
        folder.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number // 2).integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((400 + number % 2, 400)).save(folder / f"{number}.png")
    media = Bench(folder=bench.folder, corpus=tmp_path / "photos", tokenizer=bench.tokenizer)
    options = ("--near-dedup", "0.9", "--shard-size", "1MiB")
    done = media.run("out", *ON_SLURM, *options, environment=cluster.environment)
    assert done.returncode == 0, done.stderr
    assert "24 image files in 2 class folders" in done.stderr
    assert json.loads((bench.folder / "out/statistics.json").read_text())["dropped"] == {"near_duplicate": 12}
    assert media.dataset("out") == media.made_here(*options, "--workers", "1")


def test_what_sbatch_refuses_is_told_with_a_hint(cluster: SlurmCluster, bench: Bench) -> None:
    done = bench.run("out", *ON_SLURM, "--sbatch=--partition=none", environment=cluster.environment)
    assert done.returncode == 1
    assert "error: sbatch failed: " in done.stderr
    assert "invalid partition" in done.stderr
    assert "hint: " in done.stderr


def _new(now: dict[str, int], before: dict[str, int]) -> list[int]:
    """How many elements each job had that was submitted since, in the order of submission."""
    return [now[job] for job in sorted(now.keys() - before.keys(), key=int)]
