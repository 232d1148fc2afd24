"""Keep rules: the best, one in every hour, what is pinned; and the callback when a save has ended."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from stoker.checkpoint.options import SaveOutcome
from stoker.checkpoint.saved.keep import PINS, KeepRules, spared
from stoker.checkpoint.saved.layout import Manifest, Marks
from stoker.checkpoint.saved.tiers import local_names
from stoker.cli.checkpoint import command
from stoker.errors import UsageError

STATE = {"w": torch.arange(8.0)}
HOUR = 3600.0


def listed(*rows: tuple[float, float | None]) -> list[Manifest]:
    """Checkpoints of these hours and metrics."""
    return [
        Manifest(
            name=f"c{at:02d}", step=at, save="", parts=(), saved_at=hour * HOUR, marks=Marks(metric=metric)
        )
        for at, (hour, metric) in enumerate(rows)
    ]


@pytest.mark.parametrize(("best_is", "expected"), [("min", {"c01", "c04"}), ("max", {"c00", "c02"})])
def test_the_best_are_kept_and_of_equal_ones_the_newer(best_is: Any, expected: set[str]) -> None:
    rows = listed((1, 9.0), (2, 1.0), (3, 8.0), (4, 2.0), (5, 2.0), (6, math.nan), (7, None))
    assert set(spared(rows, KeepRules(best=2, best_is=best_is))) == expected


def test_one_in_every_hour_is_kept() -> None:
    rows = listed(*((at / 4, None) for at in range(12)))
    assert list(spared(rows, KeepRules(every_s=HOUR))) == ["c00", "c04", "c08"]


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30), st.integers(1, 5))
def test_hourly_ones_stay_the_same_as_others_come_and_go(hours: list[float], keep: int) -> None:
    """At every save the rest but the newest goes: what was spared once is spared for ever."""
    alive: list[Manifest] = []
    ever: set[str] = set()
    for one in listed(*((hour, None) for hour in sorted(hours))):
        alive.append(one)
        spare = set(spared(alive, KeepRules(every_s=HOUR)))
        assert ever <= spare
        ever = spare
        alive = [each for each in alive if each.name in spare or each in alive[-keep:]]
    assert ever == set(spared(listed(*((hour, None) for hour in sorted(hours))), KeepRules(every_s=HOUR)))


def test_retention_spares_the_best_and_the_pinned(open_checkpointer, tmp_path: Path) -> None:
    ck = open_checkpointer(keep=1, keep_best=1)
    for step, metric in enumerate((3.0, 1.0, 2.0, 5.0, 4.0), 1):
        ck.save(step, metric=torch.tensor(metric), pin="first" if step == 1 else "", state=STATE)
    ck.close()
    assert [int(name[12:21]) for name in local_names(tmp_path / "run")] == [5, 2, 1]


def test_a_checkpoint_is_pinned_by_hand_and_let_go_again(open_checkpointer, tmp_path: Path) -> None:
    root = tmp_path / "run"
    ck = open_checkpointer(keep=1)
    ck.save(1, state=STATE)
    ck.wait()
    name = ck.latest().name
    assert CliRunner().invoke(command, ["pin", str(root), name]).output == f"{name}\n"
    for step in (2, 3):
        ck.save(step, state=STATE)
    ck.close()
    assert len(local_names(root)) == 2
    assert CliRunner().invoke(command, ["pin", str(root), name, "--remove"]).output == ""
    CliRunner().invoke(command, ["gc", str(root), "--keep", "1"])
    assert len(local_names(root)) == 1
    assert isinstance(CliRunner().invoke(command, ["pin", str(root), "nobody"]).exception, UsageError)


def test_nothing_goes_while_the_pins_cannot_be_read(open_checkpointer, tmp_path: Path) -> None:
    ck = open_checkpointer(keep=1)
    ck.save(1, state=STATE)
    ck.wait()
    (tmp_path / "run" / PINS).write_text("{torn")
    with pytest.warns(RuntimeWarning, match="older ones were not deleted: .* cannot be read"):  # noqa: PT031
        for step in (2, 3):
            ck.save(step, state=STATE)
        ck.close()
    assert len(local_names(tmp_path / "run")) == 3


def test_a_metric_that_is_no_number_is_refused(open_checkpointer) -> None:
    with pytest.raises(UsageError, match="is no number"):
        open_checkpointer().save(1, metric={"loss": 1.0}, state=STATE)


def test_a_callback_hears_of_a_durable_save_and_of_a_failed_one(open_checkpointer, tmp_path: Path) -> None:
    heard: list[SaveOutcome] = []
    ck = open_checkpointer(on_save=heard.append, on_failure="warn")
    ck.save(1, state=STATE)
    ck.wait()
    assert (heard[0].name, heard[0].step, heard[0].error) == (ck.report().last, 1, None)
    (tmp_path / "run").rename(tmp_path / "gone")
    (tmp_path / "run").write_text("no folder")
    ck.save(2, state=STATE)
    with pytest.warns(RuntimeWarning, match="was not saved"):
        ck.wait()
    assert (heard[1].step, heard[1].name) == (2, "")
    assert heard[1].error is not None


def test_a_callback_that_fails_fails_no_save(open_checkpointer) -> None:
    ck = open_checkpointer(on_save=lambda outcome: 1 / 0)

    def save() -> None:
        ck.save(1, state=STATE)
        ck.wait()

    with pytest.warns(RuntimeWarning, match="on_save failed"):
        save()
    assert ck.latest().step == 1
