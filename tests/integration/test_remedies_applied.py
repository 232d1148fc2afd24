"""Remedies that doctor prints, typed as they are on machines made for the test: doctor is then satisfied."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from groups import cgroup

sys.path.append(str(Path(__file__).parents[1] / "doctor"))
from gate_machines import good, limits
from remedies import SCENES, Scene, general

from stoker.doctor.examine import examine
from stoker.doctor.need import Need

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.integration

DOCTOR = f"{sys.executable} -m stoker.cli doctor --json"

# Examines, types what it is told twice over, and examines again, from the shell that typed it: variables and
# limits are the shell's own.
PATIENT = r"""
import json, shlex, subprocess, sys
scene = json.loads(sys.argv[1])
def seen(text):
    found = {}
    for one in json.loads(text)["checks"]:
        if one["check"] in scene["checks"]:
            found.setdefault(one["check"], []).append(one)
    return found
doctor = scene["doctor"]
def run(line):
    done = subprocess.run(f"{scene['under']} {line}", shell=True, capture_output=True, text=True)
    assert done.returncode in (0, 1) and done.stdout, done.stderr + line
    return done.stdout
before = seen(run(doctor))
told = [one for found in before.values() for one in found if one["level"] in ("warn", "fail")]
lines = [line for one in told for line in one["fix"]]
script = "\n".join(["set -e", *lines, *lines, scene["then"] or "true", "set +e", f"exec {doctor}"])
said = run(f"sh -c {shlex.quote(script)}")
after = seen(said[said.index("{"):])
print(json.dumps([before, after]))
"""


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_a_machine_that_was_mended_as_told_is_good(
    scene: Scene,
    laid_out: dict[str, Path],
    namespaces: tuple[str, ...],
    stoker_environ: Callable[..., dict[str, str]],
) -> None:
    words = [DOCTOR, "--cache", str(laid_out["folder"])]
    if scene.need:
        (laid_out["real"].parent / "need.json").write_text(scene.need)
        words += ["--for", "need.json"]
    told = {"checks": [check for check, _ in scene.cures], "doctor": " ".join(words)}
    told |= {"under": scene.under, "then": scene.then}
    script = f'set -e; mount --make-rprivate /; {scene.made.format(**laid_out)}; exec "$@"'
    environ = {name: value.format(**laid_out) for name, value in scene.environ}
    done = subprocess.run(
        [*namespaces, "sh", "-c", script, "sh", sys.executable, "-c", PATIENT, json.dumps(told)],
        env=stoker_environ(PATH=f"{laid_out['bin']}:{os.environ['PATH']}", **environ),
        cwd=laid_out["folder"].parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout)
    assert remedies_of(before) == set(scene.cures)
    bad = [one for found in after.values() for one in found if one["level"] != "ok"]
    assert not bad, bad


def remedies_of(checks: dict[str, list[dict[str, Any]]]) -> set[tuple[str, str]]:
    return {
        (name, general(line))
        for name, found in checks.items()
        for one in found
        if one["level"] in ("warn", "fail")
        for line in one["fix"]
    }


@pytest.mark.usefixtures("need_root")
def test_threads_within_a_quota_are_good(stoker_environ: Callable[..., dict[str, str]]) -> None:
    with cgroup(memory_bytes=1 << 30, cores=0.5) as under:
        told = {"checks": ["CPU quota"], "doctor": DOCTOR, "under": "", "then": ""}
        done = subprocess.run(
            [*under, sys.executable, "-c", PATIENT, json.dumps(told)],
            env=stoker_environ(),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout)
    assert [before["CPU quota"][0]["level"], after["CPU quota"][0]["level"]] == ["warn", "ok"]


@pytest.mark.usefixtures("need_root")
def test_a_folder_given_to_a_user_is_writable(
    tmp_path: Path, stoker_environ: Callable[..., dict[str, str]], skip_or_fail: Callable[[str], None]
) -> None:
    """The user's shell puts in who that is, and sudo does it: here a program that leaves it to the test."""
    if not all(folder.stat().st_mode & 0o001 for folder in Path(sys.prefix).parents):
        skip_or_fail("other users cannot reach this clone: let them through its folders (chmod o+x)")
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o005 and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o005)
    (tmp_path / "cache").mkdir(mode=0o755)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "sudo").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/open/asked\n')
    (tmp_path / "sudo").chmod(0o755)
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    environ = stoker_environ(PATH=f"{tmp_path}:{os.environ['PATH']}", HOME=str(tmp_path))

    def examined() -> dict[str, Any]:
        words = [*user, *DOCTOR.split(), "--cache", str(tmp_path / "cache")]
        done = subprocess.run(words, env=environ, cwd="/", capture_output=True, text=True, timeout=60)
        assert done.stdout, done.stderr
        (found,) = [one for one in json.loads(done.stdout)["checks"] if one["check"] == "writable cache"]
        return dict(found)

    before = examined()
    assert before["level"] == "fail"
    for line in before["fix"] * 2:
        subprocess.run([*user, "sh", "-ec", line], env=environ, check=True)
        subprocess.run((tmp_path / "open/asked").read_text().split("\n")[:-1], check=True)
    assert examined()["level"] == "ok"


def test_limits_hold_for_root_and_for_others(
    laid_out: dict[str, Path], namespaces: tuple[str, ...], require_binary: Callable[[str], str]
) -> None:
    """PAM's `*` is everybody but root. What sets limits can be tried by lowering them, without the right to
    raise them."""
    require_binary("su")
    few = limits(open_files_soft=1024, open_files_hard=1024)
    (told,) = (one for one in examine(good(limits=few), need=Need(open_files=4096)) if one.level == "fail")
    lines = [line.replace("1048576", "4096") for line in told.seen.fix]
    mounts = ["set -e; mount --make-rprivate /", f"mount --bind {laid_out['etc']} /etc"]
    logins = [f"su -s /bin/sh -c 'ulimit -Hn' {user}" for user in ("root", "nobody")]
    done = subprocess.run(
        [
            *namespaces,
            "prlimit",
            "--nofile=8192:8192",
            "sh",
            "-c",
            "\n".join([*mounts, *lines, *lines, *logins]),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["4096", "4096"]), done.stderr
