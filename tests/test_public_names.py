"""The public names: importable, each from its home, only when asked for."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import stoker

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("name", stoker.__all__)
def test_a_public_name_can_be_imported(name: str) -> None:
    assert getattr(stoker, name) is not None


def test_public_names_are_sorted_and_unique() -> None:
    assert sorted(set(stoker.__all__)) == sorted(stoker.__all__)


def test_dir_lists_the_public_names() -> None:
    assert set(dir(stoker)) == set(stoker.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        stoker.nonsense  # noqa: B018


def test_no_home_is_imported_before_a_name_is_used(stoker_environ: Callable[..., dict[str, str]]) -> None:
    program = "import sys, stoker; print([name for name in sys.modules if name.startswith('stoker.')])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=stoker_environ(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "[]"


def test_the_version_is_the_installed_one() -> None:
    assert stoker.__version__.count(".") == 2
