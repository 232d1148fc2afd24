"""Liveness: whether a watcher still runs, asked on its own machine, in another container, or anywhere else.

A process's number says little by itself: containers begin to count at 1, and a run folder is read for months.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.processes import lives, namespaces, started
from stoker.watch.runs.files import Clock

_FRESH_S = 120.0  # since a file was written: attributes on NFS are up to a minute old, and clocks differ
_SAMPLES = 3  # or so many samples' time, where they are far apart


def own_mark() -> list[str]:
    """What tells this process from others of its number: what its number is of, and when it began."""
    return [namespaces(), started(os.getpid())]


def runs_still(meta: Mapping[str, Any], folder: Path) -> bool:
    """Where its number means something here, whether the process is there; else whether its node's files are
    still being written."""
    if meta.get("ended"):
        return False
    mark = meta.get("mark")
    if mark and meta["clock"]["boot"] == Clock.here().boot and mark[0] and mark[0] == namespaces():
        return lives(meta["pid"]) and started(meta["pid"]) == mark[1]
    written = [_written(path) for path in folder.glob(f"*-{meta['node']}*")]
    fresh_s = max(_FRESH_S, _SAMPLES / float(meta.get("hz") or 1.0))
    return max(written, default=0.0) > time.time() - fresh_s


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
