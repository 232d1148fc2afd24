"""`watch` in this process: what comes before, beside and after the command it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from stoker.errors import UsageError
from stoker.watch import runs
from stoker.watch.command import Options, watch
from stoker.watch.inject import injected
from stoker.watch.runs.columns import read_rows
from stoker.watch.runs.files import Rows, node_name

if TYPE_CHECKING:
    from pathlib import Path


def options(tmp_path: Path, *, gpu: str = "none") -> Options:
    return Options(folder=tmp_path / "run", gpu=gpu, hz=50)


def test_nothing_is_started_where_the_cards_cannot_be_read_as_asked(tmp_path: Path) -> None:
    started = tmp_path / "started"
    with pytest.raises(UsageError, match="no such file"):
        watch(["touch", str(started)], options(tmp_path, gpu=str(tmp_path / "no.log")))
    assert not started.exists()


def test_a_command_that_could_not_be_started_leaves_the_folder_to_the_next_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot start"):
        watch(["no-such-program"], options(tmp_path))
    assert watch(["sleep", "0.1"], options(tmp_path)) == 0
    run = runs.read_recording(tmp_path / "run")
    assert (len(run.hosts), run.ended) == (1, "exit 0")
    assert 0 < run.hosts[0].samples.mean("mem_total") < 1e15
    assert run.hosts[0].samples.t.max() < 60


def test_an_isolated_python_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot start"):
        watch(["python-of-nowhere", "-I", "train.py"], options(tmp_path))


def test_the_exit_code_is_the_commands_where_sigchld_was_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert watch(["sh", "-c", "exit 3"], options(tmp_path)) == 3
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_signal_that_may_not_be_passed_on_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command has become another user's: sudo."""
    kill, refused = os.kill, []

    def refuse(pid: int, number: int) -> None:
        refused.append(number)
        kill(pid, signal.SIGKILL)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refuse)
    told = ["sh", "-c", "kill -USR1 $PPID; exec sleep 60"]
    assert watch(told, options(tmp_path)) == 128 + signal.SIGKILL
    assert refused == [signal.SIGUSR1]


def test_watchers_of_one_run_do_not_take_each_others_hooks_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with injected(["python"], tmp_path, {}) as mine:
        monkeypatch.setattr(os, "getpid", lambda: 4_000_001)
        with injected(["python"], tmp_path, {}) as theirs:
            assert mine["PYTHONPATH"] != theirs["PYTHONPATH"]
        monkeypatch.undo()
        assert os.path.exists(os.path.join(mine["PYTHONPATH"], "sitecustomize.py"))
    assert list(tmp_path.iterdir()) == []


def test_a_pth_of_another_node_is_not_taken_for_a_stale_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.watch.inject._site_folder", lambda _: tmp_path)
    theirs, stale = (tmp_path / f"stoker-watch-{node}-4000001.pth" for node in ("elsewhere", node_name()))
    for path in (theirs, stale):
        path.touch()
    with injected([sys.executable, "-I", "train.py"], tmp_path / "run", {}):
        assert theirs.exists()
        assert not stale.exists()


def test_a_task_that_comes_late_joins_the_run_of_its_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`srun stoker watch`: another task may have ended before; a requeued job is another run."""
    for name, value in {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    assert watch(["true"], options(tmp_path)) == 0
    with pytest.raises(UsageError, match="finished run"):
        watch(["true"], options(tmp_path))
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert watch(["sh", "-c", "exit 3"], options(tmp_path)) == 3
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with pytest.raises(UsageError, match="finished run"):
        watch(["true"], options(tmp_path))


@pytest.mark.long
def test_cores_are_those_that_the_trainer_may_use_and_not_its_watcher(tmp_path: Path) -> None:
    first = min(os.sched_getaffinity(0))
    program = f"import os, torch; os.sched_setaffinity(0, [{first}]); x = torch.ones(1, requires_grad=True)"
    program += "; [(x * 2).sum().backward() for _ in range(4)]; import time; time.sleep(1.5)"
    watch([sys.executable, "-c", program], Options(folder=tmp_path / "run", gpu="none", hz=10))
    (host,) = runs.read_recording(tmp_path / "run").hosts
    assert host.cpus == 1


def test_a_second_writer_of_samples_begins_a_part_of_its_own(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        rows = Rows(tmp_path / "host-a.rows")
        rows.add(value, {"cpu": value})
        rows.close()
    samples = read_rows(tmp_path / "host-a.rows", shift_s=0.0)
    assert samples.t.tolist() == samples.columns["cpu"].tolist() == [1.0, 2.0]


def test_a_row_cut_short_by_a_full_disk_spoils_none_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, write = Rows(tmp_path / "host-a.rows"), os.write
    rows.add(1.0, {"cpu": 1.0, "mem": 1.0})
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:5]))
    rows.add(2.0, {"cpu": 2.0, "mem": 2.0})
    monkeypatch.undo()
    rows.add(3.0, {"cpu": 3.0, "mem": 3.0})
    rows.close()
    samples = read_rows(tmp_path / "host-a.rows", shift_s=0.0)
    assert samples.t.tolist() == samples.columns["mem"].tolist() == [1.0, 3.0]


@pytest.mark.parametrize("trouble", ["", "undefined_name"])
@pytest.mark.parametrize("stoker_is_there", [True, False])
def test_a_programs_own_sitecustomize_is_run_as_without_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str, stoker_is_there: bool
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text(f"print('own')\n{trouble}\n")
    environ = {"PYTHONPATH": str(own)}
    if not stoker_is_there:
        monkeypatch.setattr("stoker.watch.inside.boot.__file__", str(tmp_path / "boot.py"))
    with injected(["python"], tmp_path / "run", environ) as child_environ:
        plain, watched = (
            subprocess.run(
                [sys.executable, "-c", "import sys; print(sys.path)"], env=env, capture_output=True, text=True
            )
            for env in (environ, child_environ)
        )
    assert (watched.stdout, watched.stderr) == (plain.stdout, plain.stderr)
