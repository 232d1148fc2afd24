"""`stoker doctor --metrics`: a machine's health, as Prometheus asks for it."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING

import pytest
from s3_server import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.integration


def test_the_machine_is_examined_and_served_until_it_is_ended(
    stoker_environ: Callable[..., dict[str, str]],
) -> None:
    (port,) = free_ports(1)
    with subprocess.Popen(
        [sys.executable, "-m", "stoker.cli", "doctor", "--metrics", str(port)],
        env=stoker_environ(),
        stderr=subprocess.PIPE,
        text=True,
    ) as doctor:
        assert doctor.stderr
        url = doctor.stderr.readline().split()[-1]
        with urllib.request.urlopen(url) as answer:
            told = answer.read().decode()
        doctor.terminate()
    assert url == f"http://127.0.0.1:{port}/metrics"
    assert 'subject="memory",check="shared memory"' in told
