"""`stoker doctor` on recorded machines: exit codes, reports, what does not go together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.cli import main

SNAPSHOTS = Path(__file__).parents[1] / "recordings" / "machines"


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *map(str, arguments)])
    code = ended.value.code
    assert isinstance(code, int)
    return code


@pytest.mark.parametrize(("name", "code"), [("good_node", 0), ("small_vm", 0), ("kubernetes_pod", 1)])
def test_a_machine_that_fails_gates_and_one_with_warnings_does_not(
    name: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(SNAPSHOTS / f"{name}.json") == code
    assert capsys.readouterr().out.splitlines()[-1].endswith(" ok")


def test_the_manifest_line_is_in_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    run(SNAPSHOTS / "kubernetes_pod.json")
    assert "fix: spec.volumes: [{name: dshm, emptyDir: {medium: Memory" in capsys.readouterr().out


def test_the_report_as_json_says_the_level_of_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    run(SNAPSHOTS / "small_vm.json", "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["level"] == "warn"
    assert set(report["checks"][0]) == {"check", "subject", "level", "read", "why", "fix"}


def test_a_need_turns_a_good_machine_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text('{"needs": {"cpu_cores": 1000}}')
    assert run(SNAPSHOTS / "good_node.json", "--for", tmp_path / "plan.json") == 1
    assert "1000 are needed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--fix"], ["--cache", "."], ["--record", "x.json"]], ids=lambda arguments: arguments[0]
)
def test_a_recorded_machine_cannot_be_changed(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(SNAPSHOTS / "good_node.json", *arguments) == 2
    said = capsys.readouterr()
    assert (said.out, said.err[:6], "hint: " in said.err) == ("", "error:", True)


def test_a_file_that_is_no_machine_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("[]")
    assert run(tmp_path / "x.json") == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/x.json is no recorded machine")
