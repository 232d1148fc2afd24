"""Sounds of samples: decoded into rows of one length, with how much of each is its own beside."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker.load.assembly.rows import Buffers
from stoker.load.media.av.audio import NAME, Audio
from stoker.load.media.av.clips import start_of
from stoker.load.media.av.codec import Waves, codec, sound
from stoker.load.media.boxes import uniforms
from stoker.load.media.kinds import Troubles, keys_of_task
from stoker.load.ordering.plan import Task

SUFFIXES = ("wav", "mp3", "flac", "ogg", "opus", "m4a", "aac", "aiff", "aif")
VIDEOS = ("mp4", "m4v", "mkv", "webm", "avi", "mov", "mpg", "mpeg")
LENGTH = "audio_length"
_WHAT = 1 << 16  # of the keys; images have those from 0 on


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipReport:
    """What became of the sounds, or the videos, of this process; of worker processes only they know."""

    engine: str
    decoded: int
    short: int  # of those: with less than was asked for, and filled up
    corrupt: int
    named: tuple[str, ...]  # some of the corrupt ones, and what is wrong with them


class Sounds:
    """Makes the column of sound."""

    what, suffixes, columns = "audio", (SUFFIXES, VIDEOS), frozenset({NAME, LENGTH})
    taken = frozenset({NAME, LENGTH, "audio_ok"})

    def __init__(self, audio: Audio, *, seed: int, on_corrupt: str) -> None:
        self._audio, self._seed, self._engine = audio, seed, codec()
        self.policy, self.member = audio.on_corrupt or on_corrupt, audio.member
        self.is_even = audio.crop != "whole"
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
        numbers = uniforms(keys_of_task(task, seed=self._seed, what=_WHAT), 1)[:, 0].tolist()
        room = None
        if self.is_even:
            shape = (len(task.draw), self._audio.channels, self._audio.samples)
            room = self._buffers.take(shape, np.dtype(np.float32))
        return _Rows(self, self._audio, numbers, room)

    def count(self, wrong: str) -> None:
        self._troubles.add(wrong)

    def note(self, *, is_short: bool) -> None:
        """One was decoded, by any thread."""
        with self._counting:
            self._decoded += 1
            self._short += is_short

    def evened(self, batch: dict[str, Any]) -> dict[str, Any]:
        some = batch.get(NAME)
        if self.is_even or not isinstance(some, list) or not all(map(self._is_sound, some)):
            return {}
        return {NAME: filled_up(some)}

    def _is_sound(self, one: Any) -> bool:
        return isinstance(one, np.ndarray) and one.ndim == 2 and one.shape[0] == self._audio.channels


def filled_up(some: Sequence[Waves]) -> Waves:
    """[rows, channels, samples] as long as the longest, zeros behind the others."""
    found = np.zeros((len(some), len(some[0]), max(one.shape[1] for one in some)), some[0].dtype)
    for row, one in zip(found, some, strict=True):
        row[:, : one.shape[1]] = one
    return found


class _Rows:
    """The sounds of one task."""

    def __init__(self, sounds: Sounds, audio: Audio, numbers: list[float], room: Any) -> None:
        self._sounds, self._audio, self._numbers, self._room = sounds, audio, numbers, room
        self._lengths = np.zeros(len(numbers), np.int64)

    @property
    def columns(self) -> dict[str, Any]:
        return {} if self._room is None else {NAME: self._room, LENGTH: self._lengths}

    def decode(self, row: int, data: Any) -> dict[str, Any]:
        audio, number = self._audio, self._numbers[row]
        found = sound(data, audio, lambda count: start_of(audio, count, number))
        length = found.shape[1]
        self._sounds.note(is_short=self._room is not None and length < audio.samples)
        if self._room is None:
            return {NAME: found, LENGTH: length}
        self._room[row, :, :length] = found
        self._room[row, :, length:] = 0
        self._lengths[row] = length
        return {NAME: self._room[row], LENGTH: length}

    def blank(self, row: int) -> dict[str, Any]:
        audio = self._audio
        out = np.empty((audio.channels, audio.samples), np.float32) if self._room is None else self._room[row]
        out[:] = 0
        return {NAME: out, LENGTH: 0}

    def finish(self) -> dict[int, str]:
        return {}
