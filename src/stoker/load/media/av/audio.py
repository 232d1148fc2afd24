"""`Audio`: what is to be made of the sound in each sample."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from numbers import Integral, Real
from typing import Annotated, Any, Literal

from stoker.errors import UsageError
from stoker.options import check_choices

NAME = "audio"  # of the column
_MOST_SAMPLES = 1 << 30  # of a row: 4 GiB


@dataclass(frozen=True, kw_only=True, slots=True)
class Audio:
    """How sound is decoded: how much of it, at which rate, in how many channels. Which seconds of a sample
    are taken is drawn from the loader's seed, the epoch and the sample: the same on any number of ranks and
    after a resume."""

    seconds: Annotated[float, "of what comes out: longer sound is cropped, shorter filled up with zeros"] = (
        10.0
    )
    rate: Annotated[int, "samples a second of what comes out; sound of another rate is resampled"] = 16_000
    channels: Annotated[Literal[1, 2], "1: mixed down to mono; 2: stereo"] = 1
    crop: Annotated[
        Literal["random", "center", "start", "whole"],
        'which `seconds` of it; "whole": all of it in its own length, filled up to the longest of its batch',
    ] = "random"
    member: Annotated[
        str,
        'which member of a sample, such as "flac"; "": the one that is sound, or else the one that is video',
    ] = ""
    on_corrupt: Annotated[
        Literal["", "raise", "skip", "replace"],
        'with sound that cannot be decoded. "skip": another sample of its batches stands in; "replace": it '
        'comes silent, and `audio_ok` is False; "": as the loader\'s',
    ] = ""
    max_seconds: Annotated[float, "sound of more is refused before memory is taken for it"] = 3600.0

    def __post_init__(self) -> None:
        check_choices(self)
        _check(self, "rate", self.rate, 100, 768_000, Integral)
        for name in ("seconds", "max_seconds"):
            _check(self, name, getattr(self, name), 1e-3, 1e6, Real)
        if self.samples * self.channels > _MOST_SAMPLES:
            raise UsageError(
                f"{self.seconds:g} seconds at {self.rate:,} a second are too many for a row",
                hint="use fewer seconds, or a lower rate",
            )

    @property
    def samples(self) -> int:
        """Of each channel of a row, where those are of one length."""
        return max(1, round(self.seconds * self.rate))


def _check(options: Audio, name: str, value: Any, least: float, most: float, kind: type[Any]) -> None:
    is_number = isinstance(value, kind) and not isinstance(value, bool) and isfinite(value)
    if not is_number or not least <= float(value) <= most:
        what = "a whole number" if kind is Integral else "a number"
        raise UsageError(
            f"{type(options).__name__}({name}={value!r}) cannot work",
            hint=f"use {what} from {least:g} to {most:,g}",
        )
