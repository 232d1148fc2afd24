"""Deployments that cannot work are refused, with the reason and what to do."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from small_jobs import deployment

from stoker.cli.deploy import command
from stoker.deploy.deployment import Prepare
from stoker.deploy.slurm import slurm_files
from stoker.deploy.write import write_files
from stoker.errors import UsageError

GOLDEN = Path(__file__).parents[2] / "deploy"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "My Job"}, "name 'My Job' is none"),
        ({"name": "x" * 60}, "is none that Kubernetes and Slurm take"),
        ({"namespace": "-"}, "namespace '-' is none"),
        ({"image": "a b"}, "image 'a b' is none"),
        ({"name": "train\n"}, "is none that Kubernetes and Slurm take"),
        ({"partition": "gpu\n#SBATCH --exclusive"}, "is none"),
        ({"gpu": "a b"}, "gpu 'a b' is none"),
        ({"rdma": "hca"}, "rdma 'hca' is none"),
        ({"rdma": "rdma/hca=0"}, "rdma 'rdma/hca=0' is none"),
        ({"networks": ("a b",)}, "network 'a b' is none"),
        ({"queue": "My Queue"}, "queue 'My Queue' is none"),
        ({"container": "a b"}, "image 'a b' is none"),
        ({"storage_class": "Fast NVMe"}, "storage class 'Fast NVMe' is none"),
        (
            {"name": "x" * 53, "prepare": Prepare(arguments=("--out", "c"), pods=11)},
            "63 letters are the most",
        ),
        ({"image": "http://registry/train"}, "image 'http://registry/train' is none"),
        ({"image": "Train"}, "image 'Train' is none"),
        ({"image": "a:b:c"}, "image 'a:b:c' is none"),
        ({"data": "corpus"}, "is a path from here"),
        ({"data": "s3:/bucket/corpus"}, "is a path from here"),
        ({"data": "/lustre/corpus"}, "containers see no other folder"),
        (
            {"data": "/lustre/corpus", "image": "", "container": "site/train"},
            "containers see no other folder",
        ),
        ({"data": "s3://key:hunter2@host/corpus"}, "data 's3://***@host/corpus' carries a secret"),
        ({"data": "https://host/corpus?sig=hunter2"}, "carries a secret"),
        ({"command": ()}, "nothing to train"),
        ({"command": ("python", "train.py")}, "torchrun runs a script and not python"),
        ({"data": ""}, "no dataset"),
        ({"data": "--help"}, "no dataset"),
        ({"data": "a\0b"}, "no word that a file can hold"),
        ({"command": ("train.py", "\udcff")}, "no word that a file can hold"),
        ({"prepare": Prepare(arguments=("\0", "--out", "c"))}, "no word that a file can hold"),
        ({"cache": "/a,b", "container": "site/train"}, "to which a comma begins the next"),
        ({"cache": "nvme"}, "cache 'nvme' is no absolute path"),
        ({"cache": "/shared/nvme"}, "which all nodes share"),
        ({"cache": "/shared/nvme", "shared": "/shared/"}, "which all nodes share"),
        ({"cache": "/"}, "cache '/' is no absolute path that can be mounted"),
        ({"cache": "/nvme/../etc"}, "that can be mounted"),
        ({"cache": "/nvme:0"}, "that can be mounted"),
        ({"shared": "/dev/shm/"}, "that can be mounted"),
        ({"job": {"cores": 4}}, "feeding a node takes 12 cores and it has 4"),
        ({"job": {"nvme": "100GB"}}, "larger than its NVMe can hold"),
        (
            {"job": {"loader": "process", "batch": 512, "sample": "1MB", "step": "1s", "shm": "1GiB"}},
            "in /dev/shm, which has 1 GiB",
        ),
        ({"time_limit": "soon"}, "is none of Slurm's"),
        ({"time_limit": "5"}, "of a time limit of 5.0 min the last 300 s are for leaving"),
        ({"job": {"parameters": "1T"}, "grace_s": 60}, "a job that must go has 60 s"),
        ({"grace_s": 30}, "of which the last 30 are for its end"),
        # 290 s: inside the grace of 300, of which ranks have 270
        ({"job": {"checkpoint": "1160GB"}}, "a checkpoint takes 4.9 min"),
    ],
)
def test_what_does_not_add_up_is_refused_with_its_reason(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        deployment(**given)
    assert said in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize(
    "image",
    [
        "train",
        "site/train:1.0_x",
        "Registry.Site:5000/team/train__x",
        "ghcr.io/a/b@sha256:" + "0" * 64,
        "localhost/stoker:latest",
    ],
)
def test_images_are_named_as_runtimes_take_them(image: str) -> None:
    assert deployment(image=image).image == image


def test_data_that_every_node_sees_is_taken() -> None:
    assert deployment(data="/shared/corpus").data
    assert deployment(data="/lustre/corpus", image="").data  # Slurm without a container


@pytest.mark.parametrize("arguments", [("--out",), ("x", "--out="), ("--out", "--seed"), ("--output", "c")])
def test_a_dataset_that_is_to_be_made_nowhere_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="names no --out"):
        Prepare(arguments=arguments)


@pytest.mark.parametrize(
    "limit", ["20", "20:00", "1:00:00", "1-0", "1-12:30", "2-00:00:00", "0", "unlimited"]
)
def test_time_limits_are_read_as_slurm_reads_them(limit: str) -> None:
    assert deployment(time_limit=limit).time_limit == limit


def test_a_dataset_that_is_to_be_made_needs_a_place() -> None:
    with pytest.raises(UsageError, match="names no --out"):
        Prepare(arguments=("raw/", "--tokenizer", "gpt2"))


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(UsageError, match=r"mine\.txt"):
        write_files(tmp_path, slurm_files(deployment()))
    (tmp_path / "mine.txt").unlink()
    write_files(tmp_path, slurm_files(deployment()))
    (tmp_path / "train-7.log").touch()  # of a job that was submitted there
    write_files(tmp_path, slurm_files(deployment(plain=True)))  # its own files it may write anew


def test_a_file_is_no_folder_to_write_into(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(UsageError, match="is a file"):
        write_files(tmp_path / "out", slurm_files(deployment()))


@pytest.mark.parametrize(
    "given", [{}, {"plain": True}, {"command": ("train.py", "it's", "a b", "$HOME", '"')}]
)
def test_scripts_are_what_bash_can_read(tmp_path: Path, given: dict[str, Any]) -> None:
    prepare = Prepare(arguments=("a b/*.jsonl", "--out", "it's"))
    for path in write_files(tmp_path, slurm_files(deployment(prepare=prepare, partition="gpu", **given))):
        if path.suffix != ".json":
            subprocess.run(["bash", "-n", path], check=True)


def test_words_of_the_command_come_through_the_quotes(tmp_path: Path) -> None:
    """Run the step's own bash -c, with torchrun replaced by printf."""
    words = ("train.py", "it's", "a b", "$HOME", '"', "*")
    script = slurm_files(deployment(plain=True, command=words))["train.sbatch"]
    step = script.partition("bash -c ")[2].partition("\nfi")[0].replace("torchrun", "printf '\\''%s\\n'\\''")
    said = subprocess.run(["bash", "-c", f"SLURM_NODEID=1; bash -c {step}"], capture_output=True, text=True)
    assert tuple(said.stdout.splitlines()[-len(words) :]) == words
    assert "--master-addr=" in said.stdout


