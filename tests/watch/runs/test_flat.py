"""Flat recordings are read whatever is missing, and refused with a reason when they are none."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.diagnose.rules import diagnose
from stoker.diagnose.timeline import timeline
from stoker.errors import BadInputError
from stoker.watch.runs.flat import read_flat

if TYPE_CHECKING:
    from pathlib import Path

HEADER = {"kind": "header", "format": "stoker-flat-trace/1", "gpu": "NVIDIA H200", "cpus": 4}
STEP = {"kind": "step", "data_wait": 0.2, "h2d": 0.1, "compute": 0.6, "total": 1.0}


def write(path: Path, *lines: dict[str, Any], tail: str = "") -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return path


def test_the_parts_of_a_step_become_spans_and_the_rest_is_unattributed(tmp_path: Path) -> None:
    steps = [{**STEP, "t": float(number), "step": number} for number in (1, 2)]
    run = read_flat(write(tmp_path / "a.jsonl", HEADER, *steps))
    spent = timeline(run.ranks[0], wall_s=run.wall_s).seconds()
    assert {name: round(seconds, 6) for name, seconds in spent.items() if seconds > 1e-9} == {
        "data": 0.4, "copy": 0.2, "compute": 1.2, "unattributed": 0.2,
    }  # fmt: skip


def test_several_ranks_cards_and_nodes_are_told_apart(tmp_path: Path) -> None:
    lines = [{**STEP, "t": 1.0 + rank / 10, "step": 1, "rank": rank, "node": "ab"[rank]} for rank in (0, 1)]
    cards = [{"kind": "gpu", "t": 1.0, "gpu": n, "node": "a", "util": 10 * n} for n in (0, 1, 2)]
    hosts = [{"kind": "host", "t": 1.0, "node": node, "cpu": [1.0, 2.0]} for node in "ab"]
    run = read_flat(write(tmp_path / "a.jsonl", HEADER, *lines, *cards, *hosts))
    assert [(rank.rank, rank.node) for rank in run.ranks] == [(0, "a"), (1, "b")]
    assert [(card.index, card.samples.mean("util")) for card in run.gpus] == [(0, 0.0), (1, 10.0), (2, 20.0)]
    assert [host.node for host in run.hosts] == ["a", "b"]


def test_a_reading_that_is_null_is_not_a_number_and_one_never_read_is_absent(tmp_path: Path) -> None:
    cards = [{"kind": "gpu", "t": t, "util": None if t == 1 else 50, "power_w": None} for t in (1, 2)]
    samples = read_flat(write(tmp_path / "a.jsonl", HEADER, *cards)).gpus[0].samples
    assert math.isnan(samples.columns["util"][0])
    assert "power_w" not in samples.columns


def test_a_wait_that_was_never_measured_is_said_to_be_unseen(tmp_path: Path) -> None:
    step = {"kind": "step", "t": 1.0, "compute": 0.5, "total": 0.9}
    run = read_flat(write(tmp_path / "a.jsonl", HEADER, step))
    assert run.facts["unseen"] == ["data", "h2d", "checkpoint"]


def test_unknown_kinds_and_fields_and_a_torn_last_line_do_not_matter(tmp_path: Path) -> None:
    odd = {"kind": "weather", "t": 1.0, "rain": True}
    step = {**STEP, "t": 1.0, "step": 1, "mood": "good"}
    run = read_flat(write(tmp_path / "a.jsonl", HEADER, odd, step, tail='{"kind": "step", "t": 2'))
    assert run.wall_s == 1.0


def test_a_piece_of_a_run_begins_where_it_was_cut(tmp_path: Path) -> None:
    steps = [{**STEP, "t": 100.0 + number, "step": number} for number in (1, 2, 3)]
    run = read_flat(write(tmp_path / "a.jsonl", HEADER, *steps))
    assert run.wall_s == pytest.approx(3.0)


def test_a_quota_in_the_header_limits_the_cores(tmp_path: Path) -> None:
    host = {"kind": "host", "t": 1.0, "cpu": [1.0] * 4}
    run = read_flat(write(tmp_path / "a.jsonl", {**HEADER, "quota_cores": 1.5}, host))
    assert run.hosts[0].quota_cores == 1.5


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no gpu, host or step line"),
        ("not json\n{}\n", "line 1 is not JSON"),
        ('{"kind": "header", "format": "perfetto/3"}\n', "of format 'perfetto/3'"),
        ("\x00\x01\n\n", "not JSON"),
    ],
)
def test_what_is_no_recording_is_refused_with_a_reason(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(BadInputError, match=why) as refused:
        read_flat(path)
    assert refused.value.hint


_odd = st.sampled_from([None, -1, 0, 1e30, "x", "5", [1, 2], [], True, math.nan, math.inf, {}])
_values = st.one_of(_odd, st.floats(0, 100), st.lists(st.floats(0, 100), max_size=4))
_names = st.sampled_from(
    [
        "t",
        "step",
        "data_wait",
        "h2d",
        "compute",
        "total",
        "bytes",
        "flops",
        "rank",
        "node",
        "gpu",
        "util",
        "sm_util",
        "power_w",
        "event_reasons",
        "sm_mhz",
        "fb_used",
        "pcie_rx_mib",
        "cpu",
        "iowait",
        "disk_read",
        "disk_write",
        "shm_used",
        "shm_total",
        "cpus",
        "power_limit_w",
        "mem_total",
        "quota_cores",
    ]
)
_line = st.dictionaries(_names, _values).flatmap(
    lambda line: st.sampled_from(["header", "gpu", "host", "step"]).map(lambda kind: {"kind": kind, **line})
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(_line, min_size=1, max_size=30))
def test_whatever_the_lines_hold_there_is_a_verdict_or_a_reason(
    lines: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = write(tmp_path / "a.jsonl", *[{"t": number / 2, **line} for number, line in enumerate(lines)])
    try:
        verdict = diagnose(read_flat(path))
    except BadInputError:
        return
    assert verdict.findings or verdict.abstained


def test_numbers_too_large_for_a_column_and_a_byte_order_mark_do_not_matter(tmp_path: Path) -> None:
    step = {"kind": "step", "t": 5, "step": 1e19, "rank": -1e22, "h2d": 1, "bytes": 1e20}
    path = write(tmp_path / "a.jsonl", HEADER, step)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    (rank,) = read_flat(path).ranks
    assert (rank.rank, rank.steps.number.tolist(), rank.spans.bytes.tolist()) == (0, [1], [0])
