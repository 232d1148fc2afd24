"""`stoker diagnose`: a card to read, JSON to parse, an exit code to branch on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from kineto_traces import training
from stoker.cli.diagnose import command
from stoker.errors import BadInputError

if TYPE_CHECKING:
    from pathlib import Path

KEYS = [
    "kind",
    "cause",
    "share",
    "gpu_seconds",
    "speedup_if_gone",
    "at_most",
    "confidence",
    "evidence",
    "remedy",
    "missing",
]


def trace(path: Path, *, wait: float, steps: int = 60) -> Path:
    lines: list[dict[str, Any]] = [{"kind": "header", "format": "stoker-flat-trace/1", "cpus": 4}]
    for number in range(1, steps + 1):
        t = number * (0.1 + wait)
        lines.append({"kind": "step", "t": t, "step": number, "data_wait": wait, "h2d": 0.0, "compute": 0.1})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_json_has_exactly_the_keys_of_a_finding_and_exit_code_one(tmp_path: Path) -> None:
    ran = CliRunner().invoke(command, [str(trace(tmp_path / "a.jsonl", wait=0.1)), "--json"])
    found = json.loads(ran.stdout)["findings"]
    assert ran.exit_code == 1
    assert [one["kind"] for one in found] == ["data_starvation"]
    assert list(found[0]) == KEYS


def test_a_healthy_run_exits_with_zero_and_has_no_cause(tmp_path: Path) -> None:
    ran = CliRunner().invoke(command, [str(trace(tmp_path / "a.jsonl", wait=0.0)), "--json"])
    assert (ran.exit_code, json.loads(ran.stdout)["findings"][0]["cause"]) == (0, None)


def test_the_card_says_what_it_costs_what_to_change_and_what_was_not_seen(tmp_path: Path) -> None:
    ran = CliRunner().invoke(command, [str(trace(tmp_path / "a.jsonl", wait=0.1))])
    assert ran.stdout.startswith("a: 12.0 s, 60 steps")
    for word in ("data starvation", "of GPU time lost", "evidence", "what to change", "not seen", "% sure"):
        assert word in ran.stdout
    assert "\x1b" not in ran.stdout
    assert max(map(len, ran.stdout.splitlines())) <= 120


def test_where_there_is_no_verdict_it_is_said_why(tmp_path: Path) -> None:
    path = trace(tmp_path / "a.jsonl", wait=0.0)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    ran = CliRunner().invoke(command, [str(path)])
    assert ran.exit_code == 1
    assert "too little was seen" in ran.stdout
    assert "  - healthy: only 2 steps ended" in ran.stdout


def test_two_runs_are_compared_and_a_slower_one_exits_with_one(tmp_path: Path) -> None:
    quick, slow = trace(tmp_path / "a.jsonl", wait=0.0), trace(tmp_path / "b.jsonl", wait=0.1)
    ran = CliRunner().invoke(command, [str(quick), str(slow)])
    assert ran.exit_code == 1
    assert ran.stdout.startswith("B is slower: a step takes 100 ms in A and 200 ms in B")
    assert CliRunner().invoke(command, [str(slow), str(quick), "--json"]).exit_code == 0


def test_what_is_no_recording_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("hello\nthere\n")
    with pytest.raises(BadInputError, match="not JSON"):
        CliRunner().invoke(command, [str(path)], catch_exceptions=False)


def test_a_run_that_ended_at_once_is_not_the_same_as_a_whole_one(tmp_path: Path) -> None:
    whole, torso = trace(tmp_path / "a.jsonl", wait=0.0), trace(tmp_path / "b.jsonl", wait=0.0, steps=3)
    for pair in ((whole, torso), (torso, whole)):
        refused = CliRunner().invoke(command, [*map(str, pair), "--json"]).exception
        assert isinstance(refused, BadInputError)
        assert "(b) has 1 step after its first 2: too few to compare" in refused.message


def test_traces_of_a_jobs_ranks_are_one_job_and_json_has_what_its_cards_did(
    tmp_path: Path,
) -> None:
    shape = {"world": 2, "steps": 6, "kernels": 50, "kernel_us": 4, "launch_us": 12}
    ranks = [training(rank=rank, **shape).write(tmp_path / f"rank{rank}.json.gz") for rank in (0, 1)]
    ran = CliRunner().invoke(command, [*map(str, ranks), "--json"])
    told = json.loads(ran.stdout)
    assert (ran.exit_code, told["findings"][0]["kind"]) == (1, "launch_bound")
    assert [look["rank"] for look in told["looks"]] == [0, 1]
    shown = CliRunner().invoke(command, [str(ranks[0])])
    assert "what the GPU did" in shown.stdout
    assert "at most" in shown.stdout


def test_two_traces_of_one_rank_are_compared(tmp_path: Path) -> None:
    slow, quick = (
        training(steps=20, kernels=50, sync=True, data_us=wait).write(tmp_path / f"{wait}.json")
        for wait in (9000, 1000)
    )
    ran = CliRunner().invoke(command, [str(slow), str(quick)])
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.startswith("B is quicker")
