"""A probe that has begun."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stoker.watch.inside.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def probe(tmp_path: Path) -> Iterator[Probe]:
    probe = Probe(tmp_path)
    probe.begin()
    yield probe
    probe.close()
