"""Videos of samples: their frames decoded one by one, each cropped and resized before the next."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from stoker.errors import require
from stoker.load.assembly.rows import Buffers
from stoker.load.media.av.clips import frames_of
from stoker.load.media.av.codec import Frame, VideoStream, codec
from stoker.load.media.av.sounds import VIDEOS, ClipReport
from stoker.load.media.av.video import NAME, Video
from stoker.load.media.boxes import DRAWN, crop_of, uniforms
from stoker.load.media.decode import Undecodable
from stoker.load.media.kinds import Troubles, keys_of_task
from stoker.load.ordering.plan import Task

LENGTH = "video_length"
_WHAT = 1 << 17  # of the keys


class Videos:
    """Makes the column of videos."""

    what, suffixes, columns = "video", (VIDEOS,), frozenset({NAME, LENGTH})
    taken = frozenset({NAME, LENGTH, "video_ok"})

    def __init__(self, video: Video, *, seed: int, on_corrupt: str) -> None:
        require("PIL", extra="media-av")
        self._video, self._seed, self._engine = video, seed, codec()
        self.policy, self.member = video.on_corrupt or on_corrupt, video.member
        self.is_even = video.crop != "whole"
        self._buffers, self._counting = Buffers(), threading.Lock()
        self._decoded = self._short = 0
        self._troubles = Troubles()

    def report(self) -> ClipReport:
        return ClipReport(
            engine=self._engine,
            decoded=self._decoded,
            short=self._short,
            corrupt=self._troubles.count,
            named=self._troubles.named,
        )

    def begin(self, task: Task) -> _Rows:
        numbers = uniforms(keys_of_task(task, seed=self._seed, what=_WHAT), DRAWN + 1).tolist()
        video, room = self._video, None
        if self.is_even:
            shape = (len(task.draw), video.frames, video.size, video.size, 3)
            room = self._buffers.take(shape, np.dtype(np.uint8))
        return _Rows(self, video, numbers, room)

    def count(self, wrong: str) -> None:
        self._troubles.add(wrong)

    def note(self, *, is_short: bool) -> None:
        """One was decoded, by any thread."""
        with self._counting:
            self._decoded += 1
            self._short += is_short

    def evened(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {}  # who asked for whole frames has them in their own sizes


class _Rows:
    """The videos of one task."""

    def __init__(self, videos: Videos, video: Video, numbers: list[list[float]], room: Any) -> None:
        self._videos, self._video, self._numbers, self._room = videos, video, numbers, room
        self._image, self._lengths = video.image, np.zeros(len(numbers), np.int64)

    @property
    def columns(self) -> dict[str, Any]:
        return {} if self._room is None else {NAME: self._room, LENGTH: self._lengths}

    def decode(self, row: int, data: Any) -> dict[str, Any]:
        video, numbers = self._video, self._numbers[row]
        stream = VideoStream(data, max_pixels=video.max_pixels)
        wanted = frames_of(video, stream.frames, numbers[DRAWN])
        out = None if self._room is None else self._room[row]
        for at, number in enumerate(wanted):
            made = self._cropped(stream.frame(number), numbers)
            if out is None:  # in its own size, which the first one says
                out = np.empty((video.frames, *made.shape), np.uint8)
            if made.shape != out.shape[1:]:
                raise Undecodable("its frames are not all of one size")
            out[at] = made
        assert out is not None
        own = len(wanted)
        out[own:] = out[own - 1]
        self._lengths[row] = own
        self._videos.note(is_short=own < video.frames)
        return {NAME: out, LENGTH: own}

    def blank(self, row: int) -> dict[str, Any]:
        video = self._video
        shape = (video.frames, video.size, video.size, 3)
        out = np.empty(shape, np.uint8) if self._room is None else self._room[row]
        out[:] = 0
        return {NAME: out, LENGTH: 0}

    def finish(self) -> dict[int, str]:
        return {}

    def _cropped(self, frame: Frame, numbers: list[float]) -> Frame:
        from stoker.load.media import library  # the home of PIL

        height, width, _ = frame.shape
        crop = crop_of(self._image, width, height, numbers)
        made = library.resized(frame, crop)
        return made[:, ::-1] if crop.mirrored else made
