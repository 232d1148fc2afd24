"""What tests of whole processes share: an S3 store, nginx over a folder, namespaces and stand-in devices."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from s3_server import S3Server, serve
from stand_ins import files_of_proc, programs, sysfs, torch_for_cards
from web_server import WebServer, serve_folder

if TYPE_CHECKING:
    from collections.abc import Iterator


HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever lies here is an integration test: one that is not marked would make `make unit` slow."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="module")
def s3(require_binary: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    rclone, nginx = require_binary("rclone"), require_binary("nginx")
    with serve(tmp_path_factory.mktemp("s3"), rclone=rclone, nginx=nginx) as server:
        yield server


@pytest.fixture
def bucket(s3: S3Server) -> Iterator[Path]:
    """The bucket's folder, empty."""
    yield s3.root / "bucket"
    for path in (s3.root / "bucket").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    time.sleep(0.02)  # the server remembers a listing for half as long: the next test's files must be seen


@pytest.fixture
def credentials(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client must know to use the store, in the environment of this process."""
    for name, value in s3.environ().items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def web(require_binary: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    with serve_folder(tmp_path_factory.mktemp("web"), nginx=require_binary("nginx")) as server:
        yield server


@pytest.fixture
def namespaces(need_root: None) -> tuple[str, ...]:
    return ("unshare", "--mount", "--net")


@pytest.fixture
def laid_out(tmp_path: Path, namespaces: tuple[str, ...]) -> dict[str, Path]:
    """What scenes mount in their namespaces: stand-ins, and a private /etc."""
    folders = {name: tmp_path / name for name in ("folder", "bin", "sys", "etc", "proc", "real")}
    for name in ("folder", "real"):
        folders[name].mkdir()
    programs(folders["bin"])
    sysfs(folders["sys"], disk_of=folders["folder"])
    shutil.copytree("/etc", folders["etc"], symlinks=True, ignore=shutil.ignore_patterns("ssl", "*.lock"))
    for name in ("default", "sysctl.d", "security/limits.d"):
        (folders["etc"] / name).mkdir(parents=True, exist_ok=True)
    (folders["etc"] / "default/grub").write_text('GRUB_DEFAULT=0\nGRUB_CMDLINE_LINUX="quiet"\n')
    files_of_proc(folders["proc"])
    torch_for_cards(folders["bin"])
    return folders
