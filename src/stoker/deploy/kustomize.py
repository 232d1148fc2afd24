"""Kustomize: the folder of a Kubernetes deployment, plain files, a base, overlays that change little. Pure.

base/                    the job as it is: hostPath NVMe cache, Prometheus annotations
prepare/                 the Indexed Job that makes the dataset, where one is to be made
monitoring/              health daemons, alert rules, dashboard
overlays/NAME/           the base changed for one kind of cluster; see overlays.py
Containerfile            the image they all run
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker import __version__
from stoker.deploy import kubernetes, monitoring
from stoker.deploy.deployment import Deployment
from stoker.deploy.kubernetes import Object
from stoker.deploy.operators import NODE
from stoker.deploy.overlays import overlays
from stoker.deploy.write import filled
from stoker.errors import UsageError
from stoker.plan.documents import dump_yaml

_LONGEST = 63  # of a host's name
Files = dict[str, str]  # path inside the folder, text


def kubernetes_files(one: Deployment) -> Files:
    """Every file of the folder."""
    if not one.image:
        raise UsageError("no image is named", hint="give --image, made from the Containerfile")
    if len(longest := f"{one.name}-{NODE}-0-{one.nodes - 1}-xxxxx") > _LONGEST:
        raise UsageError(
            f"a pod would be called {longest}, and {_LONGEST} letters are the most", hint="shorten the name"
        )
    files = {"Containerfile": filled("Containerfile", version=__version__)}
    for folder, objects in _folders(one).items():
        files |= {f"{folder}/{name}": dump_yaml([each]) for name, each in objects.items()}
        files[f"{folder}/kustomization.yaml"] = dump_yaml([_kustomization(folder, one, objects)])
    return files


def _folders(one: Deployment) -> dict[str, dict[str, Object]]:
    """The objects of each folder; of an overlay also its patches of the base."""
    folders = {
        "base": {
            "service.yaml": kubernetes.service(one),
            "plan.yaml": kubernetes.plan_map(one),
            "training.yaml": kubernetes.training_job(one),
        },
        "monitoring": {
            "health.yaml": monitoring.health_daemons(one),
            "alerts.yaml": monitoring.rules_map(one),
            "dashboard.yaml": monitoring.dashboard_map(one),
            "scrape.yaml": monitoring.scrape_map(one),
        },
        **{f"overlays/{name}": objects for name, objects in overlays(one).items()},
    }
    if one.prepare:
        folders["prepare"] = {"job.yaml": kubernetes.prepare_job(one)}
    return folders


def _kustomization(folder: str, one: Deployment, objects: Iterable[str]) -> Object:
    base = ["../../base"] if folder.startswith("overlays/") else []
    patches = [{"path": name} for name in objects if name.startswith("patch")]
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": one.namespace,
        "resources": [*base, *(name for name in objects if not name.startswith("patch"))],
        **({"patches": patches} if patches else {}),
    }
