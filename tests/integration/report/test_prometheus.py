"""A real Prometheus scrapes a run: values arrive under their labels, rules load, alerts fire and end."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import ProxyHandler, build_opener

import pytest
from made_runs import STARVED, job, until
from s3_server import free_ports, running

from stoker.findings import Finding
from stoker.report.dashboard import ALERTS, alert_rules, dashboard
from stoker.report.live import Live
from stoker.report.metrics import expose
from stoker.report.serve import Address
from stoker.report.summary import Summary, summarise
from stoker.report.totals import Totals

pytestmark = pytest.mark.integration

CONFIG = """
global: {{scrape_interval: 200ms, evaluation_interval: 200ms}}
rule_files: [{folder}/rules.yml]
scrape_configs:
  - job_name: stoker
    honor_labels: true  # the run's own name stays in `job`
    static_configs: [{{targets: ["{target}"]}}]
"""
HANG = Finding(
    kind="collective_hang", summary="rank 1 is not in all_reduce number 812", gpu_seconds=40.0, share=0.4
)
ask_locally = build_opener(ProxyHandler({})).open


def test_promtool_finds_nothing_to_mend_in_the_metrics(require_binary: Callable[[str], str]) -> None:
    summary = summarise(job(), [STARVED])
    totals = Totals()
    totals.add(summary)
    checked = subprocess.run(
        [require_binary("promtool"), "check", "metrics"],
        input=expose(summary, totals),
        capture_output=True,
        text=True,
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_promtool_takes_the_rules_and_every_alert_fires_when_it_should(
    require_binary: Callable[[str], str], tmp_path: Path
) -> None:
    (tmp_path / "rules.yml").write_text(alert_rules())
    (tmp_path / "test.yml").write_text(json.dumps(RULES_TEST))  # JSON is YAML
    for command in (["check", "rules", "rules.yml"], ["test", "rules", "test.yml"]):
        checked = subprocess.run(
            [require_binary("promtool"), *command], cwd=tmp_path, capture_output=True, text=True
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_values_arrive_and_alerts_fire_and_end(require_binary: Callable[[str], str], tmp_path: Path) -> None:
    run = Run()
    with Live(run.look, metrics=Address(port=0)) as live, prometheus(require_binary, tmp_path, live) as ask:
        assert ask.until('stoker_gpu_power_limit_watts{node="node-1",gpu="1"}') == 700
        assert ask.until('stoker_wall_seconds_total{rank="1",state="startup"}') == pytest.approx(6.0)
        assert ask.until("stoker_step_seconds_count{rank='0'} > 100") > 100
        assert ask.until('rate(stoker_wall_seconds_total{state="data",rank="0"}[3s]) > 0.1') > 0.1
        assert ask.labels("stoker_running") == {"job": run.title, "instance": ask.target}
        for query in panel_queries():
            ask.until(query)
        run.findings = [HANG, STARVED]
        ask.until('ALERTS{alertname="StokerHang",kind="collective_hang",alertstate="firing"}')
        ask.until('ALERTS{alertname="StokerWaitsForData",alertstate="firing"}')
        run.findings = [STARVED]
        ask.until('absent(ALERTS{alertname="StokerHang"})')
        run.ended = "exit 0"
        ask.until("stoker_running == 0")
        ask.until('absent(ALERTS{alertname="StokerFinding"})')
        cost = ask.until('stoker_finding_cost_gpu_seconds_total{kind="collective_hang"}')
        assert cost == HANG.gpu_seconds  # what it has cost stays said


def panel_queries() -> list[str]:
    """What the panels of the dashboard ask, with its variables filled in."""
    panels = json.loads(dashboard())["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [query.replace("$__rate_interval", "3s").replace("$job", ".+") for query in asked]


class Run:
    """A run that goes on while it is looked at, on the clock of this machine."""

    title = 'train "big" model'

    def __init__(self) -> None:
        self.findings, self.ended = [STARVED], "running"
        self._began = time.time() - 40.0
        whole = job(title=self.title, ranks=2, steps=600, late=1)
        self._whole = replace(whole, facts={"started": self._began})

    def look(self) -> Summary:
        seen = until(self._whole, time.time() - self._began)
        return summarise(replace(seen, ended=self.ended), self.findings)


class Ask:
    """Queries of a running Prometheus."""

    def __init__(self, port: int, target: str) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/query?query="
        self.target = target

    def until(self, query: str) -> float:
        """The value of the first series a query gives, as soon as there is one."""
        return float(self._found(query)[0]["value"][1])

    def labels(self, query: str) -> dict[str, str]:
        (found,) = self._found(query)
        return {name: value for name, value in found["metric"].items() if name != "__name__"}

    def _found(self, query: str) -> list[dict[str, dict[str, str]]]:
        """A busy machine is late for a scrape now and then, and the series is gone until the next."""
        deadline = time.monotonic() + 60
        while not (found := self._query(query)):
            assert time.monotonic() < deadline, f"nothing for {query}"
            time.sleep(0.05)
        return found

    def _query(self, query: str) -> list[dict[str, dict[str, str]]]:
        try:
            with ask_locally(self._url + quote(query), timeout=10) as answer:
                found: list[dict[str, dict[str, str]]] = json.load(answer)["data"]["result"]
        except HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE:  # it listens before it is ready
                raise
            return []
        return found


@contextmanager
def prometheus(require_binary: Callable[[str], str], folder: Path, live: Live) -> Iterator[Ask]:
    """Prometheus with our rules, their waits shortened, scraping a run."""
    target = urlsplit(live.metrics_url).netloc
    quick = re.sub(r"\[\d+m\]", "[3s]", re.sub(r"for: \d+m", "for: 400ms", alert_rules()))
    (folder / "rules.yml").write_text(quick)
    (folder / "prometheus.yml").write_text(CONFIG.format(folder=folder, target=target))
    (port,) = free_ports(1)
    options = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "data",
        "web.listen-address": f"127.0.0.1:{port}",
    }
    command = [require_binary("prometheus"), *(f"--{name}={value}" for name, value in options.items())]
    with running(command, port=port):
        yield Ask(port, target)


# --- what promtool plays through: an hour of minutes, in no time ----------------------------------


def _series(metric: str, values: str) -> dict[str, str]:
    return {"series": metric, "values": values}


def _fires(alert: str, at: str, summary: str, **labels: str) -> dict[str, object]:
    """The alert fires at a time, says this, and has these labels beside those all have."""
    (rule,) = [one for one in ALERTS if one.name == alert]
    expected = {
        "exp_labels": {"job": "bad", "severity": rule.severity, **labels},
        "exp_annotations": {"summary": summary},
    }
    return {"eval_time": at, "alertname": alert, "exp_alerts": [expected]}


def _silent(alert: str, at: str) -> dict[str, object]:
    return {"eval_time": at, "alertname": alert, "exp_alerts": []}


_ADVICE = "run `stoker diagnose` on its folder"
RULES_TEST = {
    "rule_files": ["rules.yml"],
    "evaluation_interval": "1m",
    "tests": [
        {
            "interval": "1m",
            "input_series": [
                _series('stoker_running{job="bad"}', "1x60"),
                _series('stoker_running{job="good"}', "1x60"),
                _series('stoker_last_step_timestamp_seconds{job="bad",rank="0"}', "600x60"),
                _series('stoker_last_step_timestamp_seconds{job="good",rank="0"}', "0+60x60"),
                _series('stoker_wall_seconds_total{job="bad",rank="0",state="data"}', "0+30x60"),
                _series('stoker_wall_seconds_total{job="good",rank="0",state="data"}', "0+3x60"),
                _series('stoker_wall_seconds_total{job="bad",rank="0",state="checkpoint"}', "0+12x60"),
                _series('stoker_finding_active{job="bad",kind="host_hang"}', "0x10 1x50"),
                _series('stoker_finding_active{job="bad",kind="precision"}', "1x60"),
                _series('stoker_finding_active{job="good",kind="healthy"}', "1x60"),
                _series('stoker_host_shm_used_bytes{job="bad",node="n"}', "95x60"),
                _series('stoker_host_shm_size_bytes{job="bad",node="n"}', "100x60"),
                _series('stoker_machine_check{job="bad",node="n",subject="memory",check="shm"}', "3x60"),
                _series('stoker_machine_check{job="bad",node="m",subject="memory",check="shm"}', "2x60"),
                *(
                    _series(f'stoker_step_own_seconds{{job="bad",rank="{r}"}}', f"{1 + (r == 3)}x60")
                    for r in range(4)
                ),
                *(_series(f'stoker_step_own_seconds{{job="good",rank="{r}"}}', "1x60") for r in range(4)),
            ],
            "alert_rule_test": [
                _silent("StokerNoStep", "10m"),
                _fires("StokerNoStep", "20m", "bad has finished no step for 10m 0s"),
                _silent("StokerHang", "5m"),
                _fires("StokerHang", "20m", "bad hangs: host_hang", kind="host_hang"),
                _fires("StokerWaitsForData", "30m", "bad waits for data 50% of the time"),
                _fires("StokerSavesTooLong", "30m", "bad spends 20% of the time saving checkpoints"),
                _fires("StokerStraggler", "30m", "one rank of bad needs 2s a step: the others wait"),
                _fires("StokerSharedMemoryNearlyFull", "30m", "/dev/shm of n is 95% full", node="n"),
                _silent("StokerMachineUnfit", "5m"),
                _fires(
                    "StokerMachineUnfit",
                    "30m",
                    "n: shm fails; run `stoker doctor` there",
                    node="n",
                    subject="memory",
                    check="shm",
                ),
                _fires(
                    "StokerFinding",
                    "30m",
                    "bad: precision; run `stoker diagnose` on its folder",
                    kind="precision",
                ),
            ],
        }
    ],
}
