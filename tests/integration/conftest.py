"""The servers that tests of whole processes share: an S3 store, and nginx over a folder."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
from s3_server import S3Server, serve
from web_server import WebServer, serve_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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


@pytest.fixture
def credentials(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client must know to use the store, in the environment of this process."""
    for name, value in s3.environ().items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def web(require_binary: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    with serve_folder(tmp_path_factory.mktemp("web"), nginx=require_binary("nginx")) as server:
        yield server
