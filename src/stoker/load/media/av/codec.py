"""Decoding of sound and video: torchcodec on FFmpeg's libraries, one thread of theirs for each of ours.
The home of torchcodec."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.errors import MissingPackageError, require
from stoker.load.media.av.audio import Audio
from stoker.load.media.av.containers import frame_sizes, may_leave_out, says_when
from stoker.load.media.decode import Undecodable

Waves = npt.NDArray[np.float32]
Frame = npt.NDArray[np.uint8]

_RATES = range(1_000, 768_001)  # of a source: one second at 1 Hz would be made 16,000 samples
_WHOLE = 0.9  # of the frames that a header says: with fewer, a file was cut short
_SLACK_S = 0.1  # what the length in a header of sound may be wrong by
_LOSSY_IN_WAV = ("adpcm_ms", "adpcm_ima_wav")  # of a packet's blocks torchcodec 0.13 keeps the first
_NOTHING = "it holds no sound"
_COUNTED_S = 60.0  # of sound that is held to find out how much of it there is
_AHEAD_S = 2.0  # more than a frame of sound lasts: FLAC's longest, at 44,100 a second, is 1.5


@cache
def codec() -> str:
    """What decodes, with its versions; tried once, since FFmpeg's libraries are found only when used."""
    require("torch", extra="media-av")
    try:
        found = require("torchcodec", extra="media-av")
        _sound_of(np.frombuffer(_SILENCE, np.uint8)).get_all_samples()
    except (RuntimeError, OSError, ImportError) as error:
        if isinstance(error, MissingPackageError):
            raise
        raise _unusable(error) from error
    return f"torchcodec {found.__version__}, FFmpeg {found.ffmpeg_major_version}"


_SILENCE = b"".join(
    (
        struct.pack("<4sI4s4sIHHIIHH", b"RIFF", 36 + 200, b"WAVE", b"fmt ", 16, 1, 1, 8_000, 16_000, 2, 16),
        struct.pack("<4sI", b"data", 200),
        bytes(200),
    )
)


def _unusable(error: Exception) -> MissingPackageError:
    """torchcodec is there, and what it stands on is not, or is another."""
    cause = f"{error} {error.__cause__}"
    if any(name in cause for name in ("libnvrtc", "libcudart", "_cuda.so")):
        return MissingPackageError(
            "this torchcodec is built for CUDA, and the torch that is installed for the CPU",
            hint="pip install 'torchcodec<0.14', whose wheels are for the CPU, or a later one's CPU build",
        )
    return MissingPackageError(
        f"torchcodec cannot load FFmpeg's libraries: {cause.strip().splitlines()[0][:200]}",
        hint="apt install ffmpeg (or: dnf install ffmpeg-free, conda install ffmpeg), version 4 to 8",
    )


class VideoStream:
    """The frames of one video. Raises `Undecodable` for bytes that are none, or too large ones."""

    def __init__(self, data: Any, *, max_pixels: int) -> None:
        for width, height in frame_sizes(data):
            _check_size(width, height, max_pixels)
        from torchcodec.decoders import VideoDecoder

        with _told("video"):
            self._decoder = VideoDecoder(_bytes(data), dimension_order="NHWC", device="cpu")
        facts = self._decoder.metadata
        _check_size(facts.width or 0, facts.height or 0, max_pixels)
        self.frames = int(facts.num_frames or 0)
        said = facts.num_frames_from_header or 0
        if self.frames < said * _WHOLE - 1 and not may_leave_out(data):
            raise Undecodable(f"it is cut short: {self.frames:,} frames are there, its header says {said:,}")
        if not self.frames:
            raise Undecodable("it has no frames")
        self._is_sought, self._passed = says_when(data) and self.frames >= said, 0

    def frame(self, number: int) -> Frame:
        """[height, width, 3] of one frame; ask for them in their order."""
        with _told("video"):
            shown: Any = self._decoder.get_frame_at(number).data if self._is_sought else self._counted(number)
        found: Frame = shown.numpy()
        return found

    def _counted(self, number: int) -> Any:
        """Decoded from the first frame on: by its number torchcodec finds another one in AVI and MPEG, and in
        an MP4 whose edit list leaves frames out."""
        from torchcodec._core import get_next_frame

        shown = None
        while self._passed <= number:
            shown = get_next_frame(self._decoder._decoder)[0]
            self._passed += 1
        return shown


