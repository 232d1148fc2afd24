"""Pins of a process, as an evictor sees them."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING

import pytest

from stoker.errors import StorageError, UsageError
from stoker.stage.disk import pins as module
from stoker.stage.disk.pins import Pins, PinView
from stoker.stage.leases.lease import Claim

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def pins(tmp_path: Path) -> Iterator[Pins]:
    pins = Pins(tmp_path, ttl_s=0.2, purpose="reading")
    yield pins
    pins.close()
    assert list(tmp_path.iterdir()) == []


def pinned(folder: Path) -> set[str]:
    return set(PinView(folder, ttl_s=10.0).holders())


def take_for_dead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an evictor on another node does with the pins of a process that was silent."""
    with monkeypatch.context() as patch:
        patch.setattr(Claim, "_is_silent", lambda claim, view: True)
        patch.setattr(Claim, "_is_at_work", lambda claim, owner: False)  # it cannot know
        assert pinned(folder) == set()


def test_what_is_let_go_of_leaves_no_line_for_ever(pins: Pins, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_SPARE_BYTES", 200)
    pins.add("kept")
    for number in range(1000):
        pins.add(f"passing-{number}")
        pins.drop(f"passing-{number}")
        assert sum(path.stat().st_size for path in tmp_path.iterdir() if path.is_file()) < 500
    assert pinned(tmp_path) == {"kept"}


def test_nothing_is_pinned_for_a_closed_cache(pins: Pins, tmp_path: Path) -> None:
    pins.add("one")
    pins.close()
    with pytest.raises(UsageError, match="closed"):  # by a reader that is late: nobody would let go of it
        pins.add("two")
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_was_taken_for_dead_pins_again(pins: Pins, tmp_path: Path, monkeypatch) -> None:
    said = threading.Event()
    say_all = Pins._say_all
    pins.add("one")
    monkeypatch.setattr(Pins, "_say_all", lambda self: (say_all(self), said.set()))
    take_for_dead(tmp_path, monkeypatch)
    assert said.wait(10), "the thread that renews the lease finds it gone"
    assert pinned(tmp_path) == {"one"}


def test_the_next_pin_brings_the_others_back(pins: Pins, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Pins, "_say_again", lambda self: None)
    pins.add("one")
    take_for_dead(tmp_path, monkeypatch)
    lease = pins._lease
    assert lease is not None
    lease.renew()
    pins.add("two")
    assert pinned(tmp_path) == {"one", "two"}


def test_a_pin_that_could_not_be_written_is_none(pins: Pins, tmp_path: Path, monkeypatch) -> None:
    def full(path: str, flags: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for before in ((), ("one",)):
        for key in before:
            pins.add(key)
        with monkeypatch.context() as patch:
            patch.setattr("stoker.stage.disk.pins.open_own", full)
            with pytest.raises(StorageError, match="No space left"):
                pins.add("two")
        assert pinned(tmp_path) == set(before)
    pins.add("two")
    assert pinned(tmp_path) == {"one", "two"}


def test_letting_go_after_everything_was_let_go_of(pins: Pins) -> None:
    pins.add("one")
    pins.close()
    pins.drop("one")
