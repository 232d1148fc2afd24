"""`stoker deploy`: ready files for Kubernetes and Slurm."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.groups import Group
from stoker.cli.values import given_path, size
from stoker.errors import UsageError

if TYPE_CHECKING:
    from stoker.deploy.deployment import Deployment


def _shared(function: Callable[..., None]) -> Callable[..., None]:
    """What both kinds of cluster are told."""
    for option in reversed(
        (
            click.argument("job", type=given_path(dir_okay=False)),
            click.argument("command", nargs=-1, type=click.UNPROCESSED),
            click.option("--out", required=True, type=given_path(), help="Folder to write."),
            click.option("--data", default="", metavar="URL", help="Dataset to stage to every node."),
            click.option("--name", default="", help="Name of the job.  [default: the plan's]"),
            click.option(
                "--cache", default="/nvme/stoker", show_default=True, help="Folder on a node's NVMe."
            ),
            click.option(
                "--shared",
                default="/shared",
                show_default=True,
                help="Folder all nodes see, for runs and checkpoints.",
            ),
            click.option(
                "--grace",
                "grace_s",
                default=300,
                show_default=True,
                metavar="SECONDS",
                help="From the warning to the end of a job that must go; a checkpoint must fit.",
            ),
            click.option(
                "--gpu",
                default="nvidia.com/gpu",
                show_default=True,
                metavar="RESOURCE",
                help="What the cluster calls a GPU; none for ranks on CPUs.",
            ),
            click.option("--plain", is_flag=True, help="Without `stoker watch` around the training."),
            click.option("--no-doctor", is_flag=True, help="Without `stoker doctor` on each node before it."),
            click.option(
                "--prepare",
                default="",
                metavar="ARGUMENTS",
                help="Also make the dataset: arguments of `stoker prepare` in one word.",
            ),
            click.option(
                "--prepare-pods", default=8, show_default=True, help="Pods or tasks that prepare at once."
            ),
            click.option("--prepare-cores", default=8, show_default=True, help="Cores of each."),
            click.option(
                "--prepare-memory", type=size, default="32GiB", show_default=True, help="Memory of each."
            ),
        )
    ):
        function = option(function)
    return function


@click.group(cls=Group)
def command() -> None:
    """Write the files that run a job.

    \b
    stoker deploy k8s job.yaml --image IMAGE --data s3://bucket/corpus --out deploy/k8s -- train.py --lr 3e-4
    stoker deploy slurm job.yaml --data s3://bucket/corpus --out deploy/slurm -- train.py --lr 3e-4
    stoker deploy nightly slurm --out deploy/nightly -- python train.py --steps 500

    Sizes come from the plan of the job; what does not add up is refused with its reason.
    """


@command.command()
@_shared
@click.option("--image", required=True, help="Container image, made from the Containerfile that is written.")
@click.option("--namespace", default="default", show_default=True, help="Kubernetes namespace.")
@click.option("--claim", default="shared", show_default=True, help="Claim of the volume all nodes share.")
@click.option("--storage-class", default="local-nvme", show_default=True, help="Of local NVMe volumes.")
@click.option("--rdma", default="", metavar="RESOURCE=COUNT", help="RDMA devices of a pod, as rdma/hca=8.")
@click.option(
    "--network", "networks", multiple=True, metavar="NAME", help="A further network of the pods (Multus)."
)
@click.option("--queue", default="", help="Kueue's queue: the job waits until there is room for all of it.")
def k8s(out: Path, **given: Any) -> None:
    """Kubernetes: plain YAML with a Kustomize base and overlays.

    JOB is a plan as JSON, or the YAML of `stoker plan`; COMMAND is what torchrun is to run.
    """
    from stoker.deploy.kustomize import kubernetes_files
    from stoker.deploy.write import write_files

    deployment = _deployment(given)
    _say(write_files(out, kubernetes_files(deployment)))
    if not deployment.plain:  # without the Secret its pods would wait for it
        click.echo(
            f"kubectl create secret generic {deployment.name}-metrics --namespace {deployment.namespace} "
            "--from-literal=token=$(openssl rand -hex 16)"
        )
    click.echo(shlex.join(["kubectl", "apply", "-k", str(out / "base")]))


@command.command()
@_shared
@click.option("--time", "time_limit", default="1-00:00:00", show_default=True, help="Slurm's time limit.")
@click.option("--partition", default="", help="Slurm partition.  [default: the cluster's]")
@click.option("--container", default="", metavar="IMAGE", help="Run nodes in a container (enroot and pyxis).")
def slurm(out: Path, **given: Any) -> None:
    """Slurm: an sbatch file that stages, trains and is requeued.

    JOB is a plan as JSON, or the YAML of `stoker plan`; COMMAND is what torchrun is to run.
    """
    from stoker.deploy.slurm import slurm_files
    from stoker.deploy.write import write_files

    deployment = _deployment(given)
    _say(write_files(out, slurm_files(deployment)))
    click.echo(f"cd {shlex.quote(str(out))} && sbatch train.sbatch")


@command.command()
@click.argument("place", type=click.Choice(["slurm", "k8s", "github"]))
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--name", default="nightly", show_default=True, help="What its runs are called in the history.")
@click.option("--at", default="02:30", show_default=True, help="Time of day, as the cluster's clock has it.")
@click.option(
    "--shared",
    default="/shared/nightly",
    show_default=True,
    help="Folder for runs and the history: it stays.",
)
@click.option("--folder", default=".", show_default=True, help="Where the command is run.")
@click.option("--also", multiple=True, metavar="COMMAND", help="A further command after the job; repeatable.")
@click.option("--gpus", type=click.IntRange(min=0), default=1, show_default=True, help="GPUs of the job.")
@click.option("--time", "time_limit", default="01:00:00", show_default=True, help="Time limit.")
@click.option("--partition", default="", help="Slurm partition.  [default: the cluster's]")
@click.option("--image", default="", help="Container image, for k8s.")
@click.option("--namespace", default="default", show_default=True, help="Kubernetes namespace.")
@click.option("--claim", default="shared", show_default=True, help="Claim of the volume mounted at --shared.")
def nightly(place: str, out: Path, **given: Any) -> None:
    """A fixed job every night, and a check of its figures.

    Writes the scrontab lines, the CronJob or the workflow that runs COMMAND under `stoker watch` and then
    `stoker history check --fail`.
    """
    from stoker.deploy.nightly import Nightly, github_nightly, kubernetes_nightly, slurm_nightly
    from stoker.deploy.write import write_files

    made = {"slurm": slurm_nightly, "k8s": kubernetes_nightly, "github": github_nightly}[place]
    one = Nightly(**given)
    _say(write_files(out, made(one)))
    copied = shlex.join(["cp", str(out / "nightly.sh"), one.shared])
    then = {
        "slurm": f"{copied}  # and the lines of {out / 'scrontab'} into scrontab -e",
        "k8s": shlex.join(["kubectl", "apply", "-f", str(out / "nightly.yaml")]),
        "github": f"cp -r {shlex.quote(str(out))}/.github REPOSITORY",
    }
    click.echo(then[place])


def _deployment(given: dict[str, Any]) -> Deployment:
    from stoker.deploy.deployment import Deployment, Prepare
    from stoker.plan.arithmetic import make_plan
    from stoker.plan.job import read_job

    plan = make_plan(read_job(given.pop("job")))
    pods, cores, memory = (given.pop(f"prepare_{name}") for name in ("pods", "cores", "memory"))
    words = _words(given.pop("prepare"))
    prepare = Prepare(arguments=words, pods=pods, cores=cores, memory=memory) if words else None
    given["doctor"] = not given.pop("no_doctor")
    given["gpu"] = "" if given["gpu"] == "none" else given["gpu"]
    name = given.pop("name") or plan.job.name
    return Deployment(plan=plan, name=name, prepare=prepare, **given)


def _words(prepare: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(prepare))
    except ValueError as error:
        raise UsageError(
            f"--prepare {prepare!r}: {error}", hint="quote its words as a shell wants it"
        ) from None
    return words[1:] if words[:1] == ("run",) else words  # people copy `stoker prepare run …`


def _say(paths: list[Path]) -> None:
    for path in paths:
        click.echo(str(path))
