"""Engines that decode."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stoker.native import native


@pytest.fixture
def in_c(skip_or_fail: Callable[[str], None]) -> None:
    if not native("load.media._jpeg"):
        skip_or_fail("the C engine was not built: install libjpeg62-turbo-dev and a compiler, then stoker")


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "libjpeg":
        request.getfixturevalue("in_c")
    return str(request.param)
