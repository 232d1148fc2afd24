"""Container, scheduler, variables and the kernel's log: what is around a process."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping

from stoker.machine.files import Files
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import Surroundings

# Whole families, and single names of families that also hold tokens.
_FAMILIES = re.compile(r"^(NCCL|TORCH|OMP|KMP|GOMP|MKL|OPENBLAS|CUDA|CUBLAS|NVIDIA|PYTORCH|SLURM|SRUN)_")
_SINGLE = (
    "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM",
    "TRITON_CACHE_DIR", "TMPDIR", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MALLOC_ARENA_MAX", "STOKER_CACHE",
)  # fmt: skip
# NVIDIA_REQUIRE_CUDA and the like fill pages; Slurm names users, accounts and hosts
_LEFT_OUT = re.compile(
    r"REQUIRE|TOKEN|SECRET|KEY|USER|ACCOUNT|HOST|NODELIST|SUBMIT|ADDR|LAUNCH_NODE|JOB_NAME"
)

_FAULTS = re.compile(
    r"NVRM: Xid|Out of memory: Killed|oom-kill:|Memory cgroup out of memory|[Bb]us error|"
    r"fatal signal 7|Memory failure:|I/O error, dev|nvme\S* .*timeout|nfs: server .* not responding|"
    r"LustreError"
)
_LOG_LINES = 40
_SANDBOX_RELEASE = "4.4.0"  # gVisor says that it is this kernel


def read_surroundings(files: Files, environ: Mapping[str, str]) -> Surroundings:
    """Which container and scheduler run this process."""
    return Surroundings(
        kernel=platform.release(),
        container=_container(files, environ),
        virtual=_virtual(files),
        kubernetes="KUBERNETES_SERVICE_HOST" in environ,
        slurm="SLURM_JOB_ID" in environ,
    )


def read_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that say how a job will run; never one that may hold a secret."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if (_FAMILIES.match(name) or name in _SINGLE) and not _LEFT_OUT.search(name)
    }


def read_log() -> tuple[str, ...] | Unknown:
    """The last lines of the kernel's log that speak of faults."""
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        return Unknown(reason=f"/dev/kmsg: {error.strerror}")
    try:
        return tuple(_faults(descriptor)[-_LOG_LINES:])
    except OSError as error:
        return Unknown(reason=f"/dev/kmsg: {error.strerror}")
    finally:
        os.close(descriptor)


def _faults(descriptor: int) -> list[str]:
    found: list[str] = []
    while True:
        try:
            record = os.read(descriptor, 8192)
        except BlockingIOError:  # the end of what was said so far
            return found
        except BrokenPipeError:  # overwritten while we read: the next read goes on after it
            continue
        text = record.decode("utf-8", "replace").partition(";")[2].partition("\n")[0]
        if not record:
            return found
        if _FAULTS.search(text):
            found.append(text)


def _container(files: Files, environ: Mapping[str, str]) -> str | None:
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "kubernetes"
    for variable, name in (("APPTAINER_CONTAINER", "apptainer"), ("SINGULARITY_CONTAINER", "apptainer")):
        if variable in environ:
            return name
    if environ.get("container"):
        return environ["container"]
    if platform.release() == _SANDBOX_RELEASE:
        return "gvisor"
    # A virtual machine made from an image has its marks too; only a runtime mounts these files.
    if " /etc/hosts " not in str(files.text("/proc/self/mountinfo")):
        return None
    marks = (("/.dockerenv", "docker"), ("/run/.containerenv", "podman"))
    return next((name for path, name in marks if files.exists(path)), "container")


def _virtual(files: Files) -> bool | Unknown:
    return files.parsed("/proc/cpuinfo", lambda text: " hypervisor" in text)
