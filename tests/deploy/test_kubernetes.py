"""Kubernetes files: valid by the API's own schemas, and sums that hold."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_jobs import deployment
from strict import restricted, validate

from stoker.deploy.deployment import Deployment, Prepare
from stoker.deploy.kubernetes import quantity
from stoker.deploy.kustomize import kubernetes_files
from stoker.deploy.write import write_files
from stoker.errors import UsageError

VERSIONS = ("1.28", "1.33", "1.37")
PREPARE = Prepare(arguments=("s3://b/raw", "--tokenizer", "gpt2", "--out", "s3://b/c", "--work", "/shared/w"))
SIZES: dict[str, dict[str, Any]] = {
    "one GPU": {"job": {"nodes": 1, "gpus_per_node": 1}},
    "two nodes": {"job": {"nodes": 2}, "prepare": PREPARE},
    "worker processes": {"job": {"loader": "process", "batch": 64, "sample": "200kB", "step": "300ms"}},
    "ten thousand nodes": {"job": {"nodes": 10_000, "dataset": "2000TB", "store_rate": "4000GB/s"}},
    "plain": {"plain": True},
    "on CPUs": {"gpu": ""},
}


INSTEAD = {
    "overlays/jobset": "JobSet",
    "overlays/train-job": "TrainJob",
    "overlays/pytorch-job": "PyTorchJob",
}


def objects(one: Deployment) -> dict[str, dict[str, Any]]:
    """Every object by its file; patches are no whole objects and kustomizations none of the cluster's."""
    return {
        path: yaml.safe_load(text)
        for path, text in kubernetes_files(one).items()
        if path.endswith(".yaml") and not Path(path).name.startswith(("kustomization", "patch"))
    }


def pod_of(one: Deployment) -> dict[str, Any]:
    return objects(one)["base/training.yaml"]["spec"]["template"]["spec"]


@pytest.mark.integration  # with a validator and schemas of others
@pytest.mark.parametrize("size", SIZES)
def test_objects_are_valid_by_the_schemas_of_several_versions(size: str) -> None:
    found = list(objects(deployment(**SIZES[size])).values())
    assert len(found) >= 12
    # one size by all versions: another size changes values, not fields
    versions = VERSIONS if size == "two nodes" else VERSIONS[-1:]
    for version in versions:
        for each in found:
            validate(each, version)


def test_the_schemas_would_see_a_slip() -> None:
    job = objects(deployment())["base/training.yaml"]
    job["spec"]["completionsMode"] = "Indexed"
    with pytest.raises(Exception, match="completionsMode"):
        validate(job, VERSIONS[-1])


FOLDERS = sorted(
    path.removesuffix("/kustomization.yaml")
    for path in kubernetes_files(deployment(prepare=PREPARE))
    if path.endswith("/kustomization.yaml")
)


@pytest.mark.integration
@pytest.mark.parametrize("overlay", FOLDERS)
def test_kustomize_builds_every_folder_into_valid_objects(
    tmp_path: Path, overlay: str, skip_or_fail: Callable[[str], None]
) -> None:
    kubectl = shutil.which("kubectl")
    if not kubectl:  # no Debian package has a current one
        skip_or_fail("kubectl is not installed: take the binary of a Kubernetes release into the PATH")
    assert kubectl
    write_files(tmp_path, kubernetes_files(deployment(prepare=PREPARE, namespace="team-a")))
    built = subprocess.run(
        [kubectl, "kustomize", tmp_path / overlay], capture_output=True, text=True, check=True, timeout=60
    )
    made = list(yaml.safe_load_all(built.stdout))
    assert {each["metadata"]["namespace"] for each in made} == {"team-a"}
    for each in made:
        validate(each)
    jobs = {each["metadata"]["name"]: each["spec"] for each in made if each["kind"] == "Job"}
    if overlay == "overlays/local-volume":
        volumes = {volume["name"]: volume for volume in jobs["train"]["template"]["spec"]["volumes"]}
        assert "ephemeral" in volumes["cache"]
        assert "hostPath" not in volumes["cache"]
        assert "emptyDir" in volumes["dshm"]
    if overlay == "overlays/one-node":
        assert jobs["train"]["completions"] == 1
        assert "--nnodes=1" in jobs["train"]["template"]["spec"]["containers"][0]["command"]
    if overlay in INSTEAD:
        kinds = {each["kind"] for each in made}
        assert INSTEAD[overlay] in kinds
        assert not kinds & {"Job", "Service"}
    if overlay == "overlays/restricted":
        assert restricted(jobs["train"]["template"]["spec"]) == []
    if overlay == "base":
        assert "cache" in " ".join(restricted(jobs["train"]["template"]["spec"]))
    if overlay == "overlays/operator":
        assert not jobs["train"]["template"]["metadata"].get("annotations")


