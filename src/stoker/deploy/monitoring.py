"""What watches a deployed job: machine health on every node, alert rules, a dashboard. Pure."""

from __future__ import annotations

from typing import Any

from stoker.deploy.deployment import HEALTH_PORT, Deployment
from stoker.deploy.kubernetes import Object, config_map, labels, metadata, token
from stoker.errors import require


def surfaces() -> tuple[str, str]:
    """Alert rules and the dashboard, as made from the table of metrics."""
    from stoker.report.dashboard import alert_rules, dashboard

    return alert_rules(), dashboard()


def health_daemons(one: Deployment) -> Object:
    """A pod on every node that examines the machine now and then, and tells Prometheus."""
    meta = {
        "labels": labels(one, "health"),
        "annotations": {"prometheus.io/scrape": "true", "prometheus.io/port": str(HEALTH_PORT)},
    }
    amounts = {"cpu": "100m", "memory": "128Mi"}
    pod = {
        "tolerations": [{"operator": "Exists"}],
        "hostPID": True,  # processes of training pods are what eats a node's memory and locks
        "containers": [
            {
                "name": "health",
                "image": one.image,
                "command": ["stoker", "doctor", "--metrics", f"0.0.0.0:{HEALTH_PORT}", "--cache", one.cache],
                "env": [token(one)],
                "ports": [{"name": "metrics", "containerPort": HEALTH_PORT}],
                "resources": {"requests": amounts, "limits": dict(amounts)},
                "volumeMounts": [{"name": "cache", "mountPath": one.cache, "readOnly": True}],
            }
        ],
        "volumes": [{"name": "cache", "hostPath": {"path": one.cache, "type": "DirectoryOrCreate"}}],
    }
    selector = {"matchLabels": labels(one, "health")}
    spec = {"selector": selector, "template": {"metadata": meta, "spec": pod}}
    name = metadata(f"{one.name}-health", one, "health")
    return {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": name, "spec": spec}


def rules_map(one: Deployment) -> Object:
    """For a Prometheus that mounts its rule files from ConfigMaps."""
    return config_map(f"{one.name}-alerts", {"stoker.rules.yaml": surfaces()[0]}, one)


def dashboard_map(one: Deployment) -> Object:
    """Grafana's sidecar takes up ConfigMaps with this label."""
    return config_map(f"{one.name}-dashboard", {"stoker.json": surfaces()[1]}, one, grafana_dashboard="1")


def pod_monitor(one: Deployment) -> Object:
    """Scraping for the Prometheus operator: training pods and health daemons alike."""
    selector = {"matchLabels": {"app.kubernetes.io/name": "stoker", "app.kubernetes.io/instance": one.name}}
    credentials = {"name": f"{one.name}-metrics", "key": "token"}
    endpoint = {"port": "metrics", "interval": "10s", "authorization": {"credentials": credentials}}
    spec = {"selector": selector, "podMetricsEndpoints": [endpoint]}
    return _operator_object("PodMonitor", one, spec)


def prometheus_rule(one: Deployment) -> Object:
    groups: dict[str, Any] = require("yaml", extra="deploy").safe_load(surfaces()[0])
    return _operator_object("PrometheusRule", one, groups)


def _operator_object(kind: str, one: Deployment, spec: Object) -> Object:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": kind,
        "metadata": metadata(one.name, one),
        "spec": spec,
    }
