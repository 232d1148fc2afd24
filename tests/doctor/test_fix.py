"""Changes: only safe ones, only where they were asked for, each with its way back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from machines import machine

from stoker.doctor.check import Change
from stoker.doctor.examine import examine
from stoker.doctor.fix import apply, changes_of
from stoker.errors import StokerError

if TYPE_CHECKING:
    from pathlib import Path


def test_what_may_be_changed_has_a_way_back() -> None:
    assert changes_of(examine(machine("bad_gpus"))) == [
        Change(
            do="echo none > /sys/block/nvme0n1/queue/scheduler",
            undo="echo bfq > /sys/block/nvme0n1/queue/scheduler",
        ),
        Change(
            do="echo 4096 > /sys/block/nvme0n1/queue/read_ahead_kb",
            undo="echo 64 > /sys/block/nvme0n1/queue/read_ahead_kb",
        ),
        Change(do="mount -o remount,noatime /", undo="mount -o remount,relatime /"),
        Change(do="nvidia-smi -i 0 -pm 1", undo="nvidia-smi -i 0 -pm 0"),
    ]


def test_folders_that_nobody_named_are_left_alone() -> None:
    whole = machine("bad_gpus")
    guessed = replace(whole, places=tuple(replace(place, given=False) for place in whole.places))
    assert [change.do for change in changes_of(examine(guessed))] == ["nvidia-smi -i 0 -pm 1"]


def test_a_good_machine_needs_no_change() -> None:
    assert changes_of(examine(machine("good_node"))) == []


def test_changes_are_made_in_their_order(tmp_path: Path) -> None:
    apply([Change(do=f"echo {word} >> {tmp_path}/said", undo="true") for word in ("one", "two")])
    assert (tmp_path / "said").read_text() == "one\ntwo\n"


def test_a_change_that_fails_says_how_to_take_back_the_others(tmp_path: Path) -> None:
    changes = [
        Change(do="true", undo="first back"),
        Change(do="true", undo="second back"),
        Change(do=f"echo 1 > {tmp_path}/no/such/file", undo="third back"),
        Change(do=f"touch {tmp_path}/never", undo=""),
    ]
    with pytest.raises(StokerError) as caught:
        apply(changes)
    assert "second back; first back" in caught.value.hint
    assert "third back" not in caught.value.hint
    assert not (tmp_path / "never").exists()
