"""Stack frames of other threads: what a thread is in, which span, which line of the user's program."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from types import CodeType, FrameType
from typing import NamedTuple

_FRAMES = 40
_OWN = os.path.dirname(__file__)
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_FROZEN = "<frozen"
PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")  # also of another prefix


class Inside(NamedTuple):
    """A span that has not ended; of a collective its name."""

    kind: str
    name: str = ""


def frame_of(thread: int) -> FrameType | None:
    """Where a thread is; None of one that has ended."""
    return sys._current_frames().get(thread)


def spans_around(frame: FrameType | None, *, optimizing: CodeType | None) -> list[Inside]:
    """The spans that a thread is in, outermost first: those of our frames that name the `kind` of theirs, and
    of torch's where an optimizer steps."""
    found = []
    while frame is not None:
        if frame.f_code is optimizing:
            found.append(Inside("optimizer"))
        elif is_ours(frame.f_code):
            told = frame.f_locals
            if "kind" in told:
                found.append(Inside(told["kind"], told.get("collective", "")))
        frame = frame.f_back
    return found[::-1]


def is_ours(code: CodeType) -> bool:
    return os.path.dirname(code.co_filename) == _OWN


def is_library(filename: str) -> bool:
    """Is this file no part of the user's program?"""
    return filename.startswith((*_LIBRARIES, _FROZEN)) or any(name in filename for name in PACKAGES)


def top_user_frame(frames: list[str]) -> str:
    """The innermost frame that is not a library's: what the user can change."""
    own = [line for line in frames if not is_library(line)]
    return (own or frames or ["?"])[-1]


def lines_of(frame: FrameType) -> list[str]:
    """`file:line function`, outermost first, without our own."""
    summary = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=_FRAMES, lookup_lines=False)
    theirs = [one for one in reversed(summary) if os.path.dirname(one.filename) != _OWN]
    return [f"{one.filename}:{one.lineno} {one.name}" for one in theirs]


def places_of(frame: FrameType | None) -> tuple[tuple[CodeType, int], ...]:
    """Code and line of every frame, outermost first, without our own."""
    found = []
    while frame is not None:
        if not is_ours(frame.f_code):
            found.append((frame.f_code, frame.f_lineno or 0))
        frame = frame.f_back
    return tuple(found[::-1])
