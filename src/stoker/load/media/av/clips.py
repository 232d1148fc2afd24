"""Clips: which frames of a video, and which samples of a sound, from numbers that the order gives. Pure."""

from __future__ import annotations

from stoker.load.media.av.audio import Audio
from stoker.load.media.av.video import Video


def frames_of(video: Video, count: int, number: float) -> list[int]:
    """Which frames of a video with so many; fewer than are asked for of a shorter one."""
    first = _first(video.clip, count - video.span, number)
    own = min(video.frames, -(-(count - first) // video.stride))
    return [first + at * video.stride for at in range(own)]


def start_of(audio: Audio, count: int, number: float) -> int:
    """The first sample that is taken, of a sound with so many at the rate asked for."""
    return _first(audio.crop, count - audio.samples, number)


def _first(which: str, room: int, number: float) -> int:
    """Where a clip begins that can be moved so far."""
    if room <= 0 or which in ("start", "whole"):
        return 0
    return room // 2 if which == "center" else int(number * (room + 1))
