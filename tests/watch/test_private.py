"""A run is its owner's business: modes of files, secrets of commands and exceptions, odd paths."""

from __future__ import annotations

import stat
import sys
from typing import TYPE_CHECKING, Any

import pytest

from stoker.watch.inside.exceptions import say_exception
from stoker.watch.inside.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SECRET = "hunter2hunter2"
PROGRAM = """
import sys, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
key = sys.argv[2]
raise RuntimeError(
    f"401 from https://me:{key}@host/x?token={key} with --api-key {key}, Authorization: Bearer {key}, "
    f"AWS_SECRET_ACCESS_KEY={key}, {{'password': '{key}'}}"
)
"""


def test_no_secret_of_a_command_or_an_exception_lies_in_a_run_that_only_its_owner_reads(
    run_stoker: Callable[..., Any], tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    plain = [sys.executable, program, "--api-key", SECRET, "-p:password=" + SECRET, "++auth.token=" + SECRET]
    script = f"export HF_TOKEN={SECRET}; exec {' '.join(map(str, plain))}"
    run_stoker("watch", "--gpu", "none", "--out", "run", "--", "sh", "-c", script)
    run = tmp_path / "run"
    found = [path for path in run.rglob("*") if path.is_file()]
    assert [path.name for path in found if SECRET.encode() in path.read_bytes()] == []
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert {
        path.name: oct(stat.S_IMODE(path.stat().st_mode) & 0o077)
        for path in found
        if path.stat().st_mode & 0o077
    } == {}
    assert any("--api-key" in path.read_text(errors="replace") for path in found), "the option's name stays"


@pytest.mark.parametrize("out", ["../up/run", "a:b", "a b/c", "läuft", "link/run"])
def test_a_run_may_lie_anywhere_and_the_programs_own_sitecustomize_still_runs(
    run_stoker: Callable[..., Any], tmp_path: Path, out: str
) -> None:
    own, work = tmp_path / "own", tmp_path / "work"
    own.mkdir(), work.mkdir(), (tmp_path / "there").mkdir()
    (work / "link").symlink_to(tmp_path / "there")
    (own / "sitecustomize.py").write_text("import builtins; builtins.mine = 'mine'\n")
    code = "import builtins, torch; x = torch.ones(1, requires_grad=True)"
    code += "; [(x * 2).sum().backward() for _ in range(4)]"
    command = (sys.executable, "-c", f"{code}; print(builtins.mine)")
    done = run_stoker(
        "watch", "--gpu", "none", "--out", out, "--", *command, cwd=work, env={"PYTHONPATH": str(own)}
    )
    assert (done.rc, done.stdout) == (0, "mine\n"), done.stderr
    assert list((work / out).glob("proc-*.json")), "it attached"
    assert not list((work / out).glob(".attach*"))


def test_what_an_exception_says_of_options_stays_but_for_their_values(probe: Probe, tmp_path: Path) -> None:
    say_exception(
        probe, RuntimeError("['curl', '--token', 'abcdef123'] failed, password=abcdef123, exit code: 12")
    )
    (events,) = tmp_path.glob("events-*.jsonl")
    assert "abcdef123" not in events.read_text()
    assert "exit code: 12" in events.read_text()


def test_the_key_that_a_key_error_misses_is_told(probe: Probe, tmp_path: Path) -> None:
    say_exception(probe, KeyError("layers.0.attn.key.weight"))
    (events,) = tmp_path.glob("events-*.jsonl")
    assert "KeyError: 'layers.0.attn.key.weight'" in events.read_text()


@pytest.fixture
def probe(tmp_path: Path) -> Probe:
    return Probe(tmp_path)
