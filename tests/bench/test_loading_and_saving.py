"""`stoker bench loader`, `checkpoint` and URLs: real datasets, saves and stores."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from stoker.bench.checkpoint import bench_checkpoint
from stoker.bench.loader import bench_loader
from stoker.bench.objects import Ranges, bench_objects
from stoker.cli import run
from stoker.errors import StorageError, UsageError


@pytest.fixture
def tokens(corpus, make, tmp_path):
    make(corpus, out=tmp_path / "tokens")
    return str(tmp_path / "tokens")


def test_a_loader_is_measured_in_each_way(tokens):
    options = {"batch_size": 2, "seq_len": 16}
    found = bench_loader(tokens, options=options, seconds=5, most_batches=3, step_s=60.0)
    names = [one.name for one in found.figures]
    assert names[:3] == ["samples, workers=thread", "tokens, workers=thread", "first batch, workers=thread"]
    assert found.figures[1].value == pytest.approx(16 * found.figures[0].value)
    assert found.passed
    assert "will not wait" in found.advice[0]


def test_a_loader_that_is_too_slow_for_a_step_fails(tokens, capsys):
    words = [
        tokens,
        "--batch-size",
        "2",
        "--seq-len",
        "16",
        "--batches",
        "2",
        "--step",
        "1e-9",
        "--json",
    ]
    assert run(["bench", "loader", *words]) == 1
    plain = json.loads(capsys.readouterr().out)
    assert not plain["passed"]
    assert "the loop will wait" in plain["advice"][0]


def test_a_folder_that_is_no_dataset_is_refused(tmp_path, capsys):
    assert run(["bench", "loader", str(tmp_path)]) == 2
    assert "manifest" in capsys.readouterr().err


def test_saves_are_measured_and_gone(tmp_path):
    found = bench_checkpoint(tmp_path, size=1 << 20, saves=2)
    assert {one.name for one in found.figures} >= {"stall of the loop", "until durable", "verified restore"}
    assert all(one.value > 0 for one in found.figures)
    assert os.listdir(tmp_path) == []


def test_a_state_that_has_no_room_is_not_saved(tmp_path):
    with pytest.raises(StorageError, match="are needed"):
        bench_checkpoint(tmp_path, size=1 << 60)
    assert os.listdir(tmp_path) == []


def test_a_state_of_nothing_is_no_measurement(tmp_path):
    with pytest.raises(UsageError, match="measures nothing"):
        bench_checkpoint(tmp_path, size=0)


def test_a_store_is_read_by_ranges(tmp_path):
    for number in range(2):
        (tmp_path / f"{number}.bin").write_bytes(os.urandom(300_000))
    wanted = [Ranges(bytes=100_000, connections=2), Ranges(bytes=100_000, connections=32)]
    found = bench_objects(f"file://{tmp_path}", seconds=0.02, wanted=wanted)
    assert [one.name for one in found.figures] == ["time to first byte", wanted[0].name]
    assert found.notes == [f"{wanted[1].name}: the objects are too small for so many"]
    assert set(found.measured) == {"node_rate", "store_latency"}


def test_one_object_is_measured_too(tmp_path):
    (tmp_path / "one.bin").write_bytes(os.urandom(300_000))
    found = bench_objects(
        f"file://{tmp_path}/one.bin", seconds=0.02, wanted=[Ranges(bytes=1000, connections=1)]
    )
    assert "1 object of 300 kB" in found.of


def test_an_empty_prefix_says_that_there_is_nothing(tmp_path):
    with pytest.raises(UsageError, match="nothing to read"):
        bench_objects(f"file://{tmp_path}/", seconds=0.02)


def test_an_object_of_a_web_server_without_listings_is_measured():
    data = os.urandom(300_000)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer()

        def do_GET(self):
            self.answer()

        def do_PROPFIND(self):
            self.send_response(405)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def answer(self):
            if self.path != "/c/big.bin":
                self.send_error(404)
                return
            start, _, end = self.headers.get("Range", "bytes=0-").partition("=")[2].partition("-")
            body = data[int(start) : int(end) + 1 if end else None]
            self.send_response(206 if "Range" in self.headers else 200)
            self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
            self.send_header("Content-Range", f"bytes {start}-{int(start) + len(body) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    base = f"http://127.0.0.1:{server.server_port}/c"
    try:
        wanted = [Ranges(bytes=1000, connections=2)]
        found = bench_objects(
            f"{base.replace('//', '//user:hunter2@')}/big.bin", seconds=0.02, wanted=wanted
        ).of
        assert "300 kB" in found
        assert "hunter2" not in found, "figures are shown to others"
        with pytest.raises(StorageError, match="cannot list"):
            bench_objects(f"{base}/none.bin", seconds=0.02, wanted=wanted)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.integration
def test_a_bench_that_a_scheduler_ends_leaves_no_files(tmp_path, stoker_environ):
    words = ["bench", "checkpoint", str(tmp_path), "--size", "1MiB", "--saves", "100"]
    program = f"from stoker.cli import run; raise SystemExit(run({words}))"
    process = subprocess.Popen([sys.executable, "-c", program], env=stoker_environ())
    while not list(tmp_path.iterdir()):
        assert process.poll() is None
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
