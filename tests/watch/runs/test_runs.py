"""The run folder: what processes write is read back as one recording, whole, merged, on one clock."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.errors import BadInputError
from stoker.recording import KINDS
from stoker.spans import FIRST, RECORD, Ring
from stoker.watch import runs
from stoker.watch.runs.alive import own_mark
from stoker.watch.runs.columns import read_events, read_rows
from stoker.watch.runs.files import VERSION, Clock, Events, Rows, process_key, write_meta

if TYPE_CHECKING:
    from pathlib import Path

BEGAN = 1_700_000_000.0


class Process:
    """Writes what a training process would; its clock reads `offset_s` less than the time of day."""

    def __init__(
        self, folder: Path, *, rank: int, pid: int, boot: str = "b", offset_s: float = BEGAN, **facts: Any
    ) -> None:
        self.key = process_key(boot, pid)
        clock = {"boot": boot, "offset_s": offset_s}
        known = {"key": self.key, "pid": pid, "node": boot, "rank": rank, "began": BEGAN, "clock": clock}
        write_meta(folder / f"proc-{self.key}.json", {**known, **facts})
        self.spans = Ring(folder / f"spans-{self.key}.ring", capacity=64, rank=rank)
        self.steps = Ring(folder / f"steps-{self.key}.ring", capacity=64, rank=rank)
        self.events = Events(folder / f"events-{self.key}.jsonl")

    def span(self, kind: str, start: float, end: float, *, step: int = 0, thread: int = 0) -> None:
        self.spans.write(kind, start, end, step, 0, thread)

    def step(self, number: int, start: float, end: float, *, tokens: int = -1, thread: int = 0) -> None:
        self.steps.write("step", start, end, number, tokens, thread)


def watcher(folder: Path, **facts: Any) -> None:
    clock = {"boot": "b", "offset_s": BEGAN}
    known = {"title": "train.py", "node": "b", "pid": os.getpid(), "began": BEGAN, "clock": clock}
    write_meta(folder / "node-b-1.json", {**known, "cpus": 2, "samples": True, **facts})


def test_a_folder_without_a_run_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="holds no run"):
        runs.read_recording(tmp_path)


def test_spans_and_steps_of_the_loops_thread_are_read_back(tmp_path: Path) -> None:
    watcher(tmp_path, ended="exit 0", ended_at=BEGAN + 10)
    process = Process(tmp_path, rank=0, pid=7, params=100)
    process.span("data", 1.0, 2.0, thread=3)
    process.span("load.wait", 2.0, 2.5, thread=3)
    process.span("load.assemble", 2.0, 2.5, thread=3)
    process.span("data", 1.0, 9.0, thread=0)
    process.step(0, 1.0, 4.0, tokens=32, thread=3)
    run = runs.read_recording(tmp_path)
    (rank,) = run.ranks
    assert [KINDS[kind] for kind in rank.spans.kind] == ["data", "data"]
    assert rank.spans.end.tolist() == [2.0, 2.5]
    assert (rank.steps.tokens[0], rank.steps.flops[0]) == (32.0, 6 * 100 * 32.0)
    assert (run.title, run.wall_s, run.ended) == ("train.py", 10.0, "exit 0")


def test_unknown_tokens_are_not_a_number(tmp_path: Path) -> None:
    process = Process(tmp_path, rank=0, pid=7)
    process.step(0, 1.0, 4.0)
    (rank,) = runs.read_recording(tmp_path).ranks
    assert np.isnan(rank.steps.tokens[0])
    assert np.isnan(rank.steps.flops[0])


def test_a_rank_that_was_restarted_is_one_rank(tmp_path: Path) -> None:
    for pid, at in ((8, 5.0), (7, 1.0)):
        process = Process(tmp_path, rank=0, pid=pid)
        process.span("data", at, at + 1)
        process.step(0, at, at + 2)
    Process(tmp_path, rank=0, pid=9).span("checkpoint", 0.0, 1.0)  # never trained: some helper of the job
    (rank,) = runs.read_recording(tmp_path).ranks
    assert rank.steps.start.tolist() == [1.0, 5.0]
    assert len(rank.spans.kind) == 2


def test_words_of_a_command_that_are_no_utf8_can_be_shown(tmp_path: Path) -> None:
    watcher(tmp_path, title="caf\udce9.py")
    Process(tmp_path, rank=0, pid=7).events.say("exception", "caf\udce9")
    run = runs.read_recording(tmp_path)
    assert (run.title, run.ranks[0].events[0].text) == ("caf?.py", "caf?")


def test_samples_of_a_month_are_read_in_the_memory_of_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.watch.runs.columns.ROWS", 100)
    for part, name in enumerate(("cpu", "mem")):
        rows = Rows(tmp_path / "host-b.rows")
        for t in range(700):
            rows.add(700 * part + t, {name: t})
        rows.close()
    samples = read_rows(tmp_path / "host-b.rows", shift_s=0.0)
    assert samples.t.tolist() == [*range(0, 700, 14), 699, *range(700, 1400, 14), 1399]
    assert samples.columns["cpu"][:3].tolist() == [0.0, 14.0, 28.0]
    assert np.isnan(samples.columns["cpu"][-1])


def test_of_processes_that_train_as_one_rank_at_the_same_time_one_is_shown(tmp_path: Path) -> None:
    for pid, steps in ((7, 3), (8, 5)):
        process = Process(tmp_path, rank=0, pid=pid)
        for number in range(steps):
            process.span("data", number, number + 0.5, step=number)
            process.step(number, number, number + 1)
    run = runs.read_recording(tmp_path)
    (rank,) = run.ranks
    assert rank.steps.number.tolist() == [0, 1, 2, 3, 4]
    assert run.facts["missing"] == ["1 more that trained as rank 0 at the same time: watch each by itself"]


def test_a_clock_that_is_set_during_a_run_moves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher(
        tmp_path, clock={"boot": Clock.here().boot, "offset_s": BEGAN}, began=BEGAN + time.monotonic() - 10
    )
    process = Process(tmp_path, rank=0, pid=7, boot=Clock.here().boot, offset_s=BEGAN + 3600)
    at = time.monotonic()
    process.span("data", at - 5, at - 4)
    process.step(0, at - 5, at - 2)
    monkeypatch.setattr(time, "time", lambda: BEGAN + time.monotonic() + 3600)
    run = runs.read_recording(tmp_path)
    assert run.ranks[0].steps.end.tolist() == pytest.approx([8.0], abs=1)
    assert 10 <= run.wall_s < 600


def test_samples_of_a_machine_whose_clock_is_off_move_with_its_ranks(tmp_path: Path) -> None:
    watcher(tmp_path)
    facts = {"title": "train.py", "pid": os.getpid(), "cpus": 2, "samples": True, "began": BEGAN + 100}
    write_meta(
        tmp_path / "node-c-1.json", {**facts, "node": "c", "clock": {"boot": "c", "offset_s": BEGAN + 100}}
    )
    rows = Rows(tmp_path / "host-c.rows")
    rows.add(5.0, {"cpu": 1.0})
    rows.close()
    for boot, rank, offset_s in (("b", 0, BEGAN), ("c", 1, BEGAN + 100)):
        process = Process(tmp_path, rank=rank, pid=7, boot=boot, offset_s=offset_s)
        for number in range(4):
            process.span("collective", number, number + 0.5, step=number)
    host = next(host for host in runs.read_recording(tmp_path).hosts if host.node == "c")
    assert host.samples.t.tolist() == [5.0]


def test_what_a_launcher_takes_is_startup(tmp_path: Path) -> None:
    process = Process(tmp_path, rank=0, pid=7)
    process.span("startup", 3.0, 5.0)
    (rank,) = runs.read_recording(tmp_path).ranks
    assert (rank.spans.start[0], rank.spans.end[0]) == (0.0, 5.0)


def test_a_ring_that_came_round_makes_a_shorter_recording(tmp_path: Path) -> None:
    watcher(tmp_path, ended="exit 0", ended_at=BEGAN + 100)
    process = Process(tmp_path, rank=0, pid=7)
    for number in range(100):
        process.span("data", number, number + 0.5, step=number)
        process.step(number, number, number + 1)
    rows = Rows(tmp_path / "host-b.rows")
    for t in range(100):
        rows.add(t, {"cpu": t})
    rows.close()
    run = runs.read_recording(tmp_path)
    assert (run.facts["dropped_s"], run.wall_s) == (36.0, 64.0)
    assert run.ranks[0].spans.start[0] == 0.0
    assert run.ranks[0].steps.number[0] == 36
    assert run.hosts[0].samples.columns["cpu"][0] == 36.0


def test_lines_and_files_that_are_damaged_are_left_out(tmp_path: Path) -> None:
    process = Process(tmp_path, rank=0, pid=7)
    process.step(0, 0.0, 1.0)
    process.events.say("stack", "train.py:3 main")
    path = tmp_path / f"events-{process.key}.jsonl"
    path.write_text('{"t": 1, "wh\n\nnull\n[]\n' + path.read_text())
    (tmp_path / "proc-b-8.json").write_text('{"another": "program\'s"}')
    (rank,) = runs.read_recording(tmp_path).ranks
    assert [event.text for event in rank.events] == ["train.py:3 main"]


def test_of_a_ring_whose_copy_was_cut_the_beginning_is_read(tmp_path: Path) -> None:
    process = Process(tmp_path, rank=0, pid=7)
    for number in range(10):
        process.step(number, float(number), number + 1.0)
    os.truncate(process.steps.path, FIRST + 4 * RECORD.size + 7)
    assert runs.read_recording(tmp_path).ranks[0].steps.number.tolist() == [0, 1, 2, 3]


def test_a_run_of_another_version_is_refused(tmp_path: Path) -> None:
    Process(tmp_path, rank=0, pid=7, version=VERSION + 1)
    with pytest.raises(BadInputError, match=f"version {VERSION + 1}"):
        runs.read_recording(tmp_path)


def test_why_a_process_has_no_files_is_said(tmp_path: Path) -> None:
    watcher(tmp_path)
    Events(tmp_path / "events-b-9.jsonl").say("hook off", "recording: disk full", hook="recording")
    Events(tmp_path / "events-b-9.jsonl").say("hook off", "loader: odd", hook="loader")
    assert runs.read_recording(tmp_path).facts["missing"] == [
        "a process was not recorded: recording: disk full"
    ]


def test_tokens_that_stoker_fed_are_those_of_the_step_they_were_handed_out_for(tmp_path: Path) -> None:
    process = Process(tmp_path, rank=0, pid=7, params=2)
    for number, tokens in enumerate((0, 8, 16)):
        if tokens:  # what the loader said before the process was seen to train is not there
            process.spans.write("load.tokens", number + 0.1, number + 0.1, -1, tokens, 0)
        process.step(number, float(number), number + 1.0)
    (rank,) = runs.read_recording(tmp_path).ranks
    np.testing.assert_array_equal(rank.steps.tokens, [np.nan, 8, 16])
    np.testing.assert_array_equal(rank.steps.flops[1:], [8 * 12, 16 * 12])


@given(skew_s=st.floats(-3600, 3600), jitter_s=st.floats(0, 0.01))
def test_clock_skew_between_nodes_is_removed_by_collective_ends(
    tmp_path_factory: pytest.TempPathFactory, skew_s: float, jitter_s: float
) -> None:
    folder = tmp_path_factory.mktemp("run")
    here = Process(folder, rank=0, pid=7, boot="a")
    there = Process(folder, rank=1, pid=7, boot="b", offset_s=BEGAN)
    for step in range(5):
        end = step + 0.5
        here.span("collective", step + 0.1, end, step=step)
        here.span("collective", step + 0.2, end, step=step)  # the wait inside it
        there.span("collective", step + 0.4 + skew_s, end + jitter_s * (step % 2) + skew_s, step=step)
    ranks = runs.read_recording(folder).ranks
    outer = ranks[0].spans.end
    assert np.abs(ranks[1].spans.end - outer).max() <= jitter_s + 1e-6


def test_without_collectives_the_time_of_day_is_believed(tmp_path: Path) -> None:
    Process(tmp_path, rank=0, pid=7, boot="a").span("data", 1.0, 2.0)
    Process(tmp_path, rank=1, pid=7, boot="b", offset_s=BEGAN - 50.0).span("data", 51.0, 52.0)
    assert [rank.spans.start[0] for rank in runs.read_recording(tmp_path).ranks] == [1.0, 1.0]


def test_a_run_whose_watcher_lives_is_running_and_its_wall_goes_on(tmp_path: Path) -> None:
    clock = Clock.here().as_dict()
    watcher(tmp_path, began=time.time() - 5, clock=clock)
    run = runs.read_recording(tmp_path)
    assert run.ended == "running"
    assert run.wall_s >= 5
    (missing,) = run.facts["missing"]
    assert missing.startswith("no training process attached: only the machine was observed")


@pytest.mark.parametrize("where", ["this machine", "another container", "another machine"])
def test_a_watcher_that_was_killed_is_lost_wherever_its_run_is_read(tmp_path: Path, where: str) -> None:
    """Its number is in use: every container has a process 1, and numbers come again."""
    clock, (space, began) = Clock.here().as_dict(), own_mark()
    if where == "another machine":
        clock["boot"] = "another"
    mark = [space if where == "this machine" else "another", f"{began}1"]
    watcher(tmp_path, began=clock["offset_s"], clock=clock, mark=mark)
    rows = Rows(tmp_path / "host-b.rows")
    rows.add(7.0, {"cpu": 1.0})
    rows.close()
    for path in tmp_path.iterdir():
        os.utime(path, (BEGAN, BEGAN))
    run = runs.read_recording(tmp_path)
    assert (run.ended, run.wall_s) == ("lost", pytest.approx(7.0, abs=1e-3))


@pytest.mark.parametrize("other", ["", "another"])
def test_a_watcher_that_lives_is_running_also_for_another_container(tmp_path: Path, other: str) -> None:
    space, began = own_mark()
    watcher(tmp_path, clock=Clock.here().as_dict(), mark=[space + other, began])
    assert runs.read_recording(tmp_path).ended == "running"


def test_rows_take_new_columns_and_leave_out_a_torn_row(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "host-a.rows")
    rows.add(1.0, {"cpu": 5.0, "never": float("nan")})
    rows.add(2.0, {"cpu": 6.0, "disk_read": 1e12})
    rows.add(3.0, {"cpu": 7.0})
    rows.close()
    with (tmp_path / "host-a.1.rows").open("ab") as file:
        file.write(b"torn")
    samples = read_rows(tmp_path / "host-a.rows", shift_s=-1.0)
    assert samples.t.tolist() == [0.0, 1.0, 2.0]
    assert samples.columns["cpu"].tolist() == [5.0, 6.0, 7.0]
    assert np.isnan(samples.columns["disk_read"][[0, 2]]).all()
    assert samples.columns["disk_read"][1] == pytest.approx(1e12, rel=1e-6)
    assert "never" not in samples.columns


def test_events_are_read_back_without_a_torn_line(tmp_path: Path) -> None:
    Events(tmp_path / "events").say("stack", "a.py:3 f", seconds=1.5)
    with (tmp_path / "events").open("a") as file:
        file.write('{"t": 1')
    (event,) = read_events(tmp_path / "events", shift_s=0.0)
    assert (event.what, event.text, event.facts) == ("stack", "a.py:3 f", {"seconds": 1.5})
    assert read_events(tmp_path / "none", shift_s=0.0) == ()


def test_one_call_reads_a_run_folder_and_a_flat_recording(tmp_path: Path) -> None:
    flat = tmp_path / "run.jsonl"
    flat.write_text('{"kind": "header", "format": "stoker-flat-trace/1"}\n{"kind": "step", "t": 1.0}\n')
    assert stoker.read_recording(flat).title == "run"
    with pytest.raises(BadInputError):
        stoker.read_recording(str(tmp_path))  # a folder, with no run in it
