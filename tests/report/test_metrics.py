"""Metrics: one table, exact text, labels of known number, counters that never fall."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import STARTED, STARVED, job, since, until

from stoker.diagnose.rules import RULES
from stoker.diagnose.timeline import STATES
from stoker.recording import Recording
from stoker.report.dashboard import ALERTS, dashboard
from stoker.report.metrics import FINDING_KINDS, METRICS, expose
from stoker.report.summary import Summary, summarise
from stoker.report.totals import Totals

SAMPLE = re.compile(r'^(?P<name>[a-z_]+)\{(?P<labels>(?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*)\} (?P<value>\S+)$')
Samples = dict[tuple[str, str], float]  # name and labels → value


def exposed(summary: Summary, totals: Totals | None = None) -> Samples:
    if totals is None:
        totals = Totals()
        totals.add(summary)
    matches = [SAMPLE.match(line) for line in expose(summary, totals).splitlines() if line[0] != "#"]
    assert all(matches)
    return {(found["name"], found["labels"]): float(found["value"]) for found in matches if found}


def total(samples: Samples, name: str, *parts: str) -> float:
    found = [value for (n, labels), value in samples.items() if n == name and all(p in labels for p in parts)]
    assert found, f"no {name} with {parts}"
    return sum(found)


def test_wall_time_by_state_sums_to_the_run(summary: Summary) -> None:
    samples = exposed(summary)
    for rank in range(4):
        whole = total(samples, "stoker_wall_seconds_total", f'rank="{rank}"')
        assert whole == pytest.approx(summary.wall_s, rel=1e-3)


def test_steps_are_a_histogram(summary: Summary) -> None:
    samples = exposed(summary)
    assert total(samples, "stoker_step_seconds_count", 'rank="0"') == 300
    assert total(samples, "stoker_step_seconds_bucket", 'rank="0"', 'le="+Inf"') == 300
    assert total(samples, "stoker_step_seconds_bucket", 'rank="0"', 'le="2.5"') == 297  # all but three saves
    assert total(samples, "stoker_step_seconds_sum", 'rank="0"') == pytest.approx(
        summary.ranks[0].step_s.sum()
    )


def test_the_last_step_is_a_moment_of_the_calendar(summary: Summary) -> None:
    samples = exposed(summary)
    moment = total(samples, "stoker_last_step_timestamp_seconds", 'rank="1"')
    assert moment == pytest.approx(STARTED + summary.ranks[1].steps.last_t)


def test_every_kind_of_finding_is_there_so_that_alerts_can_end(summary: Summary) -> None:
    samples = exposed(summary)
    assert total(samples, "stoker_finding_active", 'kind="data_starvation"') == 1
    assert total(samples, "stoker_finding_active", 'kind="throttling"') == 0
    cost = total(samples, "stoker_finding_cost_gpu_seconds_total", 'kind="data_starvation"')
    assert cost == STARVED.gpu_seconds


def test_every_rule_of_the_diagnosis_has_its_series() -> None:
    assert {rule.__name__ for rule in RULES} < set(FINDING_KINDS)


def test_readings_are_in_base_units(summary: Summary) -> None:
    samples = exposed(summary)
    card = ('node="node-1"', 'gpu="1"')
    assert total(samples, "stoker_gpu_power_limit_watts", *card) == 700
    assert total(samples, "stoker_gpu_sm_clock_hertz", *card) == 1.95e9
    assert 0 <= total(samples, "stoker_gpu_utilization_ratio", *card) <= 1
    assert total(samples, "stoker_host_shm_size_bytes", 'node="node-0"') == 64 * 2**30


def test_labels_are_few_and_known(summary: Summary) -> None:
    allowed = {"job", "rank", "node", "gpu", "state", "kind", "le"}
    for (_, labels), value in exposed(summary).items():
        assert set(re.findall(r'([a-z]+)="', labels)) <= allowed
        assert math.isfinite(value)


def test_names_follow_prometheus() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.help.endswith(".")


def test_a_job_of_any_name_is_quoted(recording: Recording) -> None:
    summary = summarise(replace(recording, title='a "b"\\c\nd'), [])
    assert r'job="a \"b\"\\c\nd"' in expose(summary, Totals())
    assert exposed(summary)


def test_what_was_not_read_is_left_out(recording: Recording) -> None:
    blind = summarise(replace(recording, gpus=(), hosts=(), facts={}), [])
    text = expose(blind, Totals())
    assert "stoker_gpu" not in text
    assert "stoker_last_step_timestamp_seconds" not in text


@settings(max_examples=10)
@given(moments=st.lists(st.floats(1, 70), min_size=1, max_size=5).map(sorted), drop=st.floats(0, 1))
def test_counters_only_grow_while_a_run_is_watched(moments: list[float], drop: float) -> None:
    recording = job(ranks=2, steps=300, late=1)
    totals, before = Totals(), {}
    for t in moments:
        seen = until(recording, t)
        oldest = max(0.0, drop * (t - 20))  # the ring keeps twenty seconds at least
        summary = summarise(since(seen, oldest) if oldest else seen, [])
        totals.add(summary)
        now = {key: value for key, value in exposed(summary, totals).items() if "_total" in key[0]}
        assert all(now[key] >= value for key, value in before.items())
        before = now


def test_what_was_counted_stays_when_the_recording_forgets_its_beginning() -> None:
    recording = job(ranks=1, steps=300, late=None)
    whole, piecewise = Totals(), Totals()
    whole.add(summarise(recording, []))
    for t in range(2, 60, 2):
        piecewise.add(summarise(since(until(recording, t), max(0.0, t - 15.0)), []))
    piecewise.add(summarise(since(recording, 50.0), []))
    ((_, expected),) = whole.ranks()
    ((_, counted),) = piecewise.ranks()
    assert counted.state_s.sum() == pytest.approx(recording.wall_s)
    assert counted.state_s[STATES.index("data")] == pytest.approx(
        expected.state_s[STATES.index("data")], rel=0.05
    )
    assert counted.step_counts.sum() == pytest.approx(300, abs=2)


def test_alerts_and_dashboard_speak_of_metrics_that_exist() -> None:
    known = {metric.name for metric in METRICS}
    known |= {f"{metric.name}_bucket" for metric in METRICS if metric.kind == "histogram"}
    known.add("stoker_machine_check")  # doctor's, of a machine and not of a run
    said = " ".join(alert.expr for alert in ALERTS) + dashboard()
    assert set(re.findall(r"stoker_[a-z_]+", said)) <= known


def test_every_metric_has_its_panel() -> None:
    panels = [panel for panel in json.loads(dashboard())["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(panels) == len(METRICS)
    for metric in METRICS:
        assert any(metric.name in query for query in queries)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
