"""Operators that schedule gangs: the training as JobSet, Kubeflow's TrainJob and PyTorchJob, PodGroup. Pure.

The pods are those of the plain Job; only where a pod finds its number and the first host differs. What is
gained: one pod that fails or is sent away begins all anew, together, also those that had ended well.
"""

from __future__ import annotations

from stoker.deploy.deployment import Deployment
from stoker.deploy.kubernetes import (
    DISRUPTED,
    RESTARTS,
    Object,
    Seat,
    label_env,
    made,
    metadata,
    pod_metadata,
    training_pod,
)

NODE = "node"  # the name Kubeflow has for the replicated job, and for its container
QUEUE = "kueue.x-k8s.io/queue-name"
_INDEX_LABEL = "training.kubeflow.org/replica-index"
_RETRYABLE = 138  # PyTorchJob takes codes below 128 for errors of the program that no restart mends
_TOGETHER_S = 600  # for all pods of a gang to be placed, before those that are give their nodes back


def job_set(one: Deployment) -> Object:
    """One Job of all nodes. A node that was taken away is nobody's failure; others begin all anew."""
    spec = {
        **_suspended(one),
        "network": {"enableDNSHostnames": True, "subdomain": one.name, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": RESTARTS,
            "rules": [
                {
                    "name": "disrupted",
                    "action": "RestartJobSetAndIgnoreMaxRestarts",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                }
            ],
        },
        "replicatedJobs": [_replicated(one, labels={})],
    }
    return made("jobset.x-k8s.io/v1alpha2", "JobSet", _queued(one), spec)


def training_runtime(one: Deployment) -> Object:
    """What a TrainJob runs: a JobSet, with pods that are placed together or not at all."""
    jobs = [_replicated(one, labels={"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"})]
    spec = {
        "mlPolicy": {"numNodes": one.nodes, "torch": {}},
        "podGroupPolicy": {"coscheduling": {"scheduleTimeoutSeconds": _TOGETHER_S}},
        "template": {"spec": {"failurePolicy": {"maxRestarts": RESTARTS}, "replicatedJobs": jobs}},
    }
    return made("trainer.kubeflow.org/v1alpha1", "TrainingRuntime", metadata(one.name, one), spec)


def train_job(one: Deployment) -> Object:
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": one.name}
    spec = {**_suspended(one), "runtimeRef": runtime, "trainer": {"numNodes": one.nodes}}
    return made("trainer.kubeflow.org/v1alpha1", "TrainJob", _queued(one), spec)


def pytorch_job(one: Deployment) -> Object:
    """Of the older training operator. Workers only: the first is the one that all meet at."""
    seat = Seat(
        master=f"{one.name}-worker-0",
        index="$(NODE)",
        run="training.kubeflow.org/job-name",
        name="pytorch",
        env=(label_env("NODE", _INDEX_LABEL),),
        failed=_RETRYABLE,
    )
    worker = {
        "replicas": one.nodes,
        "restartPolicy": "ExitCode",
        "template": {"metadata": pod_metadata(one), "spec": training_pod(one, seat)},
    }
    policy = {"minAvailable": one.nodes, "scheduleTimeoutSeconds": _TOGETHER_S}
    run = {"backoffLimit": RESTARTS * one.nodes, "cleanPodPolicy": "None", "schedulingPolicy": policy}
    spec = {
        "nprocPerNode": str(one.ranks),
        "runPolicy": {**_suspended(one), **run},
        "pytorchReplicaSpecs": {"Worker": worker},
    }
    return made("kubeflow.org/v1", "PyTorchJob", _queued(one), spec)


def pod_group(one: Deployment) -> Object:
    """For the scheduler plugin `coscheduling`: all pods are placed, or none."""
    spec = {"minMember": one.nodes, "scheduleTimeoutSeconds": _TOGETHER_S}
    return made("scheduling.x-k8s.io/v1alpha1", "PodGroup", metadata(one.name, one), spec)


def _replicated(one: Deployment, *, labels: dict[str, str]) -> Object:
    seat = Seat(master=f"{one.name}-{NODE}-0-0.{one.name}", name=NODE)
    pod = {"restartPolicy": "Never", **training_pod(one, seat)}
    job = {
        "completionMode": "Indexed",
        "completions": one.nodes,
        "parallelism": one.nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onPodConditions": [DISRUPTED]}]},
        "template": {"metadata": pod_metadata(one), "spec": pod},
    }
    named = {"metadata": {"labels": labels}} if labels else {}
    return {"name": NODE, "replicas": 1, "template": {**named, "spec": job}}


def _queued(one: Deployment) -> Object:
    meta = metadata(one.name, one)
    meta["labels"] |= {QUEUE: one.queue} if one.queue else {}
    return meta


def _suspended(one: Deployment) -> Object:
    """Kueue lets it go when there is room for all of it."""
    return {"suspend": True} if one.queue else {}
