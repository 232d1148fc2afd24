"""What lands in the history: run folders, results of benchmarks, and their figures as README has them."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from made_history import entries, quiet

from stoker.cli.history import command
from stoker.errors import StokerError
from stoker.history.export.mlflow import write_mlflow
from stoker.history.export.tensorboard import write_tensorboard
from stoker.history.results import read_results, unit_of
from stoker.history.series import all_series
from stoker.history.store import read_store, write_entries

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

EXPORT_WATCHED = """
import sys
def heard(event, args):
    if event == "socket.getaddrinfo" and args[0] not in (None, "localhost", "127.0.0.1"):
        print("NETWORK", args, file=sys.stderr)
sys.addaudithook(heard)
from stoker.cli import main
main()
"""

# The records of wandb's files: a LevelDB log (7 bytes of its own, then checksum, length, kind and content).
READ_WANDB = """
import json, struct, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record
found = []
for path in sys.argv[1:]:
    data, at = Path(path).read_bytes(), 7
    while at + 7 <= len(data):
        length, kind = struct.unpack_from("<HB", data, at + 4)
        assert kind == 1, "a record that is whole"
        record = Record.FromString(data[at + 7 : at + 7 + length])
        found += [json.loads(one.value_json) for one in record.history.item
                  if "steps/s" in (one.key, "/".join(one.nested_key))]
        at += 7 + length
