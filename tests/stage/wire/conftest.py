"""What tests of the wire share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from certificates import certificate

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def authority(require_binary: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An authority's certificate, and the chain of a server on localhost that it vouches for."""
    return certificate(tmp_path_factory.mktemp("authority"), openssl=require_binary("openssl"))
