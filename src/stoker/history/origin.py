"""Provenance: which machine, which cards, which code. Read once, at the end of a run."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from stoker.formats.sizes import counted
from stoker.history.figures import Origin
from stoker.machine.allowed import usable_cores
from stoker.machine.files import Files
from stoker.machine.host import read_memory
from stoker.redact import redact_text
from stoker.watch.runs.files import node_name

_PACKAGES = ("torch", "numpy", "transformers", "lightning", "stoker")
_PATIENCE_S = 5.0  # with a git whose repository lies on a slow disk


def read_origin(*, gpus: Sequence[str] | None = None, code: Path | None = None) -> Origin:
    """Of this process, now. `gpus` are names of cards already known; `code` lies in the repository asked."""
    cards = tuple(gpus) if gpus is not None else _cards()
    found = Origin(
        machine=machine_kind(usable_cores(), _memory_gib(), cards),
        host=node_name(),
        gpus=cards,
        versions=_versions(),
    )
    return with_commit(found, code or Path.cwd())


def machine_kind(cores: int, memory_gib: int, gpus: Sequence[str]) -> str:
    """`8 × NVIDIA H200, 96 cores, 1024 GiB, x86_64`: what must be alike for figures to be compared. No host's
    name: a cloud gives another machine of the same kind every night."""
    names = sorted(set(gpus))
    cards = [f"{list(gpus).count(name)} × {name}" for name in names]
    memory = [f"{memory_gib} GiB"] if memory_gib else []
    return ", ".join([*cards, counted(cores, "core"), *memory, platform.machine()])


def with_commit(origin: Origin, folder: Path) -> Origin:
    """The commit that is checked out there, its branch, and whether files differ from it; CI may tell it."""
    commit = git(folder, "rev-parse", "HEAD")
    if not commit:
        told = _told_by_ci(os.environ)
        return replace(origin, commit=told["commit"], branch=told["branch"])
    branch = git(folder, "rev-parse", "--abbrev-ref", "HEAD")
    named = _told_by_ci(os.environ)["branch"] if branch == "HEAD" else branch
    dirty = bool(git(folder, "status", "--porcelain", "--untracked-files=no"))
    return replace(origin, commit=commit, branch=named, dirty=dirty)


def _told_by_ci(environ: Mapping[str, str]) -> dict[str, str]:
    names = {
        "commit": ("GITHUB_SHA", "CI_COMMIT_SHA"),
        "branch": ("GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_REF_NAME"),
    }
    return {what: next(filter(None, (environ.get(n) for n in some)), "") for what, some in names.items()}


def git(folder: Path, *words: str) -> str:
    """What git says there; nothing without git, without a repository, or when it takes too long."""
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            env=environ,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""
    return redact_text(done.stdout.strip()) if done.returncode == 0 else ""


def _memory_gib() -> int:
    """Rounded as machines are sold: kernels keep a different bit of it for themselves."""
    total = read_memory(Files()).total_bytes
    if not isinstance(total, int) or total <= 0:
        return 0
    gib = total / (1 << 30)
    step = 1 if gib < 24 else 8 if gib < 192 else 64
    return max(1, round(gib / step) * step)


def _cards() -> tuple[str, ...]:
    from stoker.machine.nvml import nvml_gpus
    from stoker.machine.plain import Unknown

    found = nvml_gpus()
    return () if isinstance(found, Unknown) else tuple(str(card.name) for card in found.cards)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
