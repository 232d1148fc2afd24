"""Eight processes want the same dataset; some are killed or paused: the rest get it, once, and whole."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import xxhash
from web_server import WebServer, serve_folder, write_noise

from stoker.stage.landing.maps import entries

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.integration

PROCESSES = 8
ROUNDS = 20
VICTIMS = 3
# A killed process loses what its sockets and lanes hold, some 4 MB over loopback: a ratio wants data beside
# which that is small, as it is beside anything worth staging.
SHARDS, SHARD_BYTES = 4, 96 << 20
MOST = 1.05
MOST_OF_FEW = 1.1  # three rounds are no average


@pytest.fixture(scope="module")
def web(web: WebServer) -> WebServer:
    write_noise(web.root / "corpus", shards=SHARDS, shard_bytes=SHARD_BYTES)
    return web


@contextmanager
def crowd(
    url: str, cache: Path, stoker_environ: Any, *, ttl_s: float = 10.0, locks: str = ""
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    arguments = [url, str(cache), str(PROCESSES), str(ttl_s), *([locks] if locks else [])]
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("crowd.py")), *arguments],
        env=stoker_environ(NO_PROXY="127.0.0.1"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        line = process.stdout.readline()
        pids = json.loads(line) if line else []
        try:
            yield process, pids
        finally:
            for pid in pids if process.poll() is None else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class Watcher(threading.Thread):
    """Looks at the names that readers would open: what is there must be whole from the first moment."""

    def __init__(self, visible: Path, expected: dict[str, str]) -> None:
        super().__init__(daemon=True)
        self._visible, self._expected = visible, expected
        self._seen: set[tuple[str, int]] = set()
        self._ending = threading.Event()
        self.torn: list[str] = []

    def run(self) -> None:
        while not self._ending.wait(0.01):
            for name, digest in self._expected.items():
                with suppress(FileNotFoundError), (self._visible / name).open("rb") as file:
                    inode = os.fstat(file.fileno()).st_ino
                    if (name, inode) not in self._seen:
                        self._seen.add((name, inode))
                        if xxhash.xxh3_64_hexdigest(file.read()) != digest:
                            self.torn.append(name)

    def stop(self) -> None:
        self._ending.set()
        self.join()


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory: these tests are about processes, and a disk's sync would be most of their time."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kill-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def expected(web: WebServer) -> dict[str, str]:
    return {
        path.name: xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in (web.root / "corpus").iterdir()
    }


@contextmanager
def watched(web: WebServer, cache: Path, expected: dict[str, str]) -> Iterator[None]:
    visible = cache / "http" / web.url.removeprefix("http://") / "corpus"
    watcher = Watcher(visible, expected)
    watcher.start()
    try:
        yield
    finally:
        watcher.stop()
    assert watcher.torn == []
    found = {path.name: xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in visible.iterdir()}
    assert found == expected


def results(process: subprocess.Popen[str]) -> list[int]:
    output, errors = process.communicate(timeout=60)
    assert output, errors
    codes: list[int] = json.loads(output)
    assert 1 not in codes, errors
    return codes


def leftovers(cache: Path) -> list[str]:
    """Books of what is not whole: parts, leases, pins, hidden records."""
    books = cache / ".stoker"
    found = [path for name in ("parts", "leases", "pins") for path in (books / name).rglob("*")]
    return [str(path) for path in (*found, *books.glob("units/*.going"))]


def run_again(web: WebServer, cache: Path, run_stoker: Any) -> Any:
    ran = run_stoker("stage", f"{web.url}/corpus", "--cache", cache, "--json", env={"NO_PROXY": "127.0.0.1"})
    assert ran.rc == 0, ran.stderr
    return json.loads(ran.stdout)[0]


def holders(cache: Path) -> set[int]:
    """Processes that are fetching now, as their leases say."""
    found = set()
    for path in entries(cache / ".stoker" / "leases"):
        for record in entries(path):
            with suppress(OSError, ValueError, KeyError, TypeError):
                found.add(json.loads(record.read_bytes())["pid"])
    return found


def wait_for_the_first(cache: Path) -> None:
    deadline = time.monotonic() + 30
    while not holders(cache):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def disturb(pids: list[int], cache: Path, number: int, *, within_s: float) -> None:
    """Send a signal at a random moment to one who fetches, if somebody does, else to anybody. The moment
    is the point: there is nothing to wait for."""
    time.sleep(random.uniform(0, within_s))
    chosen = random.choice(sorted(holders(cache).intersection(pids)) or pids)
    with suppress(ProcessLookupError):  # all were quicker than we
        os.kill(chosen, number)
    pids.remove(chosen)


@pytest.mark.parametrize("locks", ["", "flock-succeeds", "flock-fails"])
def test_killed_processes_cost_almost_nothing(
    locks: str, web: WebServer, expected: Any, stoker_environ: Any, run_stoker: Any, memory: Path
) -> None:
    whole = sum(path.stat().st_size for path in (web.root / "corpus").iterdir())
    ratios = []
    for number in range(3 if locks else ROUNDS):
        cache = memory / str(number)
        before = web.served_bytes()
        with (
            crowd(f"{web.url}/corpus", cache, stoker_environ, locks=locks) as (process, pids),
            watched(web, cache, expected),
        ):
            wait_for_the_first(cache)
            for _ in range(VICTIMS):
                disturb(pids, cache, signal.SIGKILL, within_s=0.2)
            codes = results(process)
        assert set(codes) <= {0, -signal.SIGKILL}
        assert codes.count(0) >= PROCESSES - VICTIMS
        ratios.append((web.served_bytes() - before) / whole)
        if number < 2:
            again = run_again(web, cache, run_stoker)
            assert (again["fetched_bytes"], leftovers(cache)) == (0, [])
        shutil.rmtree(cache)
    print("bytes served per round:", *(f"{ratio:.3f}" for ratio in ratios))
    assert sum(ratios) / len(ratios) <= (MOST_OF_FEW if locks else MOST)


def test_twelve_kills_of_one_download_cost_little(
    require_binary: Any, stoker_environ: Any, run_stoker: Any, memory: Path
) -> None:
    """From a store that gives a connection 8 MB/s, as distant ones do; each is killed a thirteenth further
    on."""
    with serve_folder(memory / "web", nginx=require_binary("nginx"), settings="limit_rate 8m;") as web:
        write_noise(web.root / "corpus", shards=5, shard_bytes=32 << 20)
        whole = sum(path.stat().st_size for path in (web.root / "corpus").iterdir())
        cache = memory / "cache"
        command = [sys.executable, "-m", "stoker.cli", "stage", f"{web.url}/corpus", "--cache", str(cache)]
        for number in range(1, 13):
            with subprocess.Popen(
                command,
                env=stoker_environ(NO_PROXY="127.0.0.1"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            ) as process:
                while process.poll() is None and disk_bytes(cache) < number * whole / 13:
                    time.sleep(0.001)
                process.kill()
        again = run_again(web, cache, run_stoker)
        assert again["fetched_bytes"] < whole
        ratio = web.served_bytes("/corpus") / whole
        print(f"bytes served: {ratio:.3f}")
        assert ratio <= MOST


def disk_bytes(folder: Path) -> int:
    """What the files of a folder hold, holes not counted."""
    found = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it was renamed meanwhile
                found += os.lstat(f"{place}/{name}").st_blocks * 512
    return found


def test_paused_processes_are_overtaken_and_do_no_harm(
    web: WebServer, expected: Any, stoker_environ: Any, run_stoker: Any, memory: Path
) -> None:
    for number in range(4):
        cache = memory / str(number)
        with (
            crowd(f"{web.url}/corpus", cache, stoker_environ, ttl_s=1.0) as (process, pids),
            watched(web, cache, expected),
        ):
            everybody = set(pids)
            wait_for_the_first(cache)
            for _ in range(VICTIMS):
                disturb(pids, cache, signal.SIGSTOP, within_s=0.2)
            time.sleep(random.uniform(0.2, 2.5))  # some wake before they are overtaken, some after
            for pid in everybody.difference(pids):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            assert results(process) == [0] * PROCESSES
        again = run_again(web, cache, run_stoker)
        assert (again["fetched_bytes"], leftovers(cache)) == (0, [])
        shutil.rmtree(cache)
