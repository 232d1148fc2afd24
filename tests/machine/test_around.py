"""This machine as it is, and what is around a process."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from stoker.machine.files import Files
from stoker.machine.host import read_limits, read_memory
from stoker.machine.read import read_machine
from stoker.machine.surroundings import read_environ, read_surroundings


def test_this_machine_is_read(tmp_path: Path) -> None:
    machine = read_machine(data=tmp_path, cache=tmp_path / "cache")
    assert machine.cpu.cores == os.cpu_count()
    assert machine.limits.open_files_soft == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert [(place.role, place.given) for place in machine.places] == [
        ("data", True), ("cache", True), ("hub", False), ("root", False),
    ]  # fmt: skip


def test_the_cache_is_where_the_environment_says(tmp_path: Path) -> None:
    machine = read_machine(environ={"STOKER_CACHE": str(tmp_path)})
    assert [place.path for place in machine.places if place.role == "cache"] == [str(tmp_path)]


def test_a_machine_with_nothing_in_proc_is_unknown_and_no_error(tmp_path: Path) -> None:
    read_memory(Files(tmp_path))
    read_limits(Files(tmp_path))


def test_no_secret_is_recorded() -> None:
    kept = read_environ(
        {
            "NCCL_DEBUG": "INFO",
            "HF_TOKEN": "hf_secret",
            "SLURM_JOB_USER": "ada",
            "CUDA_API_KEY": "secret",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "HF_HOME": "/nvme/hf",
        }
    )
    assert kept == {"HF_HOME": "/nvme/hf", "NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({"APPTAINER_CONTAINER": "x.sif"}, "apptainer"),
        ({"container": "lxc"}, "lxc"),
    ],
)
def test_the_container_is_known_by_its_marks(environ: dict[str, str], wanted: str, tmp_path: Path) -> None:
    assert read_surroundings(Files(tmp_path), environ).container == wanted


@pytest.mark.parametrize(("mounted", "wanted"), [(True, "docker"), (False, None)])
def test_a_machine_made_from_an_image_is_no_container(
    mounted: bool, wanted: str | None, tmp_path: Path
) -> None:
    (tmp_path / ".dockerenv").touch()
    (tmp_path / "proc" / "self").mkdir(parents=True)
    line = "700 699 254:1 /c/hosts /etc/hosts rw,relatime - ext4 /dev/sda1 rw\n" if mounted else ""
    (tmp_path / "proc" / "self" / "mountinfo").write_text(line)
    assert read_surroundings(Files(tmp_path), {}).container == wanted


def test_a_slurm_job_is_known_by_its_number(tmp_path: Path) -> None:
    assert read_surroundings(Files(tmp_path), {"SLURM_JOB_ID": "1"}).slurm is True