def _check_size(width: int, height: int, most: int) -> None:
    if width * height > most:
        raise Undecodable(
            f"frames of {width:,} x {height:,} pixels are more than max_pixels={most:,}, and none was decoded"
        )


def sound(data: Any, audio: Audio, start_of: Callable[[int], int]) -> Waves:
    """[channels, samples] of one sound, from where `start_of` its length says: as many as are asked for, or
    as there are."""
    opened = _sound_of(data)
    facts = opened.metadata
    if facts.sample_rate not in _RATES:
        raise Undecodable(
            f"{facts.sample_rate} samples a second is the rate of no sound ({_RATES[0]:,} to {_RATES[-1]:,})"
        )
    if facts.codec in _LOSSY_IN_WAV and bytes(data[:4]) == b"RIFF" and bytes(data[8:12]) == b"WAVE":
        raise Undecodable(
            f"of {facts.codec} in a WAV torchcodec decodes a part alone: make it FLAC, or plain PCM"
        )
    said, channels = facts.duration_seconds or 0.0, facts.num_channels or 1
    _check_length(said, audio.max_seconds)
    first = facts.begin_stream_seconds or 0.0
    if audio.crop == "whole":
        return _whole(data, audio, channels)
    start = start_of(round(said * audio.rate)) if said > 0 else 0
    found = None
    if said > 0 or audio.crop == "start":
        found = _stretch(data, audio, channels, first + start / audio.rate)
    # a length that is estimated, or not said, may be wrong: then it is counted
    if found is None or (start and found.shape[1] < audio.samples - _SLACK_S * audio.rate):
        first, counted = _counted(data, first, audio.max_seconds)
        start = start_of(round(counted * audio.rate))
        found = _stretch(data, audio, channels, first + start / audio.rate)
    # a header of MP3 counts what its coder put around the sound, and seconds are rounded to samples
    if start and found is not None and (lacks := audio.samples - found.shape[1]) > 0:
        found = _stretch(data, audio, channels, first + max(0, start - lacks - 1) / audio.rate)
    if found is None or not found.shape[1]:
        raise Undecodable(_NOTHING)
    return _checked(found)


def _sound_of(data: Any) -> Any:
    """A sound as it is."""
    from torchcodec.decoders import AudioDecoder

    with _told("audio"):
        return AudioDecoder(_bytes(data))


def _resampled(data: Any, audio: Audio, *, channels: int) -> Any:
    """A sound of so many channels at the rate that is asked for. FFmpeg mixes more than two down to stereo;
    to mono it would add two channels of the same to 1.4 times of one, so `_mixed` does that."""
    from torchcodec.decoders import AudioDecoder

    mixed = 2 if channels > audio.channels == 2 else None
    with _told("audio"):
        return AudioDecoder(_bytes(data), sample_rate=audio.rate, num_channels=mixed)


def _mixed(found: Waves, audio: Audio) -> Waves:
    """Mono is the mean of all channels, as librosa and others have it; stereo of mono is twice the same."""
    if len(found) == audio.channels:
        return found
    return found.mean(0, keepdims=True) if audio.channels == 1 else np.repeat(found[:1], 2, 0)