def test_files_named_in_kustomizations_are_there() -> None:
    files = kubernetes_files(deployment(prepare=PREPARE))
    for path, text in files.items():
        if path.endswith("kustomization.yaml"):
            listed = yaml.safe_load(text)
            for name in [*listed["resources"], *(patch["path"] for patch in listed.get("patches", []))]:
                at = (Path("/") / path).parent / name
                there = at.resolve().relative_to("/").as_posix()
                assert there in files or f"{there}/kustomization.yaml" in files


def test_no_template_is_left_inside() -> None:
    for path, text in kubernetes_files(deployment(prepare=PREPARE)).items():
        if (
            not path.startswith("monitoring/") and "rules" not in path
        ):  # alerts have Prometheus' own templates
            assert "{{" not in text, path


def test_shm_counts_inside_the_memory_limit() -> None:
    one = deployment(job={"memory": "100GiB", "shm": "32GiB"})
    pod = pod_of(one)
    limit = pod["containers"][0]["resources"]["limits"]["memory"]
    dshm = next(volume for volume in pod["volumes"] if volume["name"] == "dshm")
    assert (limit, dshm["emptyDir"]["sizeLimit"]) == ("100Gi", "32Gi")
    assert one.plan.memory.processes == 68 << 30


def test_doctor_runs_before_stage_under_the_limits_of_training() -> None:
    pod = pod_of(deployment())
    doctor, stage = pod["initContainers"]
    assert doctor["command"][:2] == ["stoker", "doctor"]
    assert stage["command"][-2:] == ["--share", "$(JOB_COMPLETION_INDEX)/2"]
    for each in (doctor, stage):
        assert each["resources"] == pod["containers"][0]["resources"]
        assert each["volumeMounts"] == pod["containers"][0]["volumeMounts"]
    assert doctor["resources"]["requests"] == doctor["resources"]["limits"]


def test_ranks_meet_at_pod_0_under_the_number_of_the_share_that_was_staged() -> None:
    pod = pod_of(deployment())
    command = pod["containers"][0]["command"]
    forward = ["python3", "-m", "stoker.deploy.forward", "--patience", "270", "--"]
    assert command[: len(forward) + 2] == [*forward, "stoker", "watch"]
    assert "--node-rank=$(JOB_COMPLETION_INDEX)" in command
    assert "--master-addr=train-0.train" in command
    assert pod["subdomain"] == "train"
    assert objects(deployment())["base/service.yaml"]["spec"]["publishNotReadyAddresses"]
    assert command[-3:] == ["train.py", "--lr", "3e-4"]


