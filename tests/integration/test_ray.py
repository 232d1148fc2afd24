"""`stoker prepare --on ray` on a real Ray cluster, through the command."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from clusters import FILES, MARKED_TASK, Bench, make_bench, wait_until, write_corpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def environment(require_binary: Callable[[str], str]) -> Iterator[dict[str, str]]:
    """A folder in which no cluster of this machine has left a note (not pytest's: sockets allow no long
    path), and a token, so that nobody else joins the cluster."""
    require_binary("ray")
    folder = tempfile.mkdtemp(prefix="ray-")
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    yield {**plain, **token, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def address(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster as `ray start` makes it."""
    port = _free_port()
    log = tmp_path_factory.mktemp("ray") / "head.log"
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=2",
        "--include-dashboard=false", "--node-ip-address=127.0.0.1", f"--port={port}",
        "--object-store-memory=100000000",
    ]  # fmt: skip
    with log.open("wb") as output:
        head = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        wait_until(lambda: b"Ray runtime started" in log.read_bytes(), "the head node runs")
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        head.wait(timeout=60)


@pytest.fixture(scope="module")
def cluster_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def bench(tmp_path: Path, cluster_corpus: Path, tokenizer_path: Path) -> Bench:
    return make_bench(tmp_path, corpus=cluster_corpus, tokenizer=tokenizer_path)


def test_a_task_whose_worker_is_killed_is_retried_and_the_dataset_is_the_one_made_here(
    bench: Bench, address: str, environment: dict[str, str]
) -> None:
    bench.flag.touch()
    options = ("--filter", "trouble:die_once")
    done = bench.run("out", "--on", "ray", "--ray-address", address, *options, environment=environment)
    assert done.returncode == 0, done.stderr
    assert not bench.flag.exists(), "no worker was killed"
    assert bench.dataset("out") == bench.made_here(*options)


def test_a_failing_task_is_named_and_the_others_land(
    bench: Bench, address: str, environment: dict[str, str]
) -> None:
    bench.flag.touch()
    options = ("--on", "ray", "--ray-address", address, "--filter", "trouble:fail", "--workers", "1")
    done = bench.run("out", *options, environment=environment)
    assert done.returncode == 1
    assert f"map task {MARKED_TASK}: " in done.stderr
    assert "the filter trouble:fail: RuntimeError: the flag is up" in done.stderr
    assert bench.done("out") == FILES - 1


@pytest.mark.slow  # as on Slurm, where it is tried each time
def test_a_curated_dataset_is_the_same_as_here(
    bench: Bench, address: str, environment: dict[str, str]
) -> None:
    options = ("--curate", str(Path(__file__).with_name("recipe.json")))
    done = bench.run("out", "--on", "ray", "--ray-address", address, *options, environment=environment)
    assert done.returncode == 0, done.stderr
    assert bench.dataset("out") == bench.made_here(*options)


def test_ctrl_c_leaves_no_task_running_and_the_same_command_goes_on(
    bench: Bench, address: str, environment: dict[str, str]
) -> None:
    bench.flag.touch()
    options = ("--on", "ray", "--ray-address", address, "--filter", "trouble:block")
    with bench.started_run("out", *options, environment=environment) as driver:
        wait_until(bench.started.exists, "the marked task runs")
        driver.send_signal(signal.SIGINT)
        assert driver.wait(timeout=60) == 130, bench.said("out")
    worker = Path("/proc", bench.started.read_text())
    wait_until(lambda: not worker.exists(), "the worker of the cancelled task is gone")

    bench.flag.unlink()
    done = bench.run("out", *options, environment=environment)
    assert done.returncode == 0, done.stderr
    assert "done before" in done.stderr


def test_a_work_folder_that_a_node_does_not_see_is_named(
    bench: Bench, address: str, environment: dict[str, str]
) -> None:
    program = f"""
from pathlib import Path
from stoker.prepare.launch.ledger import Ledger
from stoker.prepare.launch.ray import RayCluster
with RayCluster(entry="stoker.prepare.tasks:run_task", address={address!r}) as cluster:
    cluster.run(Ledger(folder=Path("/not/mounted/here"), plan="0"), "map", [0], print)
"""
    done = bench.run_python("-c", program, environment=environment)
    assert "StokerError: the Ray node" in done.stderr
    assert "does not see /not/mounted/here\nhint: name a folder that every node mounts" in done.stderr


def test_without_a_cluster_one_is_started_and_ended(bench: Bench, environment: dict[str, str]) -> None:
    alone = {name: value for name, value in environment.items() if not name.startswith("RAY_")}
    alone |= {"RAY_TMPDIR": tempfile.mkdtemp(prefix="ray-"), "HOME": str(bench.folder / "home")}
    try:
        done = bench.run("out", "--on", "ray", environment=alone)
        assert done.returncode == 0, done.stderr
        assert bench.dataset("out") == bench.made_here()
        wait_until(lambda: not _processes_that_name(alone["RAY_TMPDIR"]), "the cluster has ended")
        assert not (bench.folder / "home").exists(), "Ray kept its token"
    finally:
        shutil.rmtree(alone["RAY_TMPDIR"])


def test_an_address_where_nobody_answers_is_told_at_once(bench: Bench, environment: dict[str, str]) -> None:
    nowhere = f"127.0.0.1:{_free_port()}"
    done = bench.run("out", "--on", "ray", "--ray-address", nowhere, environment=environment)
    assert done.returncode == 1
    assert f"error: no Ray cluster answers at {nowhere}\nhint: " in done.stderr


def _free_port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _processes_that_name(text: str) -> list[str]:
    """Command lines of processes that mention a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has just ended
            continue
        if text in line:
            found.append(line)
    return found
