"""How staging goes, on a terminal."""

from __future__ import annotations

import io
import os
import pty
from contextlib import closing
from typing import TYPE_CHECKING

from stoker.cli import staging
from stoker.cli.staging import StageProgress
from stoker.stage.origins.origin import RemoteFile
from stoker.stage.plan import Unit

if TYPE_CHECKING:
    import pytest


def everything(terminal: io.FileIO) -> bytes:
    """What was written, however many pieces it comes in."""
    os.set_blocking(terminal.fileno(), False)
    return b"".join(iter(lambda: terminal.read(1 << 16) or b"", b""))


def test_brackets_in_names_are_shown_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "x[/red].bin"
    unit = Unit(key="k", folder="f", files=(RemoteFile(name=name, url=name, bytes=9),))
    shown, inner = pty.openpty()
    with os.fdopen(shown, "rb", buffering=0) as terminal, closing(os.fdopen(inner, "w")) as stderr:
        monkeypatch.setattr(staging.sys, "stderr", stderr)
        monkeypatch.setenv("TERM", "xterm")
        with StageProgress() as progress:
            progress.planned("s3://bucket/[/bold]", [unit])
            progress.began(unit)
            progress.waits(unit, "process 7 on [/node]")
            progress.damaged(unit, [name])
        stderr.flush()
        text = everything(terminal).decode()
    assert name in text
    assert "s3://bucket/[/bold]" in text
