"""What strangers meet first: issue forms, the release recipe's refusals."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
ASKED = [
    path for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) if path.stem != "config"
]


@pytest.mark.parametrize("form", ASKED, ids=lambda form: form.stem)
def test_an_issue_form_asks_for_the_machine_and_the_run(form: Path) -> None:
    told = yaml.safe_load(form.read_text("utf-8"))
    assert {"name", "description", "body"} <= told.keys()
    asked = {one["id"]: one["attributes"] for one in told["body"] if "id" in one}
    assert "stoker doctor --record" in asked["machine"]["description"]
    assert "stoker watch" in asked["run"]["description"]
    assert "stoker --version" in asked["version"]["description"]


# --- the release ---


@pytest.fixture
def tagged(tmp_path: Path) -> Path:
    """A repository with what the recipe reads before it builds."""
    for name in (".ci/release", "src/stoker/__init__.py", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "it")


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True)


def release(folder: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run([folder / ".ci" / "release", *arguments], capture_output=True, text=True)
    return done.returncode, done.stderr


def test_a_release_without_a_tag_is_refused(tagged: Path) -> None:
    assert release(tagged) == (2, "error: no tag was named\nhint: make release TAG=v0.1.0\n")
    assert release(tagged, "v0.1.0") == (1, "error: there is no tag v0.1.0\nhint: git tag -a v0.1.0\n")


def test_a_tag_that_is_not_the_version_is_refused(tagged: Path) -> None:
    git(tagged, "tag", "v9.9.9")
    code, said = release(tagged, "v9.9.9")
    assert code == 1
    assert said.startswith("error: the tag is v9.9.9, the version there is ")


def test_a_version_that_the_changelog_does_not_know_is_refused(tagged: Path) -> None:
    changes = tagged / "CHANGELOG.md"
    changes.write_text(changes.read_text("utf-8").replace("## 0.1.0", "## 0.0.9"), "utf-8")
    commit(tagged)
    git(tagged, "tag", "v0.1.0")
    code, said = release(tagged, "v0.1.0")
    assert code == 1
    assert "CHANGELOG.md says nothing of 0.1.0" in said