def test_pinned_memory_may_be_locked() -> None:
    for each in pod_of(deployment())["containers"]:
        assert each["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    (alone,) = pod_of(deployment(job={"nodes": 1}))["containers"]
    assert "capabilities" not in alone["securityContext"]


def test_doctor_reads_the_needs_of_the_plan() -> None:
    one = deployment()
    held = yaml.safe_load(objects(one)["base/plan.yaml"]["data"]["plan.json"])
    assert held["needs"] == one.plan.needs().as_plain()


def test_an_image_is_needed() -> None:
    with pytest.raises(UsageError, match="no image"):
        kubernetes_files(deployment(image=""))


@pytest.mark.parametrize(
    ("count", "text"), [(1 << 30, "1Gi"), (100 << 30, "100Gi"), (64 << 20, "64Mi"), (1000, "1000")]
)
def test_quantities_are_exact(count: int, text: str) -> None:
    assert quantity(count) == text


def test_dollars_of_a_command_are_no_variables_of_the_kubelet() -> None:
    prepare = Prepare(arguments=("$(STOKER_NODES)", "--out", "/shared/c"))
    one = deployment(command=("train.py", "a$$b", "$(STOKER_NODES)", "$HOME"), prepare=prepare)
    (train,) = pod_of(one)["containers"]
    assert train["command"][-3:] == ["a$$$$b", "$$(STOKER_NODES)", "$$HOME"]
    assert "--node-rank=$(JOB_COMPLETION_INDEX)" in train["command"]
    (made,) = objects(one)["prepare/job.yaml"]["spec"]["template"]["spec"]["containers"]
    assert "$$(STOKER_NODES)" in made["command"]


@pytest.mark.parametrize(("nvme", "staged"), [("1.5TB", False), ("4TB", True)])
def test_one_node_stages_only_what_it_can_hold(nvme: str, staged: bool) -> None:
    files = kubernetes_files(deployment(job={"nvme": nvme}))
    patch = yaml.safe_load(files["overlays/one-node/patch.yaml"])
    *_, stage = patch["spec"]["template"]["spec"]["initContainers"]
    assert ("command" in stage, "$patch" in stage) == (staged, not staged)


def test_a_claimed_cache_has_room_for_the_filesystem_too() -> None:
    one = deployment(job={"dataset": "200GiB"})
    patch = yaml.safe_load(kubernetes_files(one)["overlays/local-volume/patch.yaml"])
    (volume,) = patch["spec"]["template"]["spec"]["volumes"]
    claim = volume["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert claim["resources"]["requests"]["storage"] == "106Gi"  # of two nodes' 100 GiB, 95% of it


def test_the_image_has_what_its_commands_need() -> None:
    text = kubernetes_files(deployment())["Containerfile"]
    extras = set(re.findall(r"--extra ([a-z-]+)", text))
    assert {"object-store", "gpu", "tokens", "arrow"} <= extras  # stage; doctor and watch; prepare
    assert "--require-hashes" in text
    assert "USER 1000" in text


TRAINING = ("base/training.yaml", "overlays/jobset/job-set.yaml", "overlays/train-job/runtime.yaml",
            "overlays/pytorch-job/pytorch-job.yaml")  # fmt: skip


def templates(found: Any) -> list[dict[str, Any]]:
    """Every pod template in an object."""
    if isinstance(found, list):
        return [one for each in found for one in templates(each)]
    if not isinstance(found, dict):
        return []
    own = [found] if "containers" in found.get("spec", {}) else []
    return own + [one for each in found.values() for one in templates(each)]


@pytest.mark.parametrize("path", TRAINING)
def test_every_kind_of_job_has_the_same_pods(path: str) -> None:
    one = deployment(rdma="rdma/hca=8", networks=("team-a/ib0", "ib1"))
    (template,) = templates(objects(one)[path])
    assert template["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "team-a/ib0,ib1"
    pod = template["spec"]
    (train,) = pod["containers"]
    assert train["resources"]["limits"]["rdma/hca"] == "8"
    assert train["resources"]["limits"]["nvidia.com/gpu"] == "8"
    dshm = next(volume for volume in pod["volumes"] if volume["name"] == "dshm")
    assert dshm["emptyDir"]["sizeLimit"] == "8Gi"  # a GiB a GPU: NCCL fails in less
    words = " ".join(train["command"])
    assert "--nnodes=2 --nproc-per-node=8 --node-rank=$(" in words
    # whatever $(NAME) a command says, its container or its controller sets
    own = {each["name"] for each in train["env"]} | {"JOB_COMPLETION_INDEX"}
    assert set(re.findall(r"\$\((\w+)\)", words)) <= own
    stage = pod["initContainers"][-1]
    own = {each["name"] for each in stage["env"]} | {"JOB_COMPLETION_INDEX"}
    assert set(re.findall(r"\$\((\w+)\)", " ".join(stage["command"]))) <= own


def test_a_queue_holds_a_job_until_there_is_room_for_all_of_it() -> None:
    one = deployment(queue="gpus")
    for path in (*TRAINING[1:2], "overlays/train-job/train-job.yaml", TRAINING[3]):
        each = objects(one)[path]
        assert each["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
        assert each["spec"].get("suspend") or each["spec"]["runPolicy"]["suspend"]
    patch = yaml.safe_load(kubernetes_files(one)["overlays/kueue/patch.yaml"])
    assert patch["spec"] == {"suspend": True}


def test_a_name_that_no_pod_could_have_is_refused() -> None:
    with pytest.raises(UsageError, match="63 letters are the most"):
        kubernetes_files(deployment(name="x" * 49))


def test_health_daemons_see_the_node_and_have_no_limits_of_their_own() -> None:
    pod = objects(deployment())["monitoring/health.yaml"]["spec"]["template"]["spec"]
    (health,) = pod["containers"]
    assert pod["hostNetwork"]
    assert "limits" not in health["resources"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"} in health["env"]
    paths = {volume["hostPath"]["path"] for volume in pod["volumes"]}
    assert paths == {"/dev/shm", "/nvme/stoker"}
    assert not any(mount.get("readOnly") for mount in health["volumeMounts"])  # doctor writes to the cache


@pytest.mark.integration
def test_promtool_takes_the_scrape_configuration(
    tmp_path: Path, require_binary: Callable[[str], str]
) -> None:
    (scraped,) = yaml.safe_load(objects(deployment())["monitoring/scrape.yaml"]["data"]["scrape.yaml"])
    assert scraped.pop("kubernetes_sd_configs")  # Debian's is built without
    (tmp_path / "p.yml").write_text(json.dumps({"scrape_configs": [scraped]}))
    checked = subprocess.run(
        [require_binary("promtool"), "check", "config", "--syntax-only", "p.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stderr
