"""The folder of a Kubernetes deployment: plain files, a Kustomize base, overlays that change little. Pure.

base/                    the job as it is: hostPath NVMe cache, Prometheus annotations
prepare/                 the Indexed Job that makes the dataset, where one is to be made
monitoring/              health daemons, alert rules, dashboard
overlays/local-volume/   the cache on a claim of a local-volume storage class
overlays/operator/       PodMonitor and PrometheusRule instead of annotations
overlays/one-node/       the same on one node, to try it
Containerfile            the image they all run
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from stoker.deploy import kubernetes, monitoring
from stoker.deploy.container import containerfile
from stoker.deploy.deployment import Deployment
from stoker.deploy.kubernetes import Object
from stoker.errors import UsageError
from stoker.plan.arithmetic import ROOM, make_plan
from stoker.plan.documents import dump_yaml

Files = dict[str, str]  # path inside the folder, text


def kubernetes_files(one: Deployment) -> Files:
    """Every file of the folder."""
    if not one.image:
        raise UsageError("no image is named", hint="give --image, made from the Containerfile")
    files = {"Containerfile": containerfile(), **_base(one), **_monitoring(one)}
    if one.prepare:
        files |= _group("prepare", one, {"job.yaml": kubernetes.prepare_job(one)})
    for name, patches in _overlays(one).items():
        files |= _overlay(name, one, patches)
    return files


def _base(one: Deployment) -> Files:
    objects = {
        "service.yaml": kubernetes.service(one),
        "plan.yaml": kubernetes.plan_map(one),
        "training.yaml": kubernetes.training_job(one),
    }
    return _group("base", one, objects)


def _monitoring(one: Deployment) -> Files:
    objects = {
        "health.yaml": monitoring.health_daemons(one),
        "alerts.yaml": monitoring.rules_map(one),
        "dashboard.yaml": monitoring.dashboard_map(one),
    }
    return _group("monitoring", one, objects)


def _overlays(one: Deployment) -> dict[str, dict[str, Object]]:
    """Files of each overlay: patches of the training job, or objects of their own."""
    overlays = {"local-volume": {"patch.yaml": _patch(one, _claimed_cache(one))}}
    if one.nodes > 1:
        overlays["one-node"] = {"patch.yaml": _alone(one)}
    if not one.plain:
        overlays["operator"] = {
            "patch.yaml": _without_annotations(one),
            "pod-monitor.yaml": monitoring.pod_monitor(one),
            "rules.yaml": monitoring.prometheus_rule(one),
        }
    return overlays


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
    pod = kubernetes.training_pod(alone)
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
    spec = {"template": {"spec": pod}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": one.name}, "spec": spec}


def _group(folder: str, one: Deployment, objects: dict[str, Object]) -> Files:
    files = {f"{folder}/{name}": dump_yaml([each]) for name, each in objects.items()}
    return {f"{folder}/kustomization.yaml": _kustomization(one, resources=objects), **files}


def _overlay(name: str, one: Deployment, objects: dict[str, Object]) -> Files:
    folder = f"overlays/{name}"
    files = {f"{folder}/{file}": dump_yaml([each]) for file, each in objects.items()}
    own = [file for file in objects if file != "patch.yaml"]
    patches = [file for file in objects if file == "patch.yaml"]
    listing = _kustomization(one, resources=["../../base", *own], patches=patches)
    return {f"{folder}/kustomization.yaml": listing, **files}


def _kustomization(one: Deployment, *, resources: Iterable[str], patches: Iterable[str] = ()) -> str:
    made: Object = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": one.namespace,
        "resources": list(resources),
    }
    if listed := [{"path": path} for path in patches]:
        made["patches"] = listed
    return dump_yaml([made])
