"""Kubernetes objects of a training job, as plain dictionaries. Pure.

One pod is one node: an Indexed Job gives each its number, a headless Service a name by which pod 0 is found.
What is in /dev/shm counts inside the container's memory limit, so the limit is the plan's sum of both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stoker.deploy.deployment import METRICS_PORT, Deployment

Object = dict[str, Any]  # of JSON values, as the Kubernetes API has them

_INDEX = "$(JOB_COMPLETION_INDEX)"  # set by the Job in every container, resolved by the kubelet
_PLAN_FOLDER = "/etc/stoker"
# all pods of one Job write into one run folder; those of the next into another
_JOB_UID = {
    "name": "JOB_UID",
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}},
}
_RESTARTS = 10  # of the whole job: when one pod fails, all do, and all begin again at the last checkpoint


def training_job(one: Deployment) -> Object:
    spec = {
        "completionMode": "Indexed",
        "completions": one.nodes,
        "parallelism": one.nodes,
        "backoffLimit": _RESTARTS * one.nodes,
        # a drained or preempted node is nobody's failure
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
            ]
        },
        "template": {"metadata": _pod_metadata(one), "spec": training_pod(one)},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata(one.name, one), "spec": spec}


def training_pod(one: Deployment) -> Object:
    """Doctor, then stage, then train; all three see the same limits, or doctor would judge others."""
    stage = ["stoker", "stage", literal(one.data), "--cache", one.cache, "--share", f"{_INDEX}/{one.nodes}"]
    doctor = ["stoker", "doctor", "--for", f"{_PLAN_FOLDER}/plan.json", "--cache", one.cache]
    return {
        "subdomain": one.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": one.grace_s,
        "tolerations": [{"key": one.gpu or "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": _one_pod_a_node(one),
        "initContainers": [
            *([container("doctor", doctor, one)] if one.doctor else []),
            container("stage", stage, one),
        ],
        "containers": [
            {
                **container("train", _train(one), one, env=[] if one.plain else [_JOB_UID, token(one)]),
                "ports": [{"name": "metrics", "containerPort": METRICS_PORT}],
            }
        ],
        "volumes": [
            {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": quantity(one.plan.memory.shm)}},
            {"name": "cache", "hostPath": {"path": one.cache, "type": "DirectoryOrCreate"}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": one.claim}},
            {"name": "plan", "configMap": {"name": f"{one.name}-plan"}},
        ],
    }


def _train(one: Deployment) -> list[str]:
    words = tuple(map(literal, one.command))
    torchrun = replace(one, command=words).torchrun(node=_INDEX, master=f"{one.name}-0.{one.name}")
    if one.plain:
        return list(torchrun)
    out, metrics = f"{one.run_folder}-$(JOB_UID)", f"0.0.0.0:{METRICS_PORT}"
    return ["stoker", "watch", "--out", out, "--metrics", metrics, "--", *torchrun]


def container(name: str, command: Sequence[str], one: Deployment, *, env: Sequence[Object] = ()) -> Object:
    return {
        "name": name,
        "image": one.image,
        "command": list(command),
        "env": [
            {"name": "STOKER_NODES", "value": str(one.nodes)},
            {"name": "STOKER_CACHE", "value": one.cache},
            # torchrun gives its ranks 30 s to save unless told otherwise
            {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(one.saving_s)},
            *env,
        ],
        "resources": resources(one),
        # pods have no ulimits: with IPC_LOCK what RDMA registers is not counted against the node's memlock
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "volumeMounts": [
            {"name": "dshm", "mountPath": "/dev/shm"},
            {"name": "cache", "mountPath": one.cache},
            {"name": "shared", "mountPath": one.shared},
            {"name": "plan", "mountPath": _PLAN_FOLDER, "readOnly": True},
        ],
    }


def literal(word: str) -> str:
    """A word as it is: the kubelet puts variables for $(NAME), and $ for $$."""
    return word.replace("$", "$$")


def token(one: Deployment) -> Object:
    """What Prometheus must know to read metrics: a Secret that is made by hand, since files are shared."""
    source = {"secretKeyRef": {"name": f"{one.name}-metrics", "key": "token"}}
    return {"name": "STOKER_TOKEN", "valueFrom": source}


def resources(one: Deployment) -> Object:
    """Requests equal limits: such a pod is the last to be evicted, and its cores are its own."""
    amounts = {"cpu": str(one.cores), "memory": quantity(one.plan.memory.limit)}
    if one.gpu:
        amounts[one.gpu] = str(one.ranks)
    return {"requests": amounts, "limits": dict(amounts)}


def service(one: Deployment) -> Object:
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # ranks look for pod 0 before any pod is ready
        "selector": {"app.kubernetes.io/instance": one.name, "app.kubernetes.io/component": "training"},
        "ports": [{"name": "metrics", "port": METRICS_PORT}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata(one.name, one), "spec": spec}


def plan_map(one: Deployment) -> Object:
    """The plan, against which doctor checks each node."""
    text = json.dumps({"job": one.plan.job.as_plain(), "needs": one.plan.needs()}, indent=1) + "\n"
    return config_map(f"{one.name}-plan", {"plan.json": text}, one)


def prepare_job(one: Deployment) -> Object:
    """Pods that make the dataset together: each does the tasks of its number, the first finishes it."""
    if one.prepare is None:
        raise ValueError("nothing is to be prepared")
    command = ["stoker", "prepare", "run", *map(literal, one.prepare.arguments), "--on", "pods"]
    amounts = {"cpu": str(one.prepare.cores), "memory": quantity(one.prepare.memory)}
    pod = {
        "restartPolicy": "Never",
        "containers": [
            {
                "name": "prepare",
                "image": one.image,
                "command": command,
                "env": [{"name": "STOKER_NODES", "value": str(one.prepare.pods)}],
                "resources": {"requests": amounts, "limits": dict(amounts)},
                "volumeMounts": [{"name": "shared", "mountPath": one.shared}],
            }
        ],
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": one.claim}}],
    }
    name = f"{one.name}-prepare"
    spec = {
        "completionMode": "Indexed",
        "completions": one.prepare.pods,
        "parallelism": one.prepare.pods,
        "backoffLimit": 3 * one.prepare.pods,
        "template": {"metadata": {"labels": labels(one, "prepare")}, "spec": pod},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata(name, one, "prepare"), "spec": spec}


def config_map(name: str, data: Mapping[str, str], one: Deployment, **extra: str) -> Object:
    meta = metadata(name, one)
    meta["labels"] |= extra
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": dict(data)}


def metadata(name: str, one: Deployment, component: str = "training") -> Object:
    return {"name": name, "labels": labels(one, component)}


def labels(one: Deployment, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "stoker",
        "app.kubernetes.io/instance": one.name,
        "app.kubernetes.io/component": component,
    }


def quantity(count: int) -> str:
    """Bytes as Kubernetes writes them, exact."""
    for unit, size in (("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
        if count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def _pod_metadata(one: Deployment) -> Object:
    scrape = {"prometheus.io/scrape": "true", "prometheus.io/port": str(METRICS_PORT)}
    made: Object = {"labels": labels(one, "training")}
    return made if one.plain else {**made, "annotations": scrape}


def _one_pod_a_node(one: Deployment) -> Object:
    term = {
        "labelSelector": {"matchLabels": labels(one, "training")},
        "topologyKey": "kubernetes.io/hostname",
    }
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
