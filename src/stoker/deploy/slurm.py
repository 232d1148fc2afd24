"""The folder of a Slurm deployment: scripts to submit as they are. Pure.

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

import json
import shlex

from stoker.deploy.deployment import Deployment

Files = dict[str, str]  # path inside the folder, text

_TRAIN = """\
#!/bin/bash
{directives}
# Submit from this folder: sbatch train.sbatch
set -euo pipefail
here=$SLURM_SUBMIT_DIR
leaving=0 running='' code=0

requeue() {{
    case $(scontrol show job "$SLURM_JOB_ID") in
        *JobState=RUNNING*)
            echo "$(date +%FT%T) ranks have left with $code; the job goes back to the queue" >&2
            scontrol requeue "$SLURM_JOB_ID"
            ;;
        *) echo "$(date +%FT%T) ranks have left with $code; the job was ended and stays so" >&2 ;;
    esac
}}

leave() {{
    [ "$leaving" = 0 ] || return 0
    leaving=1
    echo "$(date +%FT%T) warned: ranks save and leave" >&2
    [ -z "$running" ] || kill -USR1 "$running" 2>/dev/null || true
    # ranks that do not leave in time go on from their last checkpoint
    (sleep {patience} && requeue) >/dev/null 2>&1 &
    patience=$!
}}
trap leave USR1 TERM

step() {{  # in the background: bash hears a warning only while it waits
    "$@" &
    running=$!
    [ "$leaving" = 0 ] || kill -USR1 "$running" 2>/dev/null || true
    code=0
    wait "$running" || code=$?
    while kill -0 "$running" 2>/dev/null; do  # a warning interrupts wait, not the step
        code=0
        wait "$running" || code=$?
    done
    running=''
}}

# every node: is it fit, and has it its share of the data
step srun --kill-on-bad-exit=1 bash "$here/prolog.sh"

if [ "$leaving" = 0 ] && [ "$code" = 0 ]; then
    master=$(hostname)  # this script runs on the first node
    port=$((12000 + SLURM_JOB_ID % 20000))  # below those that the kernel gives out
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={patience}
    step srun --kill-on-bad-exit=1 bash -c '
        trap "" USR1  # torchrun would die of it; ranks set their own handlers
        exec {command}
    ' training "$master" "$port"
fi

if [ "$leaving" = 1 ]; then
    kill "$patience" 2>/dev/null || true  # or it would send the next run away
    requeue
    exit 0
fi
exit "$code"
"""

_PROLOG = """\
#!/bin/bash
# Once on every node, before training. Doctor ends the job on a node that would starve its GPUs.
set -euo pipefail
{doctor}stoker stage {data} --cache {cache} --share "$SLURM_NODEID/$SLURM_NNODES"
"""

_PREPARE = """\
#!/bin/sh
# Submits a job array for each stage and a last job that finishes the dataset; run it again after a failure.
exec stoker prepare run {arguments} --on slurm --detach \\
    --workers {pods} --sbatch=--cpus-per-task={cores} --sbatch=--mem={memory}M{partition}
"""


def slurm_files(one: Deployment) -> Files:
    """Every file of the folder."""
    plan = json.dumps({"job": one.plan.job.as_plain(), "needs": one.plan.needs()}, indent=1) + "\n"
    files = {"train.sbatch": _train(one), "prolog.sh": _prolog(one), "plan.json": plan}
    if one.prepare:
        files["prepare.sh"] = _prepare(one)
    return files


def _train(one: Deployment) -> str:
    return _TRAIN.format(
        directives="\n".join(f"#SBATCH {option}" for option in _directives(one)),
        patience=one.saving_s,
        command=_command(one),
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
    return _PROLOG.format(doctor=doctor if one.doctor else "", data=shlex.quote(one.data), cache=cache)


def _prepare(one: Deployment) -> str:
    assert one.prepare
    return _PREPARE.format(
        arguments=shlex.join(one.prepare.arguments),
        pods=one.prepare.pods,
        cores=one.prepare.cores,
        memory=_mebibytes(one.prepare.memory),
        partition=f" --sbatch=--partition={shlex.quote(one.partition)}" if one.partition else "",
    )


def _mebibytes(count: int) -> int:
    return -(-count // (1 << 20))
