"""`stoker.attach`: any iterable of batches, itself but for the time it takes."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

import stoker
from recorded_spans import spans_of
from stoker.watch.inside.boot import HANDLE
from stoker.watch.inside.forward import Roots
from stoker.watch.inside.probe import Probe
from stoker.watch.inside.switch import Switch
from stoker.watch.runs.files import node_name, process_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Loader:
    """A loader no hook knows."""

    batches = (1, 2, 3)

    def __iter__(self) -> Iterator[int]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Probe]:
    """This process as `stoker watch` would have it."""
    import torch  # noqa: F401 - the hooks are there once it is

    probe = Probe(tmp_path)
    hooks = SimpleNamespace(here=lambda: (probe, Roots(probe)), Switch=Switch)
    monkeypatch.setitem(sys.modules, HANDLE, hooks)
    yield probe
    probe.close()


def test_nothing_changes_when_nobody_watches() -> None:
    loader = stoker.attach(Loader())
    assert (list(loader), list(loader), len(loader), loader.batches) == ([1, 2, 3], [1, 2, 3], 3, (1, 2, 3))


def test_each_wait_is_a_span(probe: Probe, tmp_path: Path) -> None:
    assert list(stoker.attach(Loader())) == [1, 2, 3]
    probe.read_marks()
    ring = spans_of(tmp_path / f"spans-{process_key(node_name(), os.getpid())}.ring")
    assert [span.what for span in ring] == ["startup", "data", "data", "data", "data"]
    assert probe.meta["loader"]["kind"] == "Loader"


def test_what_fails_of_ours_does_not_stop_the_loop(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> int:
        raise RuntimeError("ours")

    monkeypatch.setattr("stoker.watch.inside.loaders.tokens_of", fail)
    assert list(stoker.attach(Loader())) == [1, 2, 3]


def test_an_error_of_the_loader_is_the_loaders(probe: Probe) -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise ValueError("bad shard")

    with pytest.raises(ValueError, match="bad shard"):
        list(stoker.attach(broken()))
    assert [mark[0] for mark in probe.marks] == ["data", "data"]
