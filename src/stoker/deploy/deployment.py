"""Deployment: a plan, and where its things lie. Whatever does not add up is refused here."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from stoker.errors import UsageError
from stoker.formats.sizes import counted
from stoker.plan.arithmetic import Plan, say_gib, say_time
from stoker.redact import redact_url
from stoker.urls import is_local, local_path

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,51}[a-z0-9])?")  # 63 with the index and hash that pods get
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_OBJECT = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
_WORD = re.compile(r"[\w.,/+-]*")
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")  # as Slurm has it: [days-]h[:m[:s]], m[:s]
_UNLIMITED = ("0", "UNLIMITED", "INFINITE")
# as container runtimes have it: [host[:port]/]name[:tag][@digest], of which only the host may have capitals
_IMAGE = re.compile(
    r"([\w.-]+(:\d+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*(:\w[\w.-]{0,127})?(@[a-z0-9]+:[0-9a-f]{32,})?", re.ASCII
)
_ENROOT = re.compile(r"[\w.:/@#+-]+", re.ASCII)  # also a file, and a registry parted by #
_RDMA = re.compile(r"[a-z0-9.-]+/[\w.-]+(=[1-9][0-9]{0,2})?")
_NETWORK = re.compile(r"([a-z0-9-]+/)?[a-z0-9][a-z0-9.-]*")
_PATH = re.compile(r"(/[^/\s:$]+)+/?")  # without what shell, kubelet or mount take for something else
_TAKEN = ("/dev/shm", "/etc/stoker")  # by volumes of a pod's own
_LAST_S = 30  # of the grace: what is not saved by then is left behind, so that the end is an orderly one
METRICS_PORT, HEALTH_PORT, RENDEZVOUS_PORT = 9750, 9751, 29500


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepare:
    """A dataset to be made before: arguments of `stoker prepare`, and how many work on it at once."""

    arguments: tuple[str, ...]
    pods: int = 8
    cores: int = 8
    memory: int = 32 << 30

    def __post_init__(self) -> None:
        if not _says_out(self.arguments):
            raise UsageError(
                f"prepare {' '.join(self.arguments)!r} names no --out",
                hint="write it as for `stoker prepare`: 'SOURCES --tokenizer T --out URL'",
            )
        if min(self.pods, self.cores, self.memory) < 1:
            raise UsageError("prepare needs a pod, a core and some memory", hint="leave the defaults")


def _says_out(arguments: tuple[str, ...]) -> bool:
    """With a value behind it, which is no option."""
    following = (*arguments[1:], "")
    return any(
        (word == "--out" and value and not value.startswith("-"))
        or word.removeprefix("--out=") not in (word, "")
        for word, value in zip(arguments, following, strict=True)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """What files are made from.

    command      the training script and its arguments, as after `torchrun`
    data         URL of the dataset, staged to `cache` on each node
    cache        folder on a node's NVMe
    shared       folder that all nodes see: run folders and checkpoints
    gpu          what Kubernetes calls a GPU; empty for training on CPUs
    rdma         what Kubernetes calls an RDMA device, and how many a node's pod gets: rdma/hca=8
    networks     further networks of a pod (Multus), by name
    queue        Kueue's queue; empty for none
    container    image that Slurm runs the step in (pyxis); empty for none
    grace_s      from the warning that a job must go to its end: a checkpoint must fit
    plain        without `stoker watch` around the training
    doctor       with `stoker doctor` before it, which ends the job on a node that is not fit
    """

    plan: Plan
    name: str
    command: tuple[str, ...]
    data: str
    image: str = ""
    namespace: str = "default"
    cache: str = "/nvme/stoker"
    shared: str = "/shared"
    claim: str = "shared"
    storage_class: str = "local-nvme"
    gpu: str = "nvidia.com/gpu"
    rdma: str = ""
    networks: tuple[str, ...] = ()
    queue: str = ""
    container: str = ""
    grace_s: int = 300
    time_limit: str = "1-00:00:00"
    partition: str = ""
    plain: bool = False
    doctor: bool = True
    prepare: Prepare | None = None

    def __post_init__(self) -> None:
        for check in _CHECKS:
            check(self)

    @property
    def nodes(self) -> int:
        return self.plan.job.nodes

    @property
    def ranks(self) -> int:
        """Of a node."""
        return self.plan.job.gpus_per_node

    @property
    def cores(self) -> int:
        """All that a node was said to have, else what is needed."""
        return self.plan.job.cores or self.plan.loading.cores

    @property
    def rdma_devices(self) -> dict[str, str]:
        """Of a pod."""
        name, _, count = self.rdma.partition("=")
        return {name: count or "1"} if name else {}

    @property
    def run_folder(self) -> str:
        return f"{self.shared.rstrip('/')}/runs/{self.name}"

    @property
    def saving_s(self) -> int:
        """Of the grace, what ranks have to save and leave."""
        return self.grace_s - _LAST_S

    def plan_text(self) -> str:
        """What `stoker doctor --for` checks a node against."""
        return (
            json.dumps({"job": self.plan.job.as_plain(), "needs": self.plan.needs().as_plain()}, indent=1)
            + "\n"
        )

    def torchrun(self, *, node: str, master: str, rendezvous: str = str(RENDEZVOUS_PORT)) -> tuple[str, ...]:
        """The command of one node. The node's number is given and not drawn: it must be that of the share
        that was staged there."""
        return (
            "torchrun",
            f"--nnodes={self.nodes}",
            f"--nproc-per-node={self.ranks}",
            f"--node-rank={node}",
            f"--master-addr={master}",
            f"--master-port={rendezvous}",
            *self.command,
        )


def _check_names(one: Deployment) -> None:
    for what, name, allowed, most in (
        ("name", one.name, _NAME, 53),
        ("namespace", one.namespace, _LABEL, 63),
        ("claim", one.claim, _OBJECT, 253),
        ("storage class", one.storage_class, _OBJECT, 253),
    ):
        if not allowed.fullmatch(name):
            first = "a letter" if allowed is _NAME else "a letter or digit"
            raise UsageError(
                f"{what} {name!r} is none that Kubernetes and Slurm take",
                hint=f"use lower-case letters, digits and dashes, {first} first, at most {most}",
            )
    for what, word in (("gpu", one.gpu), ("partition", one.partition)):
        if not _WORD.fullmatch(word):
            raise UsageError(f"{what} {word!r} is none", hint="use letters, digits, dots, slashes and dashes")
    for image, allowed in ((one.image, _IMAGE), (one.container, _ENROOT)):
        if image and not allowed.fullmatch(image):
            raise UsageError(f"image {image!r} is none", hint="name one as registry/name:tag")
    if one.prepare and len(last := f"{one.name}-prepare-{one.prepare.pods - 1}") > 63:
        raise UsageError(
            f"the last pod would be called {last}, and 63 letters are the most", hint="shorten the name"
        )


def _check_network(one: Deployment) -> None:
    if one.rdma and not _RDMA.fullmatch(one.rdma):
        raise UsageError(f"rdma {one.rdma!r} is none", hint="write a resource and a count: rdma/hca=8")
    for name in one.networks:
        if not _NETWORK.fullmatch(name):
            raise UsageError(f"network {name!r} is none", hint="write NAME, or NAMESPACE/NAME")
    if one.queue and not _LABEL.fullmatch(one.queue):
        raise UsageError(f"queue {one.queue!r} is none", hint="use lower-case letters, digits and dashes")


def _check_command(one: Deployment) -> None:
    if not one.command:
        raise UsageError("there is nothing to train", hint="put the script last: … -- train.py --lr 3e-4")
    if PurePosixPath(one.command[0]).name in ("python", "python3", "torchrun"):
        raise UsageError(
            f"torchrun runs a script and not {one.command[0]}",
            hint="put the script first: … -- train.py --lr 3e-4",
        )
    if not one.data or one.data.startswith("-"):
        raise UsageError(f"no dataset is named by {one.data!r}", hint="give --data s3://bucket/corpus")
    for word in (*one.command, one.data, *(one.prepare.arguments if one.prepare else ())):
        if "\0" in word or word != word.encode(errors="replace").decode():
            raise UsageError(
                f"{word!r} is no word that a file can hold", hint="leave out NUL and broken UTF-8"
            )


def _check_data(one: Deployment) -> None:
    if redact_url(one.data) != one.data:
        raise UsageError(
            f"data {redact_url(one.data)!r} carries a secret, and these files are for others to read",
            hint="give the bare URL; keys come from a Secret or the job's environment",
        )
    if not is_local(one.data):
        return
    path = PurePosixPath(local_path(one.data))
    if not path.is_absolute():
        raise UsageError(
            f"data {one.data!r} is a path from here, and the job begins elsewhere",
            hint="give a URL as s3://bucket/corpus, or an absolute path",
        )
    if (one.image or one.container) and not any(path.is_relative_to(p) for p in (one.shared, one.cache)):
        raise UsageError(
            f"data {one.data} is not in {one.shared}, and containers see no other folder of the node",
            hint="put it there, or give --shared a folder above it, or a URL",
        )


def _check_paths(one: Deployment) -> None:
    for what, path in (("cache", one.cache), ("shared", one.shared)):
        if not _PATH.fullmatch(path) or ".." in path.split("/") or path.rstrip("/") in _TAKEN:
            raise UsageError(
                f"{what} {path!r} is no absolute path that can be mounted", hint=f"give --{what} /somewhere"
            )
    if one.container and "," in one.cache + one.shared:
        raise UsageError(
            f"{one.cache} and {one.shared} cannot be mounted by pyxis, to which a comma begins the next",
            hint="give folders without a comma",
        )
    if PurePosixPath(one.cache).is_relative_to(one.shared):
        raise UsageError(
            f"cache {one.cache} lies in {one.shared}, which all nodes share",
            hint="a cache is a node's own NVMe: give another folder",
        )


def _check_cores(one: Deployment) -> None:
    job, needed = one.plan.job, one.plan.loading.cores
    if job.cores and needed > job.cores:
        raise UsageError(
            f"feeding a node takes {counted(needed, 'core')} and it has {job.cores}",
            hint="decode before training, or use more nodes with fewer GPUs each",
        )
    if job.nvme and one.plan.caching.share > one.plan.caching.cache:
        short = one.plan.caching.share - one.plan.caching.cache
        enough = math.ceil(job.nodes * one.plan.caching.share / one.plan.caching.cache)
        raise UsageError(
            f"a node's share of the dataset is {say_gib(short)} larger than its NVMe can hold",
            hint=f"use {counted(enough, 'node')}, or nodes with more NVMe",
        )


def _check_shm(one: Deployment) -> None:
    loading = one.plan.loading
    if loading.shm < loading.shm_needed:
        raise UsageError(
            f"workers hold {say_gib(loading.shm_needed)} in /dev/shm, which has {say_gib(loading.shm)}",
            hint="raise shm or leave it out, lower workers or prefetch, or use loader: thread",
        )


def _check_grace(one: Deployment) -> None:
    saving = one.plan.saving
    takes = saving.stall_s + max(saving.write_s, saving.drain_s)
    if takes > one.saving_s or one.saving_s < 1:
        raise UsageError(
            f"a checkpoint takes {say_time(takes)} and a job that must go has {one.grace_s} s, "
            f"of which the last {_LAST_S} are for its end",
            hint=f"give --grace {math.ceil((takes + _LAST_S + 1) / 60) * 60} or more",
        )


def _check_time(one: Deployment) -> None:
    if one.time_limit.upper() in _UNLIMITED:
        return
    found = _TIME.fullmatch(one.time_limit)
    if not found:
        raise UsageError(f"time {one.time_limit!r} is none of Slurm's", hint="write 1-00:00:00 or 8:00:00")
    if _limit_s(found) < 3 * one.grace_s:
        raise UsageError(
            f"of a time limit of {say_time(_limit_s(found))} the last {one.grace_s} s are for leaving",
            hint=f"give --time at least {counted(math.ceil(3 * one.grace_s / 60), 'minute')}",
        )


def _limit_s(found: re.Match[str]) -> int:
    """Slurm reads 90 and 90:00 as minutes, but 1-12 and 1-12:30 as hours after the days."""
    days, *rest = found.groups()
    parts = [int(part) for part in rest if part is not None]
    first = 3600 if days is not None or len(parts) == 3 else 60
    units = (first, first // 60, first // 3600)
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


_CHECKS = (
    _check_names,
    _check_network,
    _check_command,
    _check_data,
    _check_paths,
    _check_cores,
    _check_shm,
    _check_grace,
    _check_time,
)
