"""Other people's loops under `stoker watch`: the right steps, the right first verdict, the right line.

Three of them run always; `pytest -m slow tests/scenarios` runs every program with every fault, as
`benchmarks/foreign_shapes.py` does, which keeps what it finds.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from foreign_shapes import QUICK, Case, cases, judged, watched

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.integration


def marks(case: Case) -> list[pytest.MarkDecorator]:
    return [] if case in QUICK else [pytest.mark.slow]


@pytest.mark.parametrize("case", [pytest.param(one, id=one.name, marks=marks(one)) for one in cases()])
def test_the_first_verdict_names_the_fault_and_its_line(
    case: Case, tmp_path: Path, stoker_environ: Callable[..., dict[str, str]]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = watched(case, tmp_path, environ=stoker_environ(), port=port)
    found = judged(case, tmp_path)
    assert (found.first, found.cause) == (case.verdict.kind, found.cause), done.stderr[-3000:]
    assert found.right, found
    assert "host hang" not in done.stderr, "neither at its end nor on the way"
