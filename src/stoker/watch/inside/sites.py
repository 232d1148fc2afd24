"""Construction sites: the line of the user's program at which a DataLoader is built, and by whose code."""

from __future__ import annotations

import linecache
import os
from types import FrameType
from typing import Any

from stoker.watch.inside.frames import PACKAGES, is_library, is_ours


def site_of(frame: FrameType | None) -> dict[str, Any]:
    """The innermost frame of the user's own: its file, line, function and text; and `through`, the packages
    whose code lies between it and the constructor: a framework's Trainer builds loaders of its own."""
    through: list[str] = []
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_ours(frame.f_code):
            if not is_library(name):
                return _site(frame, through)
            through += [package] if (package := _package(name)) not in through else []
        frame = frame.f_back
    return {"file": "", "line": 0, "function": "", "text": "", "through": through}


def is_at(site: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Is this the place that was meant? Lines move when a file is edited: the text of the line counts."""
    names = [os.path.basename(one.get("file", "")) for one in (site, wanted)]
    return names[0] == names[1] and site.get("text") == wanted.get("text")


def _site(frame: FrameType, through: list[str]) -> dict[str, Any]:
    name, line = os.path.abspath(frame.f_code.co_filename), frame.f_lineno or 0
    return {
        "file": name,
        "line": line,
        "function": frame.f_code.co_name,
        "text": linecache.getline(frame.f_code.co_filename, line).strip(),
        "through": through,
    }


def _package(name: str) -> str:
    """`transformers` of …/site-packages/transformers/trainer.py."""
    for mark in PACKAGES:
        if mark in name:
            return name.rpartition(mark)[2].partition(os.sep)[0]
    return ""