def _whole(data: Any, audio: Audio, channels: int) -> Waves:
    """All of it; a header that says less than there is does not make it more than `max_seconds`."""
    most = max(_sound_of(data).metadata.begin_stream_seconds or 0.0, 0.0) + audio.max_seconds + 1
    # torchcodec 0.13 dies of a stream whose channels change while it resamples; as it is, it raises
    _between(_sound_of(data), -_AHEAD_S, most)
    found = _from(0.0, _between(_resampled(data, audio, channels=channels), -_AHEAD_S, most))
    if found is None:
        raise Undecodable(_NOTHING)
    _check_length(found.shape[1] / audio.rate, audio.max_seconds)
    return _checked(_mixed(found, audio))


def _stretch(data: Any, audio: Audio, channels: int, begin: float) -> Waves | None:
    """The samples that are asked for, from a second on; none where it has ended before."""
    begin = max(0.0, begin)
    # a little more: where seconds are cut out of FFmpeg's frames a sample may be lost to rounding
    seconds = audio.seconds + 2 / audio.rate
    found, at = _decoded(lambda: _sound_of(data), begin, begin + seconds)  # as in `_whole`
    if found is None:
        return None
    if at > begin:  # it begins later than its header says
        begin = at
        _decoded(lambda: _sound_of(data), begin, begin + seconds)
    found, _ = _decoded(lambda: _resampled(data, audio, channels=channels), begin, begin + seconds)
    return None if found is None else _mixed(found[:, : audio.samples], audio)


def _decoded(opened: Callable[[], Any], begin: float, end: float) -> tuple[Waves | None, float]:
    """What lies between two seconds, and where it begins: later than asked where the sound does. A decoder
    that resamples gives something else the second time, so each try opens another."""
    found = _between(opened(), begin, end)
    if found is None or (found.pts_seconds - begin) * found.sample_rate > 1:
        # of Matroska and AVI torchcodec leaves out a frame that begins before: it knows no length of one
        found = _between(opened(), begin - _AHEAD_S, end)
    return _from(begin, found), max(begin, found.pts_seconds) if found else begin


def _between(opened: Any, begin: float, end: float) -> Any:
    try:
        return opened.get_samples_played_in_range(begin, end)
    except RuntimeError as error:
        if "No audio frames" in str(error):
            return None
        raise Undecodable(_sentence(error)) from error


def _from(begin: float, found: Any) -> Waves | None:
    if found is None:
        return None
    ahead = max(0, round((begin - found.pts_seconds) * found.sample_rate))
    waves: Waves = found.data.numpy()[:, ahead:]
    return waves if waves.shape[1] else None


def _counted(data: Any, first: float, most: float) -> tuple[float, float]:
    """Where a sound begins, and how many seconds it has, decoded piece by piece."""
    opened, seconds = _sound_of(data), 0.0
    rate, begin = int(opened.metadata.sample_rate), max(0.0, first)
    while True:
        until = begin + seconds + _COUNTED_S
        some, at = _decoded(lambda: opened, begin + seconds, until)
        if some is None:
            return begin, seconds
        begin, seconds = begin if seconds else at, seconds + some.shape[1] / rate
        _check_length(seconds, most)
        if begin + seconds < until - 1 / rate:
            return begin, seconds


def _check_length(seconds: float, most: float) -> None:
    if seconds > most:
        raise Undecodable(
            f"{seconds:,.0f} seconds are more than max_seconds={most:,.0f}, and no memory was taken for them"
        )


def _checked(found: Waves) -> Waves:
    if not np.isfinite(found).all():
        raise Undecodable("not all of its samples are numbers")
    return found


def _bytes(data: Any) -> Any:
    """As a tensor over the same memory, which torchcodec reads from where it lies; torch wants to be able to
    write to it."""
    import torch

    array = np.frombuffer(data, np.uint8)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


@contextmanager
def _told(what: str) -> Iterator[None]:
    """What decoders of broken bytes raise, in a sentence."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        if "stream is unknown" in str(error):
            raise Undecodable(f"it has no {what} track") from error
        raise Undecodable(_sentence(error)) from error


def _sentence(error: Exception) -> str:
    """What went wrong, without where in torchcodec's sources."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split(".cpp:")[-1].partition(", ")[2] or lines[0]
