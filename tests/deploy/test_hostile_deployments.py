"""Whatever is asked for: refused with a reason, or files that parse, hold and say just what was asked."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from small_jobs import deployment
from strict import validate

from stoker.deploy.deployment import Deployment, Prepare
from stoker.deploy.kustomize import kubernetes_files
from stoker.deploy.slurm import slurm_files
from stoker.errors import UsageError

NASTY = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [
            "", " ", "-", "--", "..", "a/../b", "'", '"', "$(reboot)", "`id`", "${HOME}", "$$", "@command@",
            "@x@", "a\nb", "a\n#SBATCH --exclusive", "#", "%j", "{{ x }}", "yes", "010", "3e-4", "null",
            "!tag", "&a", "*a", "a: b", "- a", "|", "\u2028", "\x00", "\x1b[0m", "EOF", "it's", "x" * 300,
            "\ud7ff", "\udcff",
            "/nvme", "/shared", "a", "a-b", "rdma/x=3",
        ]
    ),
)  # fmt: skip
WORDS = st.lists(NASTY, min_size=1, max_size=3).map(tuple)
TEXTS = (
    "name", "namespace", "claim", "storage_class", "gpu", "rdma", "queue", "container", "partition", "image",
    "cache", "shared", "data", "time_limit",
)  # fmt: skip
JOBS: list[dict[str, Any]] = [
    {"nodes": 1},
    {"nodes": 10_000, "dataset": "1000TB"},
    {"loader": "process", "batch": 8, "sample": 9, "step": 1},
    {"gpus_per_node": 1, "dataset": 0, "read_rate": 0, "parameters": 0},
]
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(TEXTS, NASTY),
    "command": WORDS.map(lambda words: ("train.py", *words)),
    "networks": WORDS,
    "grace_s": st.sampled_from([-1, 0, 1, 60, 300, 10**9]),
    "plain": st.booleans(),
    "doctor": st.booleans(),
    "prepare": WORDS.map(lambda words: Prepare(arguments=(*words, "--out", "c"))),
    "job": st.sampled_from(JOBS),
}
# a few at a time: with all of them nearly everything is refused
GIVEN = st.lists(st.sampled_from(sorted(FIELDS)), max_size=3, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(given=GIVEN)
def test_any_deployment_is_refused_or_says_what_was_asked(given: dict[str, Any]) -> None:
    try:
        one = deployment(**given)
        files = {**kubernetes_files(one), **slurm_files(one)}
    except UsageError:
        return
    for path, text in files.items():
        check(path, text, one)


def check(path: str, text: str, one: Deployment) -> None:
    assert "\0" not in text
    if path.endswith(".yaml"):
        found = yaml.safe_load(text)
        if path == "base/training.yaml":
            (train,) = found["spec"]["template"]["spec"]["containers"]
            words = [word.replace("$$", "$") for word in train["command"][-len(one.command) :]]
            assert tuple(words) == one.command
    elif path.endswith(".json"):
        assert json.loads(text)["needs"]
    elif path.endswith((".sh", ".sbatch")):
        checked = subprocess.run(["bash", "-n"], input=text.encode(), capture_output=True)
        assert checked.returncode == 0, checked.stderr
        directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
        assert "#SBATCH --exclusive" not in directives
        if path == "prolog.sh":
            assert one.data in shlex.split(text, comments=True)


@pytest.mark.integration
@pytest.mark.parametrize(
    "given",
    [
        {"command": ("train.py", "a: b", "3e-4", "yes", "it's", "@x@", "{{ x }}")},
        {"data": "s3://b/$(HOME) x", "networks": ("a", "b/c"), "rdma": "rdma/hca_shared_devices_a"},
        {"job": {"gpus_per_node": 1, "nodes": 1, "dataset": 0, "read_rate": 0, "parameters": 0}, "gpu": ""},
        {"name": "a", "namespace": "0", "queue": "0", "claim": "1.2"},
    ],
)
def test_odd_deployments_are_valid(given: dict[str, Any]) -> None:
    for path, text in kubernetes_files(deployment(**given)).items():
        if path.endswith(".yaml") and not Path(path).name.startswith(("kustomization", "patch")):
            validate(yaml.safe_load(text))
