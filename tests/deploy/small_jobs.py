"""Deployments for tests."""

from __future__ import annotations

from typing import Any

from stoker.deploy.deployment import Deployment
from stoker.plan.arithmetic import make_plan
from stoker.plan.job import make_job


def deployment(*, job: dict[str, Any] | None = None, **given: Any) -> Deployment:
    values = {"nodes": 2, "read_rate": "100MB/s", "dataset": "2TB", "store_rate": "4GB/s", "parameters": "1B"}
    defaults: dict[str, Any] = {
        "name": "train",
        "command": ("train.py", "--lr", "3e-4"),
        "data": "s3://bucket/corpus",
        "image": "site/train:1",
    }
    return Deployment(plan=make_plan(make_job({**values, **(job or {})})), **{**defaults, **given})
