"""How commands are found and how they fail: help, completion, nearest names, exit codes, JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from stoker.cli import run, stoker

COMPLETION = Path(__file__).parents[2] / "docs" / "start" / "completion.md"

MISSING = {
    "prepare": ["prepare", "missing.txt", "--out", "out", "--tokenizer", "TOKENIZER"],
    "prepare, tokenizer": ["prepare", "a.txt", "--out", "out", "--tokenizer", "./missing"],
    "prepare verify": ["prepare", "verify", "missing"],
    "prepare verify, no manifest": ["prepare", "verify", "empty"],
    "prepare index": ["prepare", "index", "missing"],
    "stage": ["stage", "./missing", "--cache", "near"],
    "stage, nothing in it": ["stage", "./empty", "--cache", "near"],
    "stage ls": ["stage", "ls", "--cache", "missing"],
    "checkpoint ls": ["checkpoint", "ls", "missing"],
    "checkpoint verify": ["checkpoint", "verify", "missing"],
    "checkpoint verify, none": ["checkpoint", "verify", "empty"],
    "checkpoint gc": ["checkpoint", "gc", "missing"],
    "checkpoint export": ["checkpoint", "export", "missing", "--out", "out"],
    "checkpoint export, none": ["checkpoint", "export", "empty", "--out", "out"],
    "checkpoint import": ["checkpoint", "import", "missing", "--out", "out"],
    "checkpoint push": ["checkpoint", "push", "missing", "--remote", "far"],
    "checkpoint diff": ["checkpoint", "diff", "missing", "step-1"],
    "watch": ["watch", "--gpu", "missing.log", "--", "true"],
    "diagnose": ["diagnose", "missing"],
    "report": ["report", "missing"],
    "doctor": ["doctor", "missing.json"],
    "doctor --for": ["doctor", "--for", "missing.json"],
    "plan": ["plan", "missing.json"],
    "plan --measured": ["plan", "--measured", "missing"],
    "deploy": ["deploy", "slurm", "missing.json", "--out", "out"],
}

UNREADABLE = {
    "diagnose": ["diagnose", "bad.json"],
    "diagnose, a folder": ["diagnose", "empty"],
    "diagnose A B": ["diagnose", "bad.json", "bad.json"],
    "report": ["report", "bad.json"],
    "report, a folder": ["report", "empty"],
    "doctor": ["doctor", "bad.json"],
    "doctor --for": ["doctor", "--for", "bad.json"],
    "plan": ["plan", "bad.json"],
    "plan --measured": ["plan", "--measured", "bad.json"],
    "plan --measured, a folder": ["plan", "--measured", "empty"],
    "deploy": ["deploy", "slurm", "bad.json", "--out", "out"],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a.txt").write_text("coal", "utf-8")
    (tmp_path / "bad.json").write_text("neither JSON\nnor anything else\n", "utf-8")
    (tmp_path / "deep.json").write_text("[" * 100_000 + "\n{}\n", "utf-8")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("verb", MISSING)
def test_a_file_that_is_missing_is_exit_code_two_in_every_verb(verb: str, tokenizer_path: Path) -> None:
    assert run([str(tokenizer_path) if one == "TOKENIZER" else one for one in MISSING[verb]]) == 2


@pytest.mark.parametrize("verb", UNREADABLE)
def test_a_file_that_cannot_be_read_is_exit_code_two(verb: str) -> None:
    assert run(UNREADABLE[verb]) == 2


@pytest.mark.parametrize(
    "arguments", [["diagnose"], ["report"], ["doctor"], ["doctor", "--for"], ["plan"], ["plan", "--measured"]]
)
def test_brackets_without_end_are_a_file_that_cannot_be_read(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, "deep.json"]) == 2
    assert "it is nested too deeply" in capsys.readouterr().err


def test_a_device_without_an_end_is_no_recorded_machine() -> None:
    assert run(["doctor", "/dev/zero"]) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "--cache", ""],
        ["doctor", "--data", ""],
        ["doctor", ""],
        ["plan", ""],
        ["plan", "--html", ""],
        ["diagnose", ""],
        ["report", "bad.json", "--out", ""],
        ["watch", "--out", "", "--", "true"],
        ["stage", "a.txt", "--cache", ""],
        ["deploy", "slurm", "", "--out", "x"],
        ["deploy", "slurm", "bad.json", "--out", ""],
        ["prepare", "a.txt", "--out", "x", "--work", ""],
    ],
    ids=" ".join,
)
def test_a_path_of_a_variable_that_is_not_set_is_not_this_folder(
    arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))
    assert run(arguments) == 2
    assert "a variable in the command may not be set" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("number", ["nan", "inf", "-1"])
def test_what_is_no_number_has_no_price(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "bad.json", "--price", number]) == 2
    assert "Invalid value for '--price'" in capsys.readouterr().err


def test_how_to_fix_without_fixing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("--dry-run", "--yes"):
        assert run(["doctor", word]) == 2
        assert "hint: add --fix" in capsys.readouterr().err


def test_a_command_without_a_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["watch", "--", ""]) == 2
    assert "cannot start" in capsys.readouterr().err


def takes_json(verb: str) -> bool:
    return verb not in ("watch", "report", "deploy")


@pytest.mark.parametrize("verb", [verb for verb in MISSING if takes_json(verb)])
def test_a_failure_is_json_too_where_json_was_asked_for(
    verb: str, tokenizer_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run([*(str(tokenizer_path) if one == "TOKENIZER" else one for one in MISSING[verb]), "--json"])
    told = capsys.readouterr()
    assert json.loads(told.out)["error"].keys() == {"message", "hint", "exit_code"}
    assert json.loads(told.out)["error"]["exit_code"] == code
    assert f"error: {json.loads(told.out)['error']['message']}" in told.err


def test_a_failure_without_json_leaves_stdout_empty(capsys: pytest.CaptureFixture[str]) -> None:
    run(["diagnose", "bad.json"])
    assert capsys.readouterr().out == ""


def test_the_json_of_a_watched_program_is_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["watch", "--gpu", "missing.log", "--", "true", "--json"]) == 2
    assert capfd.readouterr().out == ""


def test_wrong_usage_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--json", "--nodez", "3"]) == 2
    assert "did you mean --nodes?" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_faults_are_one_json_document_and_exit_code_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.tar").write_bytes(b"\0" * 10240)
    assert run(["prepare", "index", "corpus"]) == 0
    (folder / "corpus" / "a.tar").write_bytes(b"\1" * 10240)
    capsys.readouterr()
    assert run(["prepare", "verify", "corpus", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["faults"]


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["prepar", "x"], "prepare"),
        (["diagnos", "x"], "diagnose"),
        (["prepare", "verfy", "corpus"], "verify"),
        (["stage", "lss"], "ls"),
        (["checkpoint", "lst", "x"], "ls"),
        (["deploy", "k8", "x"], "k8s"),
        (["metrics", "rulez"], "rules"),
        (["--versoin"], "--version"),
        (["prepare", "a.txt", "--otu", "x"], "--out"),
        (["stage", "--cahce", "x"], "--cache"),
        (["plan", "--nodez", "3"], "--nodes"),
        (["diagnose", "x", "--jsn"], "--json"),
    ],
)
def test_a_misspelled_name_gets_the_nearest(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert f"; did you mean {meant}?\n" in capsys.readouterr().err


def test_a_name_that_is_like_none_gets_no_guess(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["zzz"]) == 2
    assert capsys.readouterr().err == "error: there is no command 'zzz'\nhint: see stoker --help\n"


def test_a_file_that_is_named_like_a_command_is_a_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "verif").write_text("coal", "utf-8")
    assert run(["prepare", "verif"]) == 2
    assert "Missing option '--out'" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["prepare", "stage"])
def test_the_help_of_a_verb_has_the_options_of_its_run(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    group = stoker.get_command(click.Context(stoker), verb)
    assert isinstance(group, click.Group)
    options = [one for one in group.commands["run"].params if isinstance(one, click.Option)]
    assert [one.opts[0] for one in options if f"  {one.opts[0]}" not in shown] == []
    assert all(
        name in shown.partition("Commands:")[2] for name in ("run", "verify" if verb == "prepare" else "ls")
    )


@pytest.mark.parametrize(
    ("words", "begun", "completed"),
    [
        ([], "pre", "prepare"),
        (["plan"], "--sim", "--simulate"),
        (["prepare"], "--tok", "--tokenizer"),
        (["prepare", "data/"], "--tok", "--tokenizer"),
        (["prepare", "data/", "--engine"], "tik", "tiktoken"),
        (["stage"], "--bud", "--budget"),
        (["checkpoint"], "ver", "verify"),
    ],
)
def test_the_tab_key_completes(words: list[str], begun: str, completed: str) -> None:
    shell = ShellComplete(stoker, {}, "stoker", "_STOKER_COMPLETE")
    assert [one.value for one in shell.get_completions(words, begun)] == [completed]


@pytest.mark.parametrize(
    "line", re.findall(r"^_STOKER_COMPLETE=(\w+) stoker", COMPLETION.read_text("utf-8"), re.M)
)
def test_the_documented_line_prints_a_script(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_STOKER_COMPLETE", line)
    with pytest.raises(SystemExit, match="0"):
        run([])
    assert "_STOKER_COMPLETE=" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["plan", "--json"], ["plan", "--json", "--nodes", "x"]])
def test_output_that_has_no_room_is_said_without_a_traceback(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:  # as a full disk
        left = subprocess.run(
            [sys.executable, "-m", "stoker.cli", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert left.returncode in (1, 2)
    assert left.stderr.startswith("error: ")
    assert "Traceback" not in left.stderr


def test_a_reader_that_has_left_gets_no_traceback() -> None:
    end, begin = os.pipe()
    os.close(end)
    with open(begin, "w") as pipe:
        arguments = [sys.executable, "-m", "stoker.cli", "plan", "--json", "--nodes", "x"]
        left = subprocess.run(arguments, stdout=pipe, stderr=subprocess.PIPE, text=True)
    assert left.returncode == 2
    assert "Traceback" not in left.stderr
    assert "Exception ignored" not in left.stderr
