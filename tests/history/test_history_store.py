"""The store: many writers, killed writers, damaged files; nothing that was committed is lost."""

from __future__ import annotations

import math
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from made_history import entries

from stoker.cli.history import command
from stoker.errors import StokerError, UsageError
from stoker.history.figures import Entry, Figure, Origin
from stoker.history.record import record
from stoker.history.store import compact, read_store, store_for, write_entries, write_single

WRITER = """
import sys
from pathlib import Path
from stoker.history.figures import Figure, Origin
from stoker.history.record import record
for number in range(int(sys.argv[3])):
    entry = record("bench", f"writer {sys.argv[2]}", [Figure(name="n", value=float(number))],
                   store=Path(sys.argv[1]), origin=Origin(machine="m"))
    print(entry.id, flush=True)
"""


def writer(store: Path, name: object, count: int, environ: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(store), str(name), str(count)]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


@pytest.mark.integration
def test_ten_writers_at_once_lose_nothing(
    tmp_path: Path, stoker_environ: Callable[..., dict[str, str]]
) -> None:
    writers = [writer(tmp_path / "h", number, 20, stoker_environ()) for number in range(10)]
    told = {line for one in writers for line in one.communicate(timeout=120)[0].split()}
    assert [one.returncode for one in writers] == [0] * 10
    found = read_store(tmp_path / "h")
    assert not found.damaged
    assert {one.id for one in found.entries} == told
    assert len(told) == 200


@pytest.mark.integration
def test_a_writer_killed_in_the_midst_loses_nothing_it_had_committed(
    tmp_path: Path, stoker_environ: Callable[..., dict[str, str]]
) -> None:
    told: set[str] = set()
    for number in range(4):
        one = writer(tmp_path / "h", number, 100_000, stoker_environ())
        assert one.stdout
        told |= {one.stdout.readline().strip() for _ in range(7 + number)}
        os.kill(one.pid, signal.SIGKILL)
        told |= {line.strip() for line in one.stdout if line.endswith("\n")}
        one.wait()
        one.stdout.close()
    found = read_store(tmp_path / "h")
    assert not found.damaged
    assert told <= {entry.id for entry in found.entries}
    assert len(found.entries) <= len(told) + 4  # one may have been committed and not yet told


@pytest.mark.parametrize("damage", [b"", b"not a database", None, "middle"])
def test_a_damaged_file_is_named_and_the_rest_is_read(tmp_path: Path, damage: bytes | str | None) -> None:
    kept, lost = entries([1.0, 2.0])
    write_entries(tmp_path, [kept])
    path = write_entries(tmp_path, [lost])
    raw = path.read_bytes()
    if damage is None:
        path.write_bytes(raw[: len(raw) // 2])
    elif damage == "middle":
        place = raw.index(b"train.py")
        path.write_bytes(raw[:place] + b"Train.py" + raw[place + 8 :])
    else:
        assert isinstance(damage, bytes)
        path.write_bytes(damage)
    found = read_store(tmp_path)
    assert found.entries == (kept,)
    assert len(found.damaged) == 1
    assert str(path) in found.damaged[0]


def test_a_flipped_figure_is_noticed(tmp_path: Path) -> None:
    path = write_entries(tmp_path, entries([1.0]))
    with sqlite3.connect(path) as base:
        base.execute("update figures set value = 2.0")
    base.close()
    found = read_store(tmp_path)
    assert not found.entries
    assert "not those that were written" in found.damaged[0]


def test_a_file_of_a_newer_stoker_is_left_alone(tmp_path: Path) -> None:
    path = write_entries(tmp_path, entries([1.0]))
    with sqlite3.connect(path) as base:
        base.execute("pragma user_version = 99")
    base.close()
    assert "newer stoker" in read_store(tmp_path).damaged[0]
    write_entries(tmp_path, entries([2.0]))
    assert compact(tmp_path, settled_s=0) == 0
    assert path.exists()


def test_the_same_run_told_again_counts_once_as_told_last(tmp_path: Path) -> None:
    (one,) = entries([1.0])
    write_entries(tmp_path, [replace(one, told=one.told + 1, facts={"ended": "exit 0"})])
    write_entries(tmp_path, [one])
    (found,) = read_store(tmp_path).entries
    assert found.facts == {"ended": "exit 0"}


def test_compaction_changes_nothing_that_is_read(tmp_path: Path) -> None:
    for one in entries(range(1, 30)):
        write_entries(tmp_path, [one])
    before = read_store(tmp_path)
    assert compact(tmp_path, settled_s=0) == 29
    assert len(list(tmp_path.iterdir())) == 1
    assert read_store(tmp_path) == before


def test_files_of_today_are_not_compacted(tmp_path: Path) -> None:
    for one in entries([1.0, 2.0]):
        write_entries(tmp_path, [one])
    assert compact(tmp_path) == 0


def test_a_damaged_file_survives_compaction(tmp_path: Path) -> None:
    for one in entries([1.0, 2.0, 3.0]):
        path = write_entries(tmp_path, [one])
    path.write_bytes(b"torn")
    assert compact(tmp_path, settled_s=0) == 2
    assert path.exists()


texts = st.text(max_size=20)
numbers = st.floats(-1e149, 1e149)


@pytest.mark.long
@given(title=texts, name=st.text(min_size=1, max_size=20), value=numbers, command=st.lists(texts, max_size=4))
def test_what_is_written_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, title: str, name: str, value: float, command: list[str]
) -> None:
    store = tmp_path_factory.mktemp("store")
    (one,) = entries([1.0])
    entry = replace(one, title=title, command=tuple(command), figures=(Figure(name=name, value=value),))
    write_entries(store, [entry])
    found = read_store(store)
    assert not found.damaged
    assert repr(found.entries) == repr((entry,))


def test_odd_paths_are_opened_as_they_are(tmp_path: Path) -> None:
    store = tmp_path / "a b?c#d%20é" / "h"
    write_entries(store, entries([1.0]))
    assert len(read_store(store).entries) == 1


def test_a_store_that_is_a_file_is_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "h").write_text("")
    with pytest.raises(UsageError, match="is no folder"):
        write_entries(tmp_path / "h", entries([1.0]))


