"""The labelled recordings of a real H200, as they are and spoiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from degraded import (
    NAMES,
    SPOILED,
    Lines,
    first_half,
    read_lines,
    without_gpm,
    without_header,
    without_host,
    write_lines,
)

from stoker.diagnose.rules import Verdict, diagnose
from stoker.watch.runs.flat import read_flat

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def verdict_of(tmp_path: Path) -> Callable[[Lines], Verdict]:
    return lambda lines: diagnose(read_flat(write_lines(tmp_path / "trace.jsonl", lines)))


def _unlabelled(lines: Lines) -> Lines:
    if lines[0]["kind"] != "header":
        return lines
    told = ("label", "cause", "note", "scenario")
    return [{k: v for k, v in lines[0].items() if k not in told}, *lines[1:]]


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_gets_its_label_and_cause_and_nothing_else(
    name: str, verdict_of: Callable[[Lines], Verdict]
) -> None:
    lines = read_lines(name)
    found = verdict_of(_unlabelled(lines)).findings
    assert [finding.kind for finding in found] == lines[0]["label"]
    assert lines[0]["cause"] in (None, found[0].cause)


@pytest.mark.parametrize("name", NAMES[:2])
def test_labels_are_not_looked_at(name: str, verdict_of: Callable[[Lines], Verdict]) -> None:
    lines = read_lines(name)
    lied = {"label": ["throttling"], "cause": "quota", "note": "a lie", "scenario": "fed"}
    assert verdict_of([{**lines[0], **lied}, *lines[1:]]) == verdict_of(_unlabelled(lines))


def test_a_stop_whose_reason_nobody_saw_is_not_called_healthy(verdict_of: Callable[[Lines], Verdict]) -> None:
    spinning = without_header(without_gpm(read_lines("hang_spin")))
    saving = without_host(first_half(read_lines("checkpoint_sync")))
    assert not verdict_of(_unlabelled(spinning)).healthy
    assert not verdict_of(_unlabelled(saving)).healthy


# Every recording and every way of spoiling, but not every pair: those take longer than the quick tests may.
PAIRS = [(name, spoil) for i, name in enumerate(NAMES) for j, spoil in enumerate(SPOILED) if (i + j) % 4 == 0]


@pytest.mark.parametrize(("name", "spoil"), PAIRS, ids=lambda one: getattr(one, "__name__", one))
def test_a_spoiled_recording_gets_its_label_or_none_with_what_is_missing(
    name: str, spoil: Callable[[Lines], Lines], verdict_of: Callable[[Lines], Verdict]
) -> None:
    lines = read_lines(name)
    verdict = verdict_of(_unlabelled(spoil(lines)))
    kinds = [finding.kind for finding in verdict.findings]
    if kinds:
        assert kinds == lines[0]["label"]
    else:
        assert any(one.missing for one in verdict.abstained)
