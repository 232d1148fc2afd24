"""Slurm: the folder of a deployment, scripts to submit as they are. Pure.

    train.sbatch   the training job: prolog.sh on every node, torchrun, and back to the queue on a warning
    prolog.sh      checks a node and brings its share of the data to its NVMe
    plan.json      what prolog.sh checks a node against
    prepare.sh     submits the job arrays that make the dataset, where one is to be made

A warning is SIGUSR1, to the batch script only: Slurm sends it before the time limit or a preemption. The
script passes it on to every process of the step that runs. torchrun knows nothing of it (the step begins with
it ignored), ranks that want to save catch it, and when they have left the job goes back to the queue. It does
so when it was warned while it staged, too. A job that Slurm has ended gets SIGTERM and is COMPLETING by then:
one that was cancelled stays away, one that Slurm means to requeue it requeues itself.
"""

from __future__ import annotations

import shlex

from stoker.deploy.deployment import Deployment
from stoker.deploy.write import filled

Files = dict[str, str]  # path inside the folder, text


def slurm_files(one: Deployment) -> Files:
    """Every file of the folder."""
    files = {"train.sbatch": _train(one), "prolog.sh": _prolog(one), "plan.json": one.plan_text()}
    if one.prepare:
        files["prepare.sh"] = _prepare(one)
    return files


def _train(one: Deployment) -> str:
    return filled(
        "train.sbatch",
        directives="\n".join(f"#SBATCH {option}" for option in _directives(one)),
        patience=one.saving_s,
        container=_container(one),
        command=_command(one),
    )


def _container(one: Deployment) -> str:
    """Options of pyxis for srun, where nodes run an image: enroot's has the node's cards, not its folders."""
    if not one.container:
        return ""
    mounts = ",".join(f"{path}:{path}" for path in (one.cache, one.shared))
    return " ".join(
        (
            f"--container-image={shlex.quote(one.container)}",
            f'--container-mounts="$here:$here",{shlex.quote(mounts)}',
            '--container-workdir="$here"',
            "--no-container-mount-home",
        )
    )


def _directives(one: Deployment) -> list[str]:
    options = [
        f"--job-name={one.name}",
        f"--nodes={one.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={one.cores}",
        f"--mem={_mebibytes(one.plan.memory.limit)}M",
        f"--time={one.time_limit}",
        "--requeue",
        f"--signal=B:USR1@{one.grace_s}",
        "--open-mode=append",
        "--output=%x-%j.log",
    ]
    if one.gpu:
        options.append(f"--gpus-per-node={one.ranks}")
    if one.partition:
        options.append(f"--partition={one.partition}")
    return options


def _command(one: Deployment) -> str:
    """What a node runs, inside single quotes: the script's variables come as arguments."""
    torchrun = one.torchrun(node='"$SLURM_NODEID"', master='"$1"', rendezvous='"$2"')
    fixed = len(torchrun) - len(one.command)
    lines = [" ".join(torchrun[:fixed]), " ".join(map(_in_single_quotes, one.command))]
    if not one.plain:
        launch = '"$SLURM_JOB_ID"-"${SLURM_RESTART_COUNT:-0}"'  # all nodes write into one run folder
        lines.insert(0, f"stoker watch --out {_in_single_quotes(one.run_folder)}-{launch} --")
    return " \\\n            ".join(lines)


def _in_single_quotes(word: str) -> str:
    """A word of a shell command that itself stands in single quotes."""
    return shlex.quote(word).replace("'", "'\\''")


def _prolog(one: Deployment) -> str:
    cache = shlex.quote(one.cache)
    doctor = f'stoker doctor --for "$SLURM_SUBMIT_DIR/plan.json" --cache {cache}\n'
    return filled("prolog.sh", doctor=doctor if one.doctor else "", data=shlex.quote(one.data), cache=cache)


def _prepare(one: Deployment) -> str:
    assert one.prepare
    return filled(
        "prepare.sh",
        arguments=shlex.join(one.prepare.arguments),
        pods=one.prepare.pods,
        cores=one.prepare.cores,
        memory=_mebibytes(one.prepare.memory),
        partition=f" --sbatch=--partition={shlex.quote(one.partition)}" if one.partition else "",
    )


def _mebibytes(count: int) -> int:
    return -(-count // (1 << 20))
