"""Grafana dashboard and Prometheus alert rules, made from the metrics' table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from stoker.report.metrics import METRICS, Metric

_GRAFANA_UNITS = {
    "seconds": "s",
    "timestamp": "s",  # shown as an age
    "ratio": "percentunit",
    "watts": "watt",
    "celsius": "celsius",
    "hertz": "hertz",
    "bytes": "bytes",
    "bytes_per_second": "binBps",
    "bool": "bool",
}
_CHOSEN = '{job=~"$job"}'
_WIDTH, _HEIGHT = 12, 8  # of Grafana's 24 columns; rows of 30 pixels


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """When to tell somebody, and whom: critical wakes a person, warning waits for the morning."""

    name: str
    expr: str
    hold: str  # how long it must last
    severity: str
    summary: str


_WHILE_IT_RUNS = "and on (job) stoker_running == 1"
ALERTS = (
    Alert(
        name="StokerNoStep",
        expr=f"time() - max by (job) (stoker_last_step_timestamp_seconds) > 300 {_WHILE_IT_RUNS}",
        hold="1m",
        severity="critical",
        summary="{{ $labels.job }} has finished no step for {{ $value | humanizeDuration }}",
    ),
    Alert(
        name="StokerHang",
        expr=f'stoker_finding_active{{kind=~"collective_hang|host_hang"}} == 1 {_WHILE_IT_RUNS}',
        hold="1m",
        severity="critical",
        summary="{{ $labels.job }} hangs: {{ $labels.kind }}",
    ),
    Alert(
        name="StokerSharedMemoryNearlyFull",
        expr="stoker_host_shm_used_bytes / stoker_host_shm_size_bytes > 0.9",
        hold="1m",
        severity="critical",
        summary="/dev/shm of {{ $labels.node }} is {{ $value | humanizePercentage }} full",
    ),
    Alert(
        name="StokerWaitsForData",
        expr='avg by (job) (rate(stoker_wall_seconds_total{state="data"}[5m])) > 0.2',
        hold="10m",
        severity="warning",
        summary="{{ $labels.job }} waits for data {{ $value | humanizePercentage }} of the time",
    ),
    Alert(
        name="StokerSavesTooLong",
        expr='avg by (job) (rate(stoker_wall_seconds_total{state="checkpoint"}[30m])) > 0.1',
        hold="10m",
        severity="warning",
        summary="{{ $labels.job }} spends {{ $value | humanizePercentage }} of the time saving checkpoints",
    ),
    Alert(
        name="StokerStraggler",
        expr="max by (job) (stoker_step_own_seconds) > 1.2 * avg by (job) (stoker_step_own_seconds)",
        hold="10m",
        severity="warning",
        summary="one rank of {{ $labels.job }} needs {{ $value | humanizeDuration }} a step: the others wait",
    ),
    Alert(
        name="StokerMachineUnfit",
        expr="stoker_machine_check == 3",
        hold="10m",
        severity="warning",
        summary="{{ $labels.node }}: {{ $labels.check }} fails; run `stoker doctor` there",
    ),
    Alert(
        name="StokerFinding",
        expr=f'stoker_finding_active{{kind!~"healthy|collective_hang|host_hang"}} == 1 {_WHILE_IT_RUNS}',
        hold="15m",
        severity="info",
        summary="{{ $labels.job }}: {{ $labels.kind }}; run `stoker diagnose` on its folder",
    ),
)


def alert_rules() -> str:
    """A rule file for Prometheus."""
    lines = ["groups:", "  - name: stoker", "    rules:"]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expr)}",  # a JSON string is a YAML string
            f"        for: {alert.hold}",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
        ]
    return "\n".join(lines) + "\n"


def dashboard() -> str:
    """A dashboard for Grafana: a row for each part of the table, a panel for each metric."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in dict.fromkeys(metric.row for metric in METRICS):
        panels.append(
            {"type": "row", "title": row, "collapsed": False, "gridPos": _place(0, y, 24, 1), "panels": []}
        )
        shown = [metric for metric in METRICS if metric.row == row]
        for number, metric in enumerate(shown):
            x, down = number % 2 * _WIDTH, number // 2 * _HEIGHT
            panels.append(_panel(metric, _place(x, y + 1 + down, _WIDTH, _HEIGHT)))
        y += 1 + -(-len(shown) // 2) * _HEIGHT
    for number, panel in enumerate(panels):
        panel["id"] = number + 1
    return json.dumps(_board(panels), indent=2) + "\n"


# --- the parts of a dashboard ---------------------------------------------------------------------


def _panel(metric: Metric, place: dict[str, int]) -> dict[str, Any]:
    style: dict[str, Any] = {"unit": _GRAFANA_UNITS.get(metric.unit, "short"), "min": 0}
    if metric.labels[-1:] == ("state",):
        style |= {
            "unit": "percentunit",
            "max": 1,
            "custom": {"stacking": {"mode": "normal"}, "fillOpacity": 80},
        }
    targets = [
        {"refId": chr(ord("A") + i), "expr": expr, "legendFormat": legend}
        for i, (expr, legend) in enumerate(_queries(metric))
    ]
    return {
        "type": "timeseries",
        "title": _title(metric),
        "description": metric.help,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": place,
        "fieldConfig": {"defaults": style, "overrides": []},
        "targets": targets,
    }


def _queries(metric: Metric) -> list[tuple[str, str]]:
    """How a metric is looked at, by what it is: expressions and their legends."""
    name = f"{metric.name}{_CHOSEN}"
    if metric.kind == "histogram":
        rate = f"sum by (job, le) (rate({metric.name}_bucket{_CHOSEN}[$__rate_interval]))"
        return [(f"histogram_quantile({q}, {rate})", f"{{{{job}}}} {q:.0%}") for q in (0.5, 0.95)]
    if metric.kind == "counter":
        last = metric.labels[-1]
        by = last if last in ("state", "kind") else "job"
        over = "avg" if by == "state" else "sum"  # states of all ranks: shares of the run's time
        return [(f"{over} by ({by}) (rate({name}[$__rate_interval]))", f"{{{{{by}}}}}")]
    if metric.unit == "timestamp":
        return [(f"time() - {name}", _legend(metric))]
    return [(name, _legend(metric))]


def _legend(metric: Metric) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in metric.labels or ("job",))


def _title(metric: Metric) -> str:
    said = (
        metric.name.removeprefix("stoker_")
        .removesuffix("_total")
        .removesuffix(f"_{metric.unit}")
        .replace("_", " ")
    )
    if metric.unit == "timestamp":
        return "since the last step"
    return f"{said} per second" if metric.kind == "counter" else said


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _board(panels: list[dict[str, Any]]) -> dict[str, Any]:
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus"},
        {
            "name": "job",
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": "label_values(stoker_running, job)",
            "refresh": 2,
            "includeAll": True,
            "multi": True,
        },
    ]
    return {
        "uid": "stoker",
        "title": "stoker",
        "description": "Made by `stoker metrics dashboard`.",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }
