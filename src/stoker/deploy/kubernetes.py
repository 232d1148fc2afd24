"""Kubernetes objects of a training job, as plain dictionaries. Pure.

One pod is one node: an Indexed Job gives each its number, a headless Service a name by which pod 0 is found.
What is in /dev/shm counts inside the container's memory limit, so the limit is the plan's sum of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stoker.deploy.deployment import METRICS_PORT, Deployment

Object = dict[str, Any]  # of JSON values, as the Kubernetes API has them

_PLAN_FOLDER = "/etc/stoker"
_INDEX = "$(JOB_COMPLETION_INDEX)"  # set by the Job in every container, resolved by the kubelet
_CONTROLLER = "batch.kubernetes.io/controller-uid"
DISRUPTED = {"type": "DisruptionTarget", "status": "True"}  # drained, preempted or evicted
RESTARTS = 10  # of the whole job: when one pod fails, all do, and all begin again at the last checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Where a pod finds its place: its number among the nodes, and the host of the first.

    run      label whose value all pods of one run share, and those of the next do not: their run folder's
    name     of the container that trains
    failed   exit code of a failed training, where an operator takes low ones for final
    """

    master: str
    index: str = _INDEX
    run: str = _CONTROLLER
    name: str = "train"
    env: tuple[Object, ...] = ()
    failed: int = 0


def training_job(one: Deployment) -> Object:
    seat = Seat(master=f"{one.name}-0.{one.name}")
    spec = {
        "completionMode": "Indexed",
        "completions": one.nodes,
        "parallelism": one.nodes,
        "backoffLimit": RESTARTS * one.nodes,
        # a drained or preempted node is nobody's failure
        "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": [DISRUPTED]}]},
        "template": {
            "metadata": pod_metadata(one),
            "spec": {"subdomain": one.name, "restartPolicy": "Never", **training_pod(one, seat)},
        },
    }
    return made("batch/v1", "Job", metadata(one.name, one), spec)


def training_pod(one: Deployment, seat: Seat) -> Object:
    """Doctor, then stage, then train; all three see the same limits, or doctor would judge others."""
    share = f"{seat.index}/{one.nodes}"
    stage = ("stoker", "stage", literal(one.data), "--cache", one.cache, "--share", share)
    doctor = ("stoker", "doctor", "--for", f"{_PLAN_FOLDER}/plan.json", "--cache", one.cache)
    own = seat.env if one.plain else (*seat.env, label_env("RUN", seat.run), token(one))
    return {
        "terminationGracePeriodSeconds": one.grace_s,
        "tolerations": [{"key": one.gpu or "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": _one_pod_a_node(one),
        # a hostPath is root's, and capabilities are too; overlays/restricted does without both
        "securityContext": {"runAsUser": 0, "seccompProfile": {"type": "RuntimeDefault"}},
        "initContainers": [
            *([container("doctor", doctor, one)] if one.doctor else []),
            container("stage", stage, one, env=seat.env),
        ],
        "containers": [
            {
                **container(seat.name, _train(one, seat), one, env=own),
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


def label_env(name: str, label: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}}


def _train(one: Deployment, seat: Seat) -> tuple[str, ...]:
    """Signals go past torchrun, which would give ranks 30 s: see `stoker.deploy.forward`."""
    words = tuple(map(literal, one.command))
    torchrun = replace(one, command=words).torchrun(node=seat.index, master=seat.master)
    out, metrics = f"{one.run_folder}-$(RUN)", f"0.0.0.0:{METRICS_PORT}"
    watch = () if one.plain else ("stoker", "watch", "--out", out, "--metrics", metrics, "--")
    failed = ("--failed", str(seat.failed)) if seat.failed else ()
    forward = ("python3", "-m", "stoker.deploy.forward", "--patience", str(one.saving_s), *failed, "--")
    return (*forward, *watch, *torchrun)


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
        "securityContext": _allowed(one),
        "volumeMounts": [
            {"name": "dshm", "mountPath": "/dev/shm"},
            {"name": "cache", "mountPath": one.cache},
            {"name": "shared", "mountPath": one.shared},
            {"name": "plan", "mountPath": _PLAN_FOLDER, "readOnly": True},
        ],
    }


def _allowed(one: Deployment) -> Object:
    """Nothing more, but for RDMA: pods have no ulimits, and with IPC_LOCK what a network card registers is
    not counted against the node's memlock."""
    needed = {"capabilities": {"add": ["IPC_LOCK"]}} if one.nodes > 1 or one.rdma else {}
    return {"allowPrivilegeEscalation": False, **needed}


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
    amounts |= one.rdma_devices
    return {"requests": amounts, "limits": dict(amounts)}


def service(one: Deployment) -> Object:
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # ranks look for pod 0 before any pod is ready
        "selector": {"app.kubernetes.io/instance": one.name, "app.kubernetes.io/component": "training"},
        "ports": [{"name": "metrics", "port": METRICS_PORT}],
    }
    return made("v1", "Service", metadata(one.name, one), spec)


def plan_map(one: Deployment) -> Object:
    """The plan, against which doctor checks each node."""
    return config_map(f"{one.name}-plan", {"plan.json": one.plan_text()}, one)


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
    spec = {
        "completionMode": "Indexed",
        "completions": one.prepare.pods,
        "parallelism": one.prepare.pods,
        "backoffLimit": 3 * one.prepare.pods,
        "template": {"metadata": {"labels": labels(one, "prepare")}, "spec": pod},
    }
    return made("batch/v1", "Job", metadata(f"{one.name}-prepare", one, "prepare"), spec)


def config_map(name: str, data: Mapping[str, str], one: Deployment, **extra: str) -> Object:
    meta = metadata(name, one)
    meta["labels"] |= extra
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": dict(data)}


def made(version: str, kind: str, meta: Object, spec: Object) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": meta, "spec": spec}


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


def pod_metadata(one: Deployment) -> Object:
    scrape = {"prometheus.io/scrape": "true", "prometheus.io/port": str(METRICS_PORT)}
    networks = {"k8s.v1.cni.cncf.io/networks": ",".join(one.networks)} if one.networks else {}
    named: Object = {"labels": labels(one, "training")}
    said = networks if one.plain else {**scrape, **networks}
    return {**named, "annotations": said} if said else named


def _one_pod_a_node(one: Deployment) -> Object:
    term = {
        "labelSelector": {"matchLabels": labels(one, "training")},
        "topologyKey": "kubernetes.io/hostname",
    }
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
