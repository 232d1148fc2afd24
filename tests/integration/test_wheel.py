"""`make wheel` builds what installs anywhere: into an environment that knows nothing of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parent.parent.parent
SOURCES = ("pyproject.toml", "setup.py", "constraints.txt", "Makefile", "README.md", "LICENSE")
EXTENSIONS = re.findall(r'"(stoker\.[\w.]+)"', (ROOT / "setup.py").read_text("utf-8"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which `make wheel` has run, with the packages of this environment."""
    checkout = tmp_path_factory.mktemp("checkout")
    unbuilt = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", checkout / "src", ignore=unbuilt)
    for name in SOURCES:
        shutil.copy(ROOT / name, checkout)
    made = subprocess.run(
        ["make", "wheel", f"VENV={sys.prefix}"], cwd=checkout, capture_output=True, text=True, timeout=300
    )
    assert made.returncode == 0, made.stderr[-3000:]
    return checkout


def test_a_wheel_installs_into_an_empty_environment_and_runs(built: Path, tmp_path: Path) -> None:
    (wheel,) = (built / "dist").glob("*.whl")
    empty = tmp_path / "empty"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", empty], check=True, timeout=60)
    install = [sys.executable, "-m", "pip", "--python", empty / "bin" / "python", "install", "--no-deps"]
    subprocess.run(
        list(map(str, [*install, "--no-index", wheel])), check=True, capture_output=True, timeout=60
    )
    imports = "\n".join(f"import {name}" for name in EXTENSIONS)
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}  # what stoker depends on

    def ask(*command: object) -> str:
        text = list(map(str, command))
        return subprocess.run(
            text, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60
        ).stdout

    assert "0.1.0" in ask(empty / "bin" / "stoker", "--version")
    where = ask(empty / "bin" / "python", "-c", f"{imports}\nprint(stoker.__file__)")
    assert Path(where.strip()).is_relative_to(empty)
    ask(empty / "bin" / "stoker", "report", ROOT / "examples" / "starved_cpu.jsonl", "--out", "report.html")
    assert "data starvation" in (tmp_path / "report.html").read_text(
        "utf-8"
    )  # its style sheet is in the wheel


def test_the_source_archive_holds_all_that_a_build_needs(built: Path, tmp_path: Path) -> None:
    """The wheel was made from it; a second one from the archive alone has the same files."""
    (archive,) = (built / "dist").glob("*.tar.gz")
    assert archive.name == "stoker-0.1.0.tar.gz"
    shutil.unpack_archive(archive, tmp_path)
    kept = {path.relative_to(ROOT) for path in (ROOT / "src").rglob("*.[ch]")}
    assert {path for path in kept if not (tmp_path / "stoker-0.1.0" / path).exists()} == set()


def test_an_address_of_git_installs(
    built: Path, tmp_path: Path, require_binary: Callable[[str], str]
) -> None:
    """The line of docs/start/install.md, without the packages that it would fetch."""
    git = (require_binary("git"), "-C", str(built), "-c", "user.name=a", "-c", "user.email=a@b")
    for step in (("init", "-q"), ("add", "src", *SOURCES), ("commit", "-qm", "all of it")):
        subprocess.run([*git, *step], check=True)
    line = f"stoker[tokens,torch] @ git+file://localhost{built}"
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(tmp_path / "here")]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *offline, line], check=True, timeout=120)
    assert (tmp_path / "here" / "stoker" / "__init__.py").exists()