print(json.dumps(found))
"""


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_file_of_results_can_be_imported(path: Path) -> None:
    found = read_results(path)
    assert len(found) == len(json.loads(path.read_text())["runs"])
    assert sum(len(one.figures) for one in found)
    assert all(one.origin.machine and one.at > 0 for one in found)


def test_the_figures_of_the_readme_come_out_with_their_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As benchmarks/tables.py publishes them: median, lowest and highest of the last five runs."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import kept_runs

    some = all_series(read_results(RESULTS / "prepare.json"), pattern="median_mb_per_s/stoker default")
    machines = {run["machine"] for run in json.loads((RESULTS / "prepare.json").read_text())["runs"]}
    if len(machines) > 1:
        pytest.fail("kept on several kinds of machine: the history tells them apart, the table does not")
    published = kept_runs.Spread.of("prepare", lambda run: run["median_mb_per_s"]["stoker default"])
    assert some[0].spread() == (published.median, published.low, published.high)
    assert (some[0].better, some[0].unit) == ("higher", "mb/s")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("results", "stoker", "mtok_s"), ("mtok/s", "higher")),
        (("median_mb_per_s", "stoker default"), ("mb/s", "higher")),
        (("median", "stoker / one / disk", "wall_s"), ("s", "lower")),
        (("results", "stoker", "first_batch_ms"), ("ms", "lower")),
        (("paths", "pinned_copy_gb_s"), ("gb/s", "higher")),
        (("training", "stoker", "wait_share"), ("wait_share", "lower")),
        (("results", "stoker", "pss_mb"), ("pss MB", "lower")),
        (("right",), ("", "")),
    ],
)
def test_units_and_directions_are_read_off_names(path: tuple[str, ...], expected: tuple[str, str]) -> None:
    assert unit_of(path) == expected


@pytest.mark.parametrize(
    "text", ["", "[]", '{"runs": 3}', '{"runs": [{"at": "never", "machine": "", "report": {}}]}']
)
def test_a_file_that_holds_no_results_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(StokerError, match="no file of benchmark results"):
        read_results(tmp_path / "x.json")


def run(store: Path, *words: object) -> Any:
    return CliRunner().invoke(command, [str(words[0]), "--store", str(store), *map(str, words[1:])])


def test_importing_twice_changes_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        ran = run(tmp_path / "h", "import", RESULTS / "prepare.json", RESULTS / "stage.json")
        assert ran.exit_code == 0, ran.output
    found = read_store(tmp_path / "h")
    expected = sum(len(json.loads((RESULTS / f"{n}.json").read_text())["runs"]) for n in ("prepare", "stage"))
    assert len(found.entries) == expected


def test_a_folder_without_a_run_is_said(tmp_path: Path) -> None:
    ran = run(tmp_path / "h", "import", tmp_path)
    assert isinstance(ran.exception, StokerError)
    assert "holds no run" in ran.exception.message


# --- exports ---


def events_of(path: Path) -> list[bytes]:
    """Records of a TFRecord file, each checked by its lengths."""
    raw, found = path.read_bytes(), []
    while raw:
        (length,) = struct.unpack("<Q", raw[:8])
        found.append(raw[12 : 12 + length])
        raw = raw[16 + length :]
    return found


def test_tensorboard_reads_the_event_files(tmp_path: Path) -> None:
    (path,) = write_tensorboard(entries(quiet(7)), tmp_path)
    from tensorboard.backend.event_processing import event_accumulator as accumulator

    read = accumulator.EventAccumulator(str(path.parent))
    read.Reload()
    assert [one.value for one in read.Scalars("steps/s")] == pytest.approx(list(quiet(7)), rel=1e-6)


def test_event_files_are_records_with_a_version_first(tmp_path: Path) -> None:
    (path,) = write_tensorboard(entries(quiet(3)), tmp_path)
    records = events_of(path)
    assert len(records) == 4
    assert b"brain.Event:2" in records[0]
    assert write_tensorboard(entries(quiet(3)), tmp_path) == [path]
    assert len(events_of(path)) == 4


def test_mlflow_files_have_the_shape_of_its_store(tmp_path: Path) -> None:
    import yaml

    made = write_mlflow(entries([1.5, 2.5]), tmp_path)
    assert len(made) == 2
    facts = yaml.safe_load((made[0] / "meta.yaml").read_text())
    assert facts["run_id"] == made[0].name
    assert (made[0] / "metrics" / "steps" / "s").read_text().split()[1] == "1.5"
    experiment = yaml.safe_load((made[0].parent / "meta.yaml").read_text())
    assert experiment["experiment_id"] == made[0].parent.name


@pytest.mark.parametrize("form", ["json", "tensorboard", "mlflow", "sqlite"])
def test_every_form_can_be_exported_and_again(tmp_path: Path, form: str) -> None:
    run(tmp_path / "h", "import", RESULTS / "prepare.json")
    for _ in range(2):
        ran = run(tmp_path / "h", "export", form, tmp_path / "out")
        assert ran.exit_code == 0, (ran.output, ran.exception)
    assert (tmp_path / "out").exists()


@pytest.mark.integration
def test_offline_runs_of_wandb_hold_each_run_s_figures_and_nothing_of_this_process(
    tmp_path: Path,
) -> None:
    """Read by wandb's own reader, in a process of its own: its service and threads are none of ours."""
    store = tmp_path / "h"
    write_entries(store, entries([1.5, 2.5]))
    ran = subprocess.run(
        [sys.executable, "-c", EXPORT_WATCHED, "history", "export", "wandb", "out", "--store", str(store)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    assert "NETWORK" not in ran.stderr  # nor so much as the name of a host looked up
    made = sorted((tmp_path / "out" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(made) == 2
    read = subprocess.run(
        [sys.executable, "-c", READ_WANDB, *map(str, made)], capture_output=True, text=True, check=True
    )
    assert sorted(json.loads(read.stdout)) == [1.5, 2.5]
    assert all(socket.gethostname().encode() not in one.read_bytes() for one in made)


# --- watched runs ---


@pytest.mark.integration
def test_a_watched_run_lands_in_the_history_also_when_it_fails(tmp_path: Path, run_stoker: Any) -> None:
    program = "import sys; sys.exit(3)"
    ran = run_stoker("watch", "--gpu", "none", "--out", "runs/a", "--", sys.executable, "-c", program)
    assert ran.rc == 3
    store = tmp_path / "runs" / ".stoker" / "history.db"
    assert str(store) in ran.stderr
    (entry,) = read_store(store).entries
    assert entry.facts["ended"].startswith("exit 3")
    assert entry.command[-1] == program
    again = run_stoker("history", "import", "runs/a", "--store", store)
    assert again.rc == 0, again.stderr
    assert len(read_store(store).entries) == 1


@pytest.mark.integration
@pytest.mark.parametrize("how", ["flag", "variable"])
def test_recording_can_be_switched_off(tmp_path: Path, run_stoker: Any, how: str) -> None:
    words = ["--no-history"] if how == "flag" else []
    environ = {} if how == "flag" else {"STOKER_HISTORY": "off"}
    ran = run_stoker(
        "watch", *words, "--gpu", "none", "--out", "runs/a", "--", sys.executable, "-c", "0", env=environ
    )
    assert ran.rc == 0
    assert not (tmp_path / "runs" / ".stoker").exists()


@pytest.mark.integration
def test_a_history_that_cannot_be_written_fails_nobodys_job(tmp_path: Path, run_stoker: Any) -> None:
    (tmp_path / "file").write_text("")
    environ = {"STOKER_HISTORY": str(tmp_path / "file")}
    ran = run_stoker(
        "watch", "--gpu", "none", "--out", "runs/a", "--", sys.executable, "-c", "0", env=environ
    )
    assert ran.rc == 0
    assert "not recorded in the history" in ran.stderr


@pytest.mark.integration
def test_a_run_whose_watcher_was_killed_is_recorded_by_the_next_one(tmp_path: Path, run_stoker: Any) -> None:
    """As a lost node leaves it: a run folder that says nothing of its end."""
    for name in "ab":
        run_stoker("watch", "--no-history", "--gpu", "none", "--out", f"runs/{name}", "--", "true")
    (meta,) = (tmp_path / "runs" / "a").glob("node-*.json")
    facts = json.loads(meta.read_text())
    meta.write_text(json.dumps({k: v for k, v in facts.items() if k not in ("ended", "ended_at", "ending")}))
    shutil.rmtree(tmp_path / "runs" / "b")
    assert run_stoker("watch", "--gpu", "none", "--out", "runs/c", "--", "true").rc == 0
    found = read_store(tmp_path / "runs" / ".stoker" / "history.db").entries
    assert sorted(Path(one.run).name for one in found) == ["a", "c"]
    assert {Path(one.run).name: one.facts["ended"] for one in found}["a"] == "lost"
