"""What is deleted: nothing for which no newer checkpoint, read back to its last byte, stands in."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from stoker.checkpoint.saved.commit import begin
from stoker.checkpoint.saved.layout import step_of
from stoker.checkpoint.saved.retention import expired, over_budget
from stoker.checkpoint.saved.tiers import local_names
from stoker.cli.checkpoint import command
from stoker.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.checkpoint.checkpointer import Checkpointer

NAMES = [f"{at:06d}-step-{at:09d}-0000000{at}" for at in range(9, 0, -1)]
some_names = st.sets(st.sampled_from(NAMES))


@given(st.integers(0, 9), st.integers(0, 12), some_names, some_names, some_names)
def test_nothing_goes_without_enough_good_ones_and_one_that_was_read_back(
    count: int, keep: int, good: set[str], proven: set[str], spare: set[str]
) -> None:
    names = NAMES[:count]
    gone = expired(names, keep=keep, good=good.__contains__, proven=(good & proven).__contains__, spare=spare)
    assert not set(gone) & spare
    for name in gone:
        newer = set(names[: names.index(name)])
        assert len(newer & good) >= keep > 0
        assert newer & good & proven


@given(st.lists(st.integers(1, 9), max_size=9), st.integers(0, 40), some_names, some_names)
def test_a_budget_takes_the_oldest_and_no_more_than_it_must(
    sizes: list[int], budget: int, proven: set[str], spare: set[str]
) -> None:
    held = [*zip(NAMES, sizes, strict=False)]
    gone = over_budget(held, budget=budget, need=3, proven=proven.__contains__, spare=spare)
    left = [name for name, _ in held if name not in gone]
    assert not set(gone) & spare
    assert not gone or proven & set(left)
    freed = sum(size for name, size in held if name in gone)
    assert not gone or sum(sizes) + 3 - freed + dict(held)[gone[-1]] > budget
    for name in gone:
        older = [one for one, _ in held[NAMES.index(name) + 1 :]]
        assert set(older) <= {*gone, *spare}


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return {f"w{at}": torch.randn(2000) for at in range(3)}


def save(checkpointer: Checkpointer, steps: tuple[int, ...], state: Any) -> None:
    for step in steps:
        checkpointer.save(step, state=state)
        checkpointer.wait()


def part(root: Path, step: int) -> Path:
    (path,) = root.glob(f"*-step-{step:09d}-*/part-00000.bin")
    return path


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)


def gc(*arguments: object) -> dict[str, Any]:
    done = CliRunner().invoke(command, ["gc", *map(str, arguments), "--json"], catch_exceptions=False)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def steps(root: Path) -> list[int]:
    return [step_of(name) for name in local_names(root)]


@pytest.mark.parametrize("damage", [truncate, flip])
def test_gc_keeps_a_good_one_when_the_newest_is_damaged(
    damage: Callable[[Path], None], open_checkpointer: Any, state: Any, tmp_path: Path
) -> None:
    with open_checkpointer() as checkpointer:
        save(checkpointer, (1, 2, 3), state)
    damage(part(tmp_path / "run", 3))
    found = gc(tmp_path / "run", "--keep", 1)
    assert [step_of(one["name"]) for one in found["superseded"]] == [1]
    assert "does not count among the 1 that are kept: part-00000.bin" in found["left_alone"][0]["why"]
    assert steps(tmp_path / "run") == [3, 2]


def test_gc_with_no_good_one_deletes_nothing(open_checkpointer: Any, state: Any, tmp_path: Path) -> None:
    with open_checkpointer() as checkpointer:
        save(checkpointer, (1, 2), state)
    for step in (1, 2):
        flip(part(tmp_path / "run", step))
    assert gc(tmp_path / "run", "--keep", 1)["superseded"] == []
    assert steps(tmp_path / "run") == [2, 1]


def test_gc_says_of_both_tiers_what_goes_and_a_dry_run_says_the_same(
    open_checkpointer: Any, state: Any, tmp_path: Path
) -> None:
    far = tmp_path / "far"
    for step in (1, 2, 3):
        with open_checkpointer(remote=str(far)) as checkpointer:
            save(checkpointer, (step,), state)
    arguments = (tmp_path / "run", "--remote", far, "--keep", 1)
    said = gc(*arguments, "--dry-run")
    gone = [(one["tier"], step_of(one["name"])) for one in said["superseded"]]
    assert gone == [("local", 2), ("local", 1), ("remote", 2), ("remote", 1)]
    assert steps(tmp_path / "run") == steps(far) == [3, 2, 1]
    assert gc(*arguments) == said
    assert steps(tmp_path / "run") == steps(far) == [3]


def test_gc_counts_remote_ones_by_what_the_store_holds(
    open_checkpointer: Any, state: Any, tmp_path: Path
) -> None:
    far = tmp_path / "far"
    for step in (1, 2):
        with open_checkpointer(remote=str(far)) as checkpointer:
            save(checkpointer, (step,), state)
    flip(part(far, 2))
    gc(tmp_path / "run", "--remote", far, "--keep", 1)
    assert (steps(tmp_path / "run"), steps(far)) == ([2], [2, 1])


def test_gc_names_what_it_leaves_alone(tmp_path: Path) -> None:
    mine = begin(tmp_path, step=1, sequence=1).folder(tmp_path)
    (tmp_path / mine.name.replace("000001-", "000002-", 1)).mkdir()
    mine_too, nameless = (one["why"] for one in gc(tmp_path)["left_alone"])
    assert (f"process {os.getpid()} on" in mine_too, "nobody has signed" in nameless) == (True, True)
    old = time.time() - 120
    os.utime(tmp_path / mine.name.replace("000001-", "000002-", 1), (old, old))
    assert len(gc(tmp_path)["garbage"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == [mine.name]


# --- in a run -------------------------------------------------------------------------------------


def test_a_run_deletes_nothing_for_a_save_that_does_not_come_back(
    open_checkpointer: Any, state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker.checkpoint import proof

    real = proof.wait_for_commit

    def damages(root: Path, name: str, *, timeout_s: float) -> None:
        real(root, name, timeout_s=timeout_s)
        flip(root / name / "part-00000.bin")

    checkpointer = open_checkpointer(keep=1)
    save(checkpointer, (1,), state)
    monkeypatch.setattr(proof, "wait_for_commit", damages)
    checkpointer.save(2, state=state)
    with pytest.raises(CheckpointError, match=r"does not come back as it was saved: part-00000\.bin"):
        checkpointer.close()
    assert steps(tmp_path / "run") == [2, 1]
    monkeypatch.setattr(proof, "wait_for_commit", real)
    with open_checkpointer(keep=1) as checkpointer:
        save(checkpointer, (3,), state)
    assert steps(tmp_path / "run") == [3]


def test_a_run_does_not_count_a_truncated_one_among_those_it_keeps(
    open_checkpointer: Any, state: Any, tmp_path: Path
) -> None:
    with open_checkpointer(keep=2) as checkpointer:
        save(checkpointer, (1, 2), state)
    truncate(part(tmp_path / "run", 2))
    with open_checkpointer(keep=2) as checkpointer:
        save(checkpointer, (3,), state)
    assert steps(tmp_path / "run") == [3, 2, 1]


def test_a_budget_drops_the_oldest_and_saving_goes_on(
    open_checkpointer: Any, state: Any, tmp_path: Path
) -> None:
    with open_checkpointer() as checkpointer:
        save(checkpointer, (1,), state)
    each = sum(path.stat().st_size for path in (tmp_path / "run").glob("0*/*"))
    with open_checkpointer(keep=5, max_local_bytes=int(3.5 * each)) as checkpointer:
        checkpointer.restore(state=state)
        save(checkpointer, tuple(range(2, 9)), state)
    assert steps(tmp_path / "run") == [8, 7, 6]


def test_a_restart_first_deletes_what_the_run_before_could_not(
    open_checkpointer: Any, state: Any, tmp_path: Path
) -> None:
    """As after an outage that an older stoker let fill the disk."""
    with open_checkpointer() as checkpointer:
        save(checkpointer, tuple(range(1, 7)), state)
    with open_checkpointer(keep=2) as checkpointer:
        checkpointer.restore(state=state)
        checkpointer.save(7, state=state)  # which needs room
        assert steps(tmp_path / "run")[-2:] == [6, 5]


def test_what_is_left_of_a_failed_save_goes_with_the_next(
    open_checkpointer: Any, state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker.checkpoint import saver

    checkpointer = open_checkpointer(on_failure="warn")
    with monkeypatch.context() as patched:
        patched.setattr(saver, "put_part", _leaves_a_file)
        checkpointer.save(1, state=state)
        with pytest.warns(RuntimeWarning, match="was not saved"):
            checkpointer.wait()
    assert [*(tmp_path / "run").glob(".saving-*/stray")]
    checkpointer.save(2, state=state)
    checkpointer.close()
    assert [path.name[:6] for path in (tmp_path / "run").iterdir()] == ["000002"]


def _leaves_a_file(root: Path, saving: Any, part: Any) -> bytes:
    (saving.folder(root) / "stray").write_bytes(b"as a killed writer leaves it")
    raise CheckpointError("no")
