"""`stoker plan` and `stoker deploy` as commands."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from click.testing import CliRunner

from stoker.cli import stoker
from stoker.cli.plan import as_written
from stoker.doctor.need import Need, need_of
from stoker.plan.job import FIELDS, Job, read_job

KNOWN = (
    "--nodes",
    "9",
    "--read-rate",
    "200MB/s",
    "--dataset",
    "20TB",
    "--store-rate",
    "10GB/s",
    "--nvme",
    "4TB",
)


def run(*arguments: str) -> str:
    done = CliRunner().invoke(stoker, ["plan", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_a_plan_is_said_in_words() -> None:
    said = run(*KNOWN)
    assert "1.6 GB/s a node, 14.4 GB/s the job" in said
    assert "GPUs wait   31% of the first epoch" in said


def test_what_is_not_known_is_left_out_and_not_claimed() -> None:
    assert run().startswith("training: 1 node x 8 GPUs\n\na node needs\n")
    unread = run("--dataset", "20TB", "--store-rate", "10GB/s")
    assert "GPUs wait" not in unread
    stored_nowhere = run("--parameters", "70B")
    assert "in the store" not in stored_nowhere
    assert "stopping the loop" not in stored_nowhere
    assert "on NVMe after" in run("--parameters", "70B", "--nvme", "4TB")


def test_the_needs_of_a_plan_are_what_doctor_checks() -> None:
    plan = json.loads(run(*KNOWN, "--json"))
    need = need_of(plan)
    assert need.memory_bytes == plan["memory"]["limit"]
    assert need.cache_bytes == plan["caching"]["share"]
    assert set(plan["needs"]) == {one.name for one in fields(Need)}


def test_a_page_holds_the_plots(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    said = run(*KNOWN, "--simulate", "--html", str(page))
    assert "stage shares" in said
    assert page.read_text().count("<svg") == 2


def test_a_measurement_counts_more_than_the_file_and_a_flag_more_than_that(tmp_path: Path) -> None:
    job, measured = tmp_path / "job.json", tmp_path / "measured.json"
    job.write_text('{"step": "1s", "batch": 8, "sample": "1MB", "mfu": 0.3}')
    measured.write_text('{"measured": {"step": "500ms", "batch": 16}}')
    plan = json.loads(run(str(job), "--measured", str(measured), "--batch", "32", "--json"))
    assert (plan["job"]["step"], plan["job"]["batch"], plan["job"]["mfu"]) == (0.5, 32, 0.3)
    assert plan["measured"] == [str(measured)]


def test_a_flat_recording_is_a_measurement_too(tmp_path: Path) -> None:
    recording = Path(__file__).parents[2] / "examples" / "starved_cpu.jsonl"
    ran = CliRunner().invoke(stoker, ["plan", "--measured", str(recording), "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.output)["measured"] == [str(recording)]


def test_defaults_are_shown_as_they_may_be_written() -> None:
    shown = {
        name: as_written(field.metadata["kind"], field.default)
        for name, field in FIELDS.items()
        if field.default
    }
    assert shown["rank_memory"] == "6GiB"
    assert read_job(None, **shown) == Job()


def test_deploy_ends_with_the_lines_that_start_the_job(tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    job.write_text('{"name": "vision", "nodes": 2}')
    words = ["deploy", "k8s", str(job), "--image", "i:1", "--data", "s3://b/c", "--namespace", "team-a"]
    said = (
        CliRunner().invoke(stoker, [*words, "--out", str(tmp_path / "k8s"), "train.py"]).stdout.splitlines()
    )
    assert said[-2].startswith(
        "kubectl create secret generic vision-metrics --namespace team-a --from-literal"
    )
    assert said[-1] == f"kubectl apply -k {tmp_path / 'k8s' / 'base'}"
    said = (
        CliRunner().invoke(stoker, [*words, "--plain", "--out", str(tmp_path / "plain"), "train.py"]).stdout
    )
    assert "secret" not in said
