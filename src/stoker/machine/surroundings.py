"""Container, scheduler, variables and kernel log: what is around a process."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

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
_TIMEX_BYTES, _TIME_ERROR = (
    512,
    5,
)  # more than any kernel's struct timex; what an unsynchronised clock answers
_SANDBOX_RELEASE = "4.4.0"  # gVisor says that it is this kernel


def read_surroundings(files: Files, environ: Mapping[str, str]) -> Surroundings:
    """Which container and scheduler run this process."""
    return Surroundings(
        kernel=platform.release(),
        container=_container(files, environ),
        virtual=_virtual(files),
        kubernetes="KUBERNETES_SERVICE_HOST" in environ,
        slurm="SLURM_JOB_ID" in environ,
        seccomp=files.parsed("/proc/self/status", _filtered),
        clock_synced=_clock_synced(),
    )


def read_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that say how a job will run; never one that may hold a secret."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if (_FAMILIES.match(name) or name in _SINGLE) and not _LEFT_OUT.search(name)
    }


def read_log() -> tuple[str, ...] | Unknown:
    """The last lines of the kernel's log that speak of faults, each with its age."""
    try:
        faults = [(head, text) for head, text in kernel_log() if _FAULTS.search(text)]
    except OSError as error:
        return Unknown(reason=f"/dev/kmsg: {error.strerror}")
    return tuple(f"[{_age_s(head):.0f} s ago] {text}" for head, text in faults[-_LOG_LINES:])


def kernel_log() -> Iterator[tuple[str, str]]:
    """Head and text of every record so far; raises OSError where they may not be read."""
    descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            with suppress(BrokenPipeError):  # overwritten while we read: the next read goes on after it
                record = os.read(descriptor, 8192)
                if not record:
                    return
                head, _, text = record.decode("utf-8", "replace").partition("\n")[0].partition(";")
                yield head, text
    except BlockingIOError:  # the end of what was said so far
        return
    finally:
        os.close(descriptor)


def _age_s(head: str) -> float:
    """A record begins with `level,number,microseconds since the start,flags`."""
    return time.clock_gettime(time.CLOCK_MONOTONIC) - int(head.split(",")[2]) / 1e6


def _filtered(status: str) -> bool:
    """Whether a seccomp filter stands before system calls; 2 is a filter, 1 the strict mode."""
    rows = dict(line.partition(":")[::2] for line in status.splitlines())
    return int(rows["Seccomp"]) > 0


def _clock_synced() -> bool | Unknown:
    """What chrony, ntpd, ptp4l or systemd-timesyncd told the kernel; any user may ask."""
    asked = (ctypes.c_byte * _TIMEX_BYTES)()  # a struct timex of zeros: change nothing, only tell
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(asked)
    except (OSError, AttributeError) as error:
        return Unknown(reason=f"adjtimex: {error}")
    return state != _TIME_ERROR if state >= 0 else Unknown(reason="adjtimex: not allowed here")


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
