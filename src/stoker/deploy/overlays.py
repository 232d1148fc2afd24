"""Kustomize overlays: what each changes of the base, as patches and objects of its own. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

from stoker.deploy import kubernetes, monitoring, operators
from stoker.deploy.deployment import Deployment
from stoker.deploy.kubernetes import Object, Seat
from stoker.plan.arithmetic import ROOM, make_plan

Objects = dict[str, Object]  # by file; patch*.yaml are patches of the base
_NOBODY = 1000  # of the image's own user


def overlays(one: Deployment) -> dict[str, Objects]:
    """Every overlay that this deployment can have, by its folder's name."""
    found: dict[str, Objects] = {
        "local-volume": {"patch.yaml": _patch(one, _claimed_cache(one))},
        "restricted": {"patch.yaml": _patch(one, _restricted(one))},
        "kueue": {"patch.yaml": _queued(one)},
        "gang": {"patch.yaml": _gang(one), "pod-group.yaml": operators.pod_group(one)},
        "jobset": {**_instead(one), "job-set.yaml": operators.job_set(one)},
        "train-job": {
            **_instead(one),
            "runtime.yaml": operators.training_runtime(one),
            "train-job.yaml": operators.train_job(one),
        },
        "pytorch-job": {**_instead(one), "pytorch-job.yaml": operators.pytorch_job(one)},
    }
    if one.nodes > 1:
        found["one-node"] = {"patch.yaml": _alone(one)}
    if not one.plain:
        found["operator"] = {
            "patch.yaml": _without_annotations(one),
            "pod-monitor.yaml": monitoring.pod_monitor(one),
            "rules.yaml": monitoring.prometheus_rule(one),
        }
    return found


def _instead(one: Deployment) -> Objects:
    """These bring a Job and a Service of their own."""
    gone: Objects = {
        "patch.yaml": {"apiVersion": "batch/v1", "kind": "Job"},
        "patch-service.yaml": {"apiVersion": "v1", "kind": "Service"},
    }
    return {name: {**each, "metadata": {"name": one.name}, "$patch": "delete"} for name, each in gone.items()}


def _queued(one: Deployment) -> Object:
    """Kueue starts the job when its queue has room for all pods, and then all of them."""
    meta = {"name": one.name, "labels": {operators.QUEUE: one.queue or "default"}}
    return kubernetes.made("batch/v1", "Job", meta, {"suspend": True})


def _gang(one: Deployment) -> Object:
    patch = _patch(one, {"schedulerName": "scheduler-plugins-scheduler"})
    patch["spec"]["template"]["metadata"] = {"labels": {"scheduling.x-k8s.io/pod-group": one.name}}
    return patch


def _restricted(one: Deployment) -> Object:
    """Pods that Pod Security's level `restricted` takes: not root's, without capabilities or hostPath."""
    user = {"runAsUser": _NOBODY, "runAsGroup": _NOBODY, "fsGroup": _NOBODY, "runAsNonRoot": True}
    none = {"capabilities": {"add": None, "drop": ["ALL"]}}
    pod = kubernetes.training_job(one)["spec"]["template"]["spec"]
    each = {
        kind: [{"name": found["name"], "securityContext": none} for found in pod[kind]]
        for kind in ("initContainers", "containers")
    }
    return {"securityContext": user, **each, **_claimed_cache(one)}


def _without_annotations(one: Deployment) -> Object:
    """What the operator scrapes is not to be found a second time."""
    job = kubernetes.training_job(one)
    none = dict.fromkeys(job["spec"]["template"]["metadata"]["annotations"])
    patch = _patch(one, {})
    patch["spec"]["template"] = {"metadata": {"annotations": none}}
    return patch


def _claimed_cache(one: Deployment) -> Object:
    """A volume of the pod's own, with room for its filesystem; null takes the hostPath of the base away."""
    gib = max(1, math.ceil(one.plan.caching.cache / ROOM / (1 << 30)))
    claim = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": one.storage_class,
        "resources": {"requests": {"storage": f"{gib}Gi"}},
    }
    volume = {"name": "cache", "hostPath": None, "ephemeral": {"volumeClaimTemplate": {"spec": claim}}}
    return {"volumes": [volume]}


def _alone(one: Deployment) -> Object:
    """The job on one node, which then reads all of the dataset that it comes to: staged before where its NVMe
    is known to hold it, else as the loop goes."""
    alone = replace(one, plan=make_plan(replace(one.plan.job, nodes=1, nvme=0, memory=0, checkpoint=1)))
    pod = kubernetes.training_pod(alone, Seat(master=f"{one.name}-0.{one.name}"))
    changed = {
        kind: [{"name": each["name"], "command": each["command"], "env": each["env"]} for each in pod[kind]]
        for kind in ("initContainers", "containers")
    }
    if one.plan.job.dataset > one.plan.job.nvme * ROOM:
        changed["initContainers"][-1] = {"name": "stage", "$patch": "delete"}
    patch = _patch(one, changed)
    patch["spec"] |= {"completions": 1, "parallelism": 1}
    return patch


def _patch(one: Deployment, pod: Object) -> Object:
    return kubernetes.made("batch/v1", "Job", {"name": one.name}, {"template": {"spec": pod}})
