"""`stoker watch` on programs nobody changed: loops, workers, launchers, frameworks; ends of every kind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stoker.recording import KINDS, RankRecord, Recording
from stoker.watch import runs

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.integration

PROGRAMS = Path(__file__).parent / "programs"
BIN = Path(sys.executable).parent


@pytest.fixture
def watch(run_stoker: Callable[..., Any], tmp_path: Path) -> Callable[..., tuple[Any, Recording]]:
    """Watch a command; gives how `stoker watch` ended and the recording."""

    def run(*command: object, env: dict[str, str] | None = None) -> tuple[Any, Recording]:
        quiet = {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable, **(env or {})}
        done = run_stoker("watch", "--out", "run", "--hz", 10, "--gpu", "none", "--", *command, env=quiet)
        return done, runs.read_recording(tmp_path / "run")

    return run


@pytest.fixture
def watch_pid(run_stoker: Callable[..., Any], tmp_path: Path) -> Callable[..., tuple[Any, Recording]]:
    """Watch a running process until there is in the run what is waited for, then end it."""

    def run(
        process: subprocess.Popen[bytes], until: Callable[[], object], env: dict[str, str] | None = None
    ) -> tuple[Any, Recording]:
        options = ("--out", "run", "--hz", 10, "--gpu", "none", "--pid", process.pid)
        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(run_stoker, "watch", *options, env=env)
            try:
                _until(lambda: until() or watching.done())
            finally:
                process.kill()
        return watching.result(), runs.read_recording(tmp_path / "run")

    return run


def kinds(rank: RankRecord) -> set[str]:
    return {KINDS[kind] for kind in rank.spans.kind}


def seconds(rank: RankRecord, kind: str) -> float:
    mine = rank.spans.kind == KINDS.index(kind)
    return float((rank.spans.end - rank.spans.start)[mine].sum())


def said(rank: RankRecord, what: str) -> list[str]:
    return [event.text for event in rank.events if event.what == what]


def test_a_plain_loop_under_a_shell_script(
    watch: Callable[..., tuple[Any, Recording]], tmp_path: Path
) -> None:
    done, run = watch("sh", PROGRAMS / "train.sh")
    (rank,) = run.ranks
    assert (done.rc, done.stdout) == (0, "trained\nscript done\n")
    assert kinds(rank) >= {
        "startup", "data", "forward", "backward", "optimizer", "evaluation", "checkpoint",
    }  # fmt: skip
    assert len(rank.steps.end) == 6, "two micro-batches make one step"
    assert list(rank.steps.tokens) == [128.0] * 6
    assert rank.steps.flops[0] == 6 * run.facts["params"] * 128
    assert any("loop.py" in text and " train" in text for text in said(rank, "stack")), "the sleep is named"
    assert run.ended == "exit 0"
    assert run.facts["loader"]["batch_size"] == 4
    assert run.hosts[0].samples.columns["trainer_cpu"].size > 5
    assert (tmp_path / "model.pt").exists()
    assert b"stoker" not in (tmp_path / "model.pt").read_bytes(), "nothing of ours travels in the model"


def test_workers_forked_and_spawned_and_a_trainer_that_forks_under_python_I(
    watch: Callable[..., tuple[Any, Recording]], tmp_path: Path
) -> None:
    done, run = watch(sys.executable, "-I", PROGRAMS / "workers.py")
    (rank,) = run.ranks
    assert done.rc == 0, done.stderr
    assert len(list((tmp_path / "run").glob("proc-*.json"))) == 2, "the trainer and its training child"
    assert "checkpoint" not in kinds(rank), "what workers save is not the loop's"
    assert len(rank.steps.end) == 12
    assert seconds(rank, "data") > 0.1
    assert run.hosts[0].samples.columns["workers"].tolist().count(2)
    assert run.facts["loader"]["num_workers"] in (0, 2)
    site = Path(subprocess.__file__).parent
    assert not list(site.rglob("stoker-watch-*.pth")), "nothing stays behind"


def test_two_ranks_of_torchrun(watch: Callable[..., tuple[Any, Recording]]) -> None:
    launcher = [BIN / "torchrun", "--standalone", "--nproc-per-node", 2]
    done, run = watch(*launcher, PROGRAMS / "ranks.py")
    assert done.rc == 0, done.stderr
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert [len(rank.steps.end) for rank in run.ranks] == [5, 5]
    punctual, late = run.ranks
    assert _waited(punctual) > _waited(late) + 0.2, "who waits in collectives is not who comes late"
    assert any("ranks.py" in text for text in said(late, "stack"))


def _waited(rank: RankRecord) -> float:
    """Seconds in collectives since the first step."""
    mine = (rank.spans.kind == KINDS.index("collective")) & (rank.spans.start > rank.steps.start[0])
    return float((rank.spans.end - rank.spans.start)[mine].sum())


def test_accelerate_launch(watch: Callable[..., tuple[Any, Recording]]) -> None:
    launcher = [BIN / "accelerate", "launch", "--cpu", "--num_processes", 1, "--num_machines", 1]
    done, run = watch(
        *launcher, "--mixed_precision", "no", "--dynamo_backend", "no", PROGRAMS / "accelerated.py"
    )
    assert done.rc == 0, done.stderr
    assert len(run.ranks[0].steps.end) == 4
    assert kinds(run.ranks[0]) >= {"data", "forward", "backward", "optimizer", "checkpoint"}


def test_the_hugging_face_trainer(watch: Callable[..., tuple[Any, Recording]]) -> None:
    done, run = watch(sys.executable, PROGRAMS / "hf_trainer.py")
    assert done.rc == 0, done.stderr
    assert len(run.ranks[0].steps.end) == 4
    assert kinds(run.ranks[0]) >= {"data", "forward", "backward", "optimizer", "checkpoint", "evaluation"}


def test_lightning(watch: Callable[..., tuple[Any, Recording]]) -> None:
    done, run = watch(sys.executable, PROGRAMS / "lit.py")
    assert done.rc == 0, done.stderr
    (rank,) = run.ranks
    assert len(rank.steps.end) == 4
    assert kinds(rank) >= {"data", "forward", "backward", "optimizer", "evaluation"}
    backward, optimizer = (rank.spans.kind == KINDS.index(kind) for kind in ("backward", "optimizer"))
    inside = [
        any((rank.spans.start[optimizer] <= start) & (start <= rank.spans.end[optimizer]))
        for start in rank.spans.start[backward]
    ]
    assert all(inside), "it runs the backward inside the optimizer's step"


def test_a_killed_trainer_leaves_a_readable_run(watch: Callable[..., tuple[Any, Recording]]) -> None:
    done, run = watch(sys.executable, PROGRAMS / "loop.py", "kill")
    assert done.rc == 128 + signal.SIGKILL
    assert run.ended.startswith("killed by SIGKILL")
    assert len(run.ranks[0].steps.end) == 6


def test_a_hook_that_fails_is_switched_off_and_the_program_goes_on(
    watch: Callable[..., tuple[Any, Recording]],
) -> None:
    done, run = watch(sys.executable, PROGRAMS / "loop.py", "odd")
    assert (done.rc, done.stdout) == (0, "trained\n")
    assert any("asked for its ndim" in text for text in said(run.ranks[0], "hook off"))
    assert kinds(run.ranks[0]) >= {"backward", "optimizer"}, "the other hooks stay"


def test_the_exit_code_and_arguments_are_the_programs_own(run_stoker: Callable[..., Any]) -> None:
    done = run_stoker("watch", "--", "sh", "-c", 'echo "$@"; exit 7', "--", "--hz", "a b")
    assert (done.rc, done.stdout) == (7, "--hz a b\n")


def test_a_program_that_cannot_be_started_is_wrong_usage(run_stoker: Callable[..., Any]) -> None:
    done = run_stoker("watch", "--", "no-such-program")
    assert done.rc == 2
    assert "cannot start no-such-program" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_passed_on(
    number: signal.Signals, stoker_environ: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    script = f"trap 'echo got it; exit 5' {number.name[3:]}; echo ready; while :; do sleep 0.05; done"
    command = [sys.executable, "-m", "stoker.cli", "watch", "--gpu", "none", "--", "bash", "-c", script]
    with subprocess.Popen(
        command, env=stoker_environ(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (5, "got it\n")


def test_a_running_process_is_observed_from_outside(
    watch_pid: Callable[..., tuple[Any, Recording]], tmp_path: Path
) -> None:
    def sampled() -> bool:
        hosts = runs.read_recording(tmp_path / "run").hosts if list(tmp_path.glob("run/host-*.rows")) else ()
        return any(len(host.samples.t) >= 3 for host in hosts)

    with subprocess.Popen(["sleep", "60"]) as process:
        done, run = watch_pid(process, until=sampled)
    assert done.rc == 0, done.stderr
    assert run.ended == "ended"
    assert any("from outside" in line for line in run.facts["missing"])
    # it sleeps; the samples after these may have met it as it was ended
    assert run.hosts[0].samples.columns["trainer_running"][:3].tolist() == [0, 0, 0]


def test_py_spy_names_the_line_a_running_process_stands_in(
    watch_pid: Callable[..., tuple[Any, Recording]], tmp_path: Path
) -> None:
    script = tmp_path / "busy.py"
    script.write_text("import time\n\ndef decode():\n    print(flush=True)\n    time.sleep(60)\n\ndecode()\n")
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        done, run = watch_pid(process, until=lambda: _in_some(tmp_path, "events-*.jsonl", '"stack"'))
    assert done.rc == 0, done.stderr
    assert [str(line) for line in run.facts["missing"] if "stacks" in line] == []
    assert said(run.ranks[0], "stack")[0] == f"{script}:5 decode"


def test_what_py_spy_may_not_read_is_said(
    watch_pid: Callable[..., tuple[Any, Recording]], tmp_path: Path
) -> None:
    refused = tmp_path / "bin" / "py-spy"
    refused.parent.mkdir()
    refused.write_text(
        "#!/bin/sh\necho 'Permission Denied: Try running again with elevated permissions' >&2\nexit 1\n"
    )
    refused.chmod(0o755)
    with subprocess.Popen(["sleep", "60"]) as process:
        path = {"PATH": f"{refused.parent}:{os.environ['PATH']}"}
        _, run = watch_pid(process, until=lambda: _in_some(tmp_path, "node-*.json", "stacks"), env=path)
    assert any(line.startswith("no Python stacks: Permission Denied") for line in run.facts["missing"])


def test_what_torch_compiles_finds_nothing_of_ours(watch: Callable[..., tuple[Any, Recording]]) -> None:
    done, run = watch(sys.executable, PROGRAMS / "compiled.py")
    assert (done.rc, done.stdout) == (0, "compiled\n"), done.stderr
    assert len(run.ranks[0].steps.end) == 5
    assert said(run.ranks[0], "hook off") == []


def test_where_a_run_cannot_be_written_nothing_is_started(
    run_stoker: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    done = run_stoker("watch", "--out", "file", "--gpu", "none", "--", "echo", "started")
    assert (done.rc, done.stdout) == (2, "")
    assert "cannot be written to file: File exists\nhint: give another folder" in done.stderr


def test_a_run_folder_that_goes_away_takes_nothing_with_it(run_stoker: Callable[..., Any]) -> None:
    script = 'rm -rf run; "$PYTHON" "$LOOP" odd && exit 5'
    env = {"PYTHON": sys.executable, "LOOP": str(PROGRAMS / "loop.py"), "OMP_NUM_THREADS": "1"}
    done = run_stoker("watch", "--out", "run", "--hz", 20, "--gpu", "none", "--", "sh", "-c", script, env=env)
    assert (done.rc, done.stdout) == (5, "trained\n")
    assert "Traceback" not in done.stderr


def test_a_finished_run_is_not_written_into(run_stoker: Callable[..., Any]) -> None:
    assert run_stoker("watch", "--out", "run", "--gpu", "none", "--", "true").rc == 0
    done = run_stoker("watch", "--out", "run", "--gpu", "none", "--", "true")
    assert done.rc == 2
    assert "finished run" in done.stderr


def test_a_run_can_be_read_while_it_lasts_and_when_its_watcher_was_killed(
    stoker_environ: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "stoker.cli",
        "watch",
        "--out",
        "run",
        "--gpu",
        "none",
        "--",
        "sleep",
        "60",
    ]
    process = subprocess.Popen(command, env=stoker_environ(), cwd=tmp_path, start_new_session=True)
    try:
        _until(lambda: list(tmp_path.glob("run/node-*.json")))
        assert runs.read_recording(tmp_path / "run").ended == "running"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert runs.read_recording(tmp_path / "run").ended == "lost"


def _in_some(folder: Path, files: str, text: str) -> bool:
    """Whether a text stands in a file of the run."""
    return any(text in path.read_text() for path in folder.glob(f"run/{files}"))


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_foreign_environment_needs_nothing_but_torch(
    watch: Callable[..., tuple[Any, Recording]], tmp_path: Path
) -> None:
    """An interpreter that sees torch but neither stoker nor click: hooks come from the watcher's files."""
    import torch

    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("torch", "torchgen", "typing_extensions.py", "sympy", "mpmath", "jinja2", "markupsafe",
                 "networkx", "filelock", "fsspec", "functorch", "packaging"):  # fmt: skip
        place = Path(torch.__file__).parents[1] / name
        if place.exists():
            (bare / name).symlink_to(place)
    python = shutil.which("python3", path=os.pathsep.join([f"{sys.base_prefix}/bin", "/usr/bin"]))
    body = f"import sys; sys.path[:] = [{str(bare)!r}, *sys.path]; sys.argv = ['x']; " + (
        "sys.path[:] = [p for p in sys.path if not p.endswith('src')]; import runpy; "
        f"runpy.run_path({str(PROGRAMS / 'loop.py')!r}, run_name='__main__'); "
        "print('stoker' in sys.modules, 'click' in sys.modules)"
    )
    done, run = watch(python, "-c", body, env={"PYTHONPATH": "", "PYTHONWARNINGS": "ignore"})
    assert done.rc == 0, done.stderr
    assert done.stdout.endswith("False False\n"), "the program imports what it would without us"
    assert len(run.ranks[0].steps.end) == 6
