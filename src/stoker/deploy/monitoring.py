"""Monitoring of a deployed job: machine health on every node, alert rules, a dashboard. Pure."""

from __future__ import annotations

from typing import Any

from stoker.deploy.deployment import HEALTH_PORT, Deployment
from stoker.deploy.kubernetes import Object, config_map, labels, made, metadata, token
from stoker.deploy.write import filled
from stoker.errors import require
from stoker.report.dashboard import alert_rules, dashboard


def health_daemons(one: Deployment) -> Object:
    """A pod on every node that examines the machine now and then, and tells Prometheus.

    It sees the node's network and /dev/shm, every card (as other exporters do, without asking for one, which
    would take it from the training) and no limits but those that pods get there. What it cannot see, the
    kernel's log among it, it reports as unknown."""
    meta = {
        "labels": labels(one, "health"),
        "annotations": {"prometheus.io/scrape": "true", "prometheus.io/port": str(HEALTH_PORT)},
    }
    cards = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "utility"}
    places = {"dshm": "/dev/shm", "cache": one.cache}
    pod = {
        "tolerations": [{"operator": "Exists"}],
        "hostNetwork": True,  # its host name is the node's then
        "dnsPolicy": "ClusterFirstWithHostNet",
        "containers": [
            {
                "name": "health",
                "image": one.image,
                "command": ["stoker", "doctor", "--metrics", f"0.0.0.0:{HEALTH_PORT}", "--cache", one.cache],
                "env": [token(one), *({"name": name, "value": cards[name]} for name in cards)],
                "ports": [{"name": "metrics", "containerPort": HEALTH_PORT}],
                "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
                "securityContext": {"runAsUser": 0, "allowPrivilegeEscalation": False},
                "volumeMounts": [{"name": name, "mountPath": path} for name, path in places.items()],
            }
        ],
        "volumes": [
            {"name": "dshm", "hostPath": {"path": "/dev/shm", "type": "Directory"}},
            {"name": "cache", "hostPath": {"path": one.cache, "type": "DirectoryOrCreate"}},
        ],
    }
    selector = {"matchLabels": labels(one, "health")}
    spec = {"selector": selector, "template": {"metadata": meta, "spec": pod}}
    return made("apps/v1", "DaemonSet", metadata(f"{one.name}-health", one, "health"), spec)


def scrape_map(one: Deployment) -> Object:
    """For a Prometheus without the operator: the scrape configuration, which passes the token on."""
    text = filled("scrape.yaml", job=one.name, namespace=one.namespace)
    return config_map(f"{one.name}-scrape", {"scrape.yaml": text}, one)


def rules_map(one: Deployment) -> Object:
    """For a Prometheus that mounts its rule files from ConfigMaps."""
    return config_map(f"{one.name}-alerts", {"stoker.rules.yaml": alert_rules()}, one)


def dashboard_map(one: Deployment) -> Object:
    """Grafana's sidecar takes up ConfigMaps with this label."""
    return config_map(f"{one.name}-dashboard", {"stoker.json": dashboard()}, one, grafana_dashboard="1")


def pod_monitor(one: Deployment) -> Object:
    """Scraping for the Prometheus operator: training pods and health daemons alike."""
    selector = {"matchLabels": {"app.kubernetes.io/name": "stoker", "app.kubernetes.io/instance": one.name}}
    credentials = {"name": f"{one.name}-metrics", "key": "token"}
    endpoint = {
        "port": "metrics",
        "interval": "10s",
        "honorLabels": True,  # a run's own name stays in `job`
        "authorization": {"credentials": credentials},
    }
    spec = {"selector": selector, "podMetricsEndpoints": [endpoint]}
    return made("monitoring.coreos.com/v1", "PodMonitor", metadata(one.name, one), spec)


def prometheus_rule(one: Deployment) -> Object:
    groups: dict[str, Any] = require("yaml", extra="deploy").safe_load(alert_rules())
    return made("monitoring.coreos.com/v1", "PrometheusRule", metadata(one.name, one), groups)
