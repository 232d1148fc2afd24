"""`stoker bench path`: what is tried, what is chosen, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.bench.drive import Driven, Workload
from stoker.bench.figures import Bench, Figure, as_lines, say
from stoker.bench.path import Trial, bench_path, knee, usual_trials
from stoker.cli import run
from stoker.errors import StorageError, UsageError
from stoker.history.store import read_store

SMALL = {"size": 8 << 20, "seconds": 0.01}
QUICK = [
    Trial(work=Workload(block=1 << 16, threads=2, seconds=0.01), cache=cache)
    for cache in ("direct", "cold", "warm")
]


def driven(rate: float, *, cpu: float = 0.0) -> Driven:
    return Driven(calls=1, bytes=int(rate), seconds=1.0, cpu_s=cpu, latencies={100: 1})


def trial(threads: int = 1, block: int = 1 << 20) -> Trial:
    return Trial(work=Workload(threads=threads, block=block))


def test_the_knee_is_the_cheapest_setting_near_the_best():
    found = [
        (trial(1), driven(50)),
        (trial(4), driven(97)),
        (trial(16), driven(100)),
        (trial(64), driven(99)),
    ]
    assert knee(found) == found[1]
    assert knee([]) is None


def test_of_two_settings_with_as_many_calls_the_smaller_block_is_taken():
    found = [(trial(4, 4 << 20), driven(100)), (trial(4, 1 << 20), driven(99))]
    assert knee(found) == found[1]


def test_another_s_file_is_neither_written_nor_mapped():
    for one in usual_trials(seconds=1, most_threads=64, reads_only=True):
        assert not one.work.writes
        assert one.work.engine != "mmap"


def test_a_folder_is_measured_and_left_as_it_was(tmp_path):
    found = bench_path(tmp_path, trials=QUICK, **SMALL)
    assert [one.name for one in found.figures][1:] == [one.name for one in QUICK]
    assert all(one.value > 0 and one.limit for one in found.figures)
    assert found.measured["nvme_rate"] == found.figures[1].value
    assert os.listdir(tmp_path) == []


def test_the_usual_table_runs_whole(tmp_path):
    found = bench_path(tmp_path, size=64 << 20, seconds=0.01)
    assert len(found.figures) + len(found.notes) > 15
    assert found.advice


def test_a_file_is_read_and_not_changed(tmp_path):
    path = tmp_path / "shard.bin"
    path.write_bytes(os.urandom(4 << 20))
    before = (path.read_bytes(), path.stat().st_mtime_ns)
    bench_path(path, trials=QUICK)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    with pytest.raises(UsageError, match="only read"):
        bench_path(path, trials=[replace(QUICK[0], work=replace(QUICK[0].work, writes=True))])


def test_a_file_that_is_too_small_says_so(tmp_path):
    path = tmp_path / "small"
    path.write_bytes(bytes(4096))
    with pytest.raises(UsageError, match="too few"):
        bench_path(path)


def test_a_disk_without_room_is_not_filled(tmp_path):
    with pytest.raises(StorageError, match="too little") as refused:
        bench_path(tmp_path, size=1 << 60)
    assert "--size" in refused.value.hint


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["path", "nowhere"], "does not exist"),
        (["path", ".", "--engine", "pread", "--block", "1000"], "no whole pages"),
        (["path", ".", "--engine", "psync"], "psync"),
        (["collective", "--only", "all_sum"], "no operation all_sum"),
        (["collective", "--sizes", "1MiB-8B"], "cannot be"),
        (["accelerators", ".", "--profile", "gpt5"], "no profile"),
        (["pth"], "did you mean path"),
    ],
)
def test_wrong_words_say_what_is_right(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["bench", *words]) == 2
    assert said in capsys.readouterr().err


def test_json_has_every_figure_with_its_unit(tmp_path, capsys):
    words = ["--engine", "pread", "--block", "64KiB", "--size", "8MiB", "--seconds", "0.01", "--json"]
    assert run(["bench", "path", str(tmp_path), *words]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert {one["unit"] for one in plain["figures"]} == {"B/s"}
    assert plain["bench"] == "path"


def test_what_was_measured_goes_into_a_plan(tmp_path, capsys):
    words = ["--engine", "pread", "--size", "8MiB", "--seconds", "0.01", "--json"]
    run(["bench", "path", str(tmp_path), *words])
    result = tmp_path / "path.json"
    result.write_text(capsys.readouterr().out)
    assert run(["plan", "--measured", str(result), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"] == [str(result)]


def test_the_page_stands_alone(tmp_path, capsys):
    words = ["--engine", "pread", "--size", "8MiB", "--seconds", "0.01", "--html", str(tmp_path / "p.html")]
    assert run(["bench", "path", str(tmp_path), *words]) == 0
    page = (tmp_path / "p.html").read_text()
    assert "direct pread" in page
    assert "://" not in page.replace("http://www.w3.org", "")


def test_figures_go_to_the_history_unless_they_should_not(tmp_path, monkeypatch, capsys):
    words = ["bench", "path", str(tmp_path), "--engine", "pread", "--size", "8MiB", "--seconds", "0.01"]
    monkeypatch.setenv("STOKER_HISTORY", str(tmp_path / "history"))
    assert run([*words, "--no-history"]) == 0
    assert not (tmp_path / "history").exists()
    assert run(words) == 0
    (entry,) = read_store(tmp_path / "history").entries
    assert entry.kind == "bench"
    assert {one.better for one in entry.figures} == {"higher"}


@pytest.mark.integration
def test_ctrl_c_leaves_nothing(tmp_path):
    words = ["bench", "accelerators", str(tmp_path), "--size", "64MiB", "--seconds", "60"]
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker.cli", *words],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob(".stoker-bench-*/*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(tmp_path.iterdir()), "it never began"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (2.5e9, "B/s", "2.5 GB/s"),
        (0.0123, "s", "12.3 ms"),
        (0.9, "share", "90.0%"),
        (43_210, "1/s", "43,200/s"),
    ],
)
def test_values_are_said_as_people_say_them(value, unit, said):
    assert say(value, unit) == said


def test_a_table_says_what_was_not_measured():
    figure = Figure(name="read", value=1e9, unit="B/s", limit="the device", beside={"p50_s": 0.001})
    lines = as_lines(Bench(verb="path", of="/data", figures=[figure], notes=["1 trial: no O_DIRECT"]))
    assert lines[2].split() == ["read", "1.0", "GB/s", "p50", "1", "ms", "the", "device"]
    assert lines[-1] == "  - 1 trial: no O_DIRECT"


def test_a_unit_that_nobody_knows_is_refused():
    with pytest.raises(UsageError, match="furlongs"):
        Figure(name="read", value=1.0, unit="furlongs")


def test_usual_trials_that_a_file_is_too_small_for_are_left_out_and_said(tmp_path, monkeypatch):
    """The guide's own 64 MiB were refused on a machine of 16 cores: 64 threads of 4 MiB are 256 MiB."""
    monkeypatch.setattr("stoker.bench.path.usable_cores", lambda: 16)
    found = bench_path(tmp_path, **SMALL)
    assert any("128 KiB × 64 threads" in one.name for one in found.figures)
    assert "too few" in " ".join(found.notes)