def test_directives_follow_the_plan() -> None:
    script = slurm_files(deployment(job={"nodes": 16, "memory": "200GiB"}, partition="gpu", grace_s=600))[
        "train.sbatch"
    ]
    options = {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert {"--nodes=16", "--mem=204800M", "--gpus-per-node=8", "--signal=B:USR1@600", "--requeue"} <= options
    assert "--partition=gpu" in options


def _commands() -> list[list[str]]:
    lines = (GOLDEN / "README.md").read_text().splitlines()
    return [shlex.split(line)[2:] for line in lines if line.startswith("stoker deploy")]


@pytest.mark.parametrize("words", _commands(), ids=lambda words: words[0])
def test_the_folder_deploy_is_what_its_readme_says(words: list[str], tmp_path: Path) -> None:
    kind, job, out = words[0], words[1], words[words.index("--out") + 1]
    made = tmp_path / "made"
    words = [kind, str(GOLDEN / job), "--out", str(made), *words[4:]]
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert _texts(made) == _texts(GOLDEN / out), f"run the commands of {GOLDEN / 'README.md'}"


def _texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_unbalanced_quotes_in_prepare_are_said(tmp_path: Path) -> None:
    words = [
        "slurm",
        str(GOLDEN / "job.yaml"),
        "--out",
        str(tmp_path),
        "--prepare",
        "it's --out x",
        "train.py",
    ]
    refused = CliRunner().invoke(command, words).exception
    assert isinstance(refused, UsageError)
    assert "No closing quotation" in refused.message


def test_prepare_may_be_copied_with_its_verb(tmp_path: Path) -> None:
    words = ["slurm", str(GOLDEN / "job.yaml"), "--out", str(tmp_path), "--data", "s3://b/c"]
    done = CliRunner().invoke(command, [*words, "--prepare", "run raw --out c", "train.py"])
    assert done.exit_code == 0
    assert "stoker prepare run raw --out c" in (tmp_path / "prepare.sh").read_text()


def test_names_that_kubernetes_takes_are_taken() -> None:
    one = deployment(namespace="7-team", claim="lustre.home", shared="/lustre/me/")
    assert one.run_folder == "/lustre/me/runs/train"