def test_where_a_run_is_recorded(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    assert store_for(run, environ={}) == tmp_path / "runs" / ".stoker" / "history.db"
    assert store_for(run, environ={"STOKER_HISTORY": "/x"}) == Path("/x")
    assert store_for(run, environ={"STOKER_HISTORY": "off"}) is None


def test_secrets_do_not_get_in(tmp_path: Path) -> None:
    command = ["train.py", "--api-key", "s3cr3t", "s3://me:pw123@host/x"]
    record("bench", "b", [Figure(name="n", value=1.0)], command=command, store=tmp_path)
    raw = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"s3cr3t" not in raw
    assert b"pw123" not in raw


def test_files_are_private_unless_the_folder_is_shared(tmp_path: Path) -> None:
    path = write_entries(tmp_path / "own", entries([1.0]))
    assert path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "team").mkdir()
    (tmp_path / "team").chmod(0o755)
    assert write_entries(tmp_path / "team", entries([1.0])).stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    "bad", [{"value": float("nan")}, {"value": float("inf")}, {"name": ""}, {"better": "up"}]
)
def test_a_figure_that_says_nothing_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(StokerError, match="hint:"):
        Figure(**{"name": "n", "value": 1.0, **bad})  # type: ignore[arg-type]


def test_one_sqlite_file_for_queries_of_ones_own(tmp_path: Path) -> None:
    write_single(tmp_path / "all.db", entries([1.0, 2.0, 3.0]))
    with sqlite3.connect(tmp_path / "all.db") as base:
        assert base.execute("select sum(value) from figures").fetchone() == (6.0,)
    base.close()


def test_an_entry_is_looked_up_by_figure() -> None:
    one: Entry = entries([4.0])[0]
    assert one.figure("steps/s") == one.figures[0]
    assert one.figure("nothing") is None


# --- what others put there ------------------------------------------------------------------------


def _deep(store: Path) -> None:
    path = write_entries(store, entries([1.0], title="deep"))
    with closing(sqlite3.connect(path)) as base:
        base.execute("update entries set facts = ?", ("[" * 100_000,))
        base.commit()


def _endless(store: Path) -> None:
    with closing(sqlite3.connect(store / "view.db")) as base:
        numbers = "with recursive c(x) as (select 1 union all select x + 1 from c) select x from c"
        base.executescript(f"create view entries as {numbers}; create table figures (a);")


def _forged(**change: object) -> Callable[[Path], object]:
    (one,) = entries([1.0], title="forged")
    return lambda store: write_entries(store, [replace(one, **change)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "forge",
    [
        _deep,
        _endless,
        lambda store: os.mkfifo(store / "fifo.db"),
        lambda store: (store / "folder.db").mkdir(),
        _forged(at=math.inf),
        _forged(at=1e17),
        _forged(told=-1.0),
        _forged(origin=Origin(machine="m", commit=None)),  # type: ignore[arg-type]
    ],
)
def test_what_others_put_into_a_store_is_named_and_the_rest_is_read(
    tmp_path: Path, forge: Callable[[Path], object]
) -> None:
    """A FIFO, or a view without an end, held up every reader: and the end of every watched job."""
    good = entries([1.0, 2.0])
    write_entries(tmp_path, good)
    forge(tmp_path)
    found = read_store(tmp_path)
    assert [one.id for one in found.entries] == [one.id for one in good]
    assert len(found.damaged) == 1
    done = CliRunner().invoke(command, ["--store", str(tmp_path)])
    assert done.exit_code == 0, done.output


def test_a_forged_title_writes_no_codes_to_a_terminal(tmp_path: Path) -> None:
    write_entries(tmp_path, entries([1.0] * 9, title="x\x1b]0;owned\x07\nforged line"))
    for words in ([], ["show"], ["check"]):
        said = CliRunner().invoke(command, [*words, "--store", str(tmp_path)]).output
        assert not {"\x1b", "\x07"} & set(said)
        assert not any(line.startswith("forged") for line in said.splitlines())


def test_a_name_that_is_no_utf_8_is_recorded(tmp_path: Path) -> None:
    """Where LANG is C, what Python reads of `ü` are two surrogates."""
    name = "bench path /data/ü".encode().decode("ascii", "surrogateescape")
    assert record("bench", name, [Figure(name="read", value=1.0)], store=tmp_path, origin=Origin(machine="m"))
    assert [one.title for one in read_store(tmp_path).entries] == ["bench path /data/ü"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.7e308])
def test_a_number_that_nobody_can_have_measured_is_refused(value: float) -> None:
    with pytest.raises(UsageError, match="finite"):
        Figure(name="read", value=value)


def test_a_whole_number_is_read_back(tmp_path: Path) -> None:
    """`bench accelerators` counts cards: 3 came back as 3.0, and its entry was called damaged."""
    figure = Figure(name="most cards", value=3, low=2, high=4)
    record("bench", "cards", [figure], store=tmp_path, origin=Origin(machine="m"))
    found = read_store(tmp_path)
    assert not found.damaged
    assert found.entries[0].figures == (figure,)