def test_every_byte_of_the_file_was_written_before_it_is_read(tmp_path):
    """Space that was only reserved is read from no disk; and 64 KiB could not be filled at all."""
    for size in (1 << 16, (4 << 20) + 4096):
        found = bench_path(tmp_path, size=size, seconds=0.01, trials=QUICK[:1])
        assert found.of.endswith(("4 MiB", "8 MiB"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--engine pread --block 0", "no whole pages"),
        ("--engine pread --block 2GiB", "no whole pages"),
        ("--engine mmap --write", "only read"),
        ("--engine io_uring --threads 1024 --depth 1024 --size 1GiB", "buffers of"),
    ],
)
def test_what_cannot_be_tried_is_refused_before_anything_is_written(tmp_path, capsys, words, said):
    assert run(["bench", "path", str(tmp_path), "--size", "8MiB", "--seconds", "0.01", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_file_smaller_than_a_mebibyte_is_read_warm(tmp_path):
    (tmp_path / "small").write_bytes(bytes(5000))
    warm = Trial(work=Workload(block=4096, seconds=0.01), cache="warm")
    found = bench_path(tmp_path / "small", trials=[warm])
    assert [one.limit for one in found.figures] == ["memory and the processor"]


def test_the_first_write_counts_its_sync(tmp_path, monkeypatch):
    """Buffered, it was the page cache's rate under the name of a sync."""
    now = [0.0]

    def sync(descriptor: int) -> None:
        now[0] += 1e6

    monkeypatch.setattr("stoker.bench.path.time.monotonic", lambda: now[0])
    monkeypatch.setattr("stoker.bench.path.os.fsync", sync)
    found = bench_path(tmp_path, trials=QUICK[:1], **SMALL)
    assert found.figures[0].value < SMALL["size"] / 1e6


def test_pages_that_stay_in_memory_are_not_called_cold(tmp_path, skip_or_fail):
    if not os.access("/dev/shm", os.W_OK):
        skip_or_fail("there is no tmpfs")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        found = bench_path(Path(folder), trials=QUICK, **SMALL)
    assert not any("cold" in one.name for one in found.figures)
    assert any("stay in memory" in note for note in found.notes)


def test_what_was_measured_outlives_a_page_that_cannot_be_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("STOKER_HISTORY", str(tmp_path / "history"))
    words = ["bench", "path", str(tmp_path), "--size", "8MiB", "--seconds", "0.01", "--engine", "pread"]
    assert run([*words, "--html", str(tmp_path / "none" / "page.html")]) == 1
    said = capsys.readouterr()
    assert "sequential read" in said.out
    assert "hint:" in said.err
    assert len(read_store(tmp_path / "history").entries) == 1
