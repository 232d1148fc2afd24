"""`Video`: what is to be made of the video in each sample."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Annotated, Literal

from stoker.errors import UsageError
from stoker.load.media.image import Image, Three
from stoker.options import check_choices

NAME = "video"  # of the column
_MOST = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Video:
    """How video is decoded: which frames, which part of them, how large, and as what numbers. What is drawn
    for a sample is drawn from the loader's seed, the epoch and the sample: the same on any number of ranks
    and after a resume. All frames of a sample are cropped and mirrored alike."""

    frames: Annotated[int, "of what comes out; of a video with fewer, the last one is repeated"] = 16
    stride: Annotated[int, "every so many frames of the video, as it counts them"] = 1
    clip: Annotated[Literal["random", "center", "start"], "where in a video its frames begin"] = "random"
    size: Annotated[int, "pixels a side of what comes out"] = 224
    crop: Annotated[
        Literal["random", "center", "whole"],
        '"random", "center": as of `stoker.Image`; "whole": all of each frame in its own size, for '
        "`transform` or `collate`",
    ] = "random"
    scale: Annotated[tuple[float, float], 'of the area that a "random" crop takes'] = (0.08, 1.0)
    ratio: Annotated[tuple[float, float], 'of width to height of a "random" crop'] = (3 / 4, 4 / 3)
    flip: Annotated[bool, "mirror every other video"] = False
    resize: Annotated[int, 'the shorter side before a "center" crop; 0: 256 for 224, and so on'] = 0
    normalize: Annotated[
        str | tuple[Three, Three],
        '"imagenet", or mean and standard deviation of each channel, of values from 0 to 1; "": none',
    ] = ""
    dtype: Annotated[
        Literal["", "uint8", "float32", "f32", "float16", "f16", "bfloat16", "bf16"],
        'of the pixels; "": uint8, or float32 where they are normalised. Floats are made where they are to '
        "be used",
    ] = ""
    member: Annotated[str, 'which member of a sample, such as "mp4"; "": the one that is a video'] = ""
    on_corrupt: Annotated[
        Literal["", "raise", "skip", "replace"],
        'with a video that cannot be decoded. "skip": another sample of its batches stands in; "replace": it '
        'comes black, and `video_ok` is False; "": as the loader\'s',
    ] = ""
    max_pixels: Annotated[int, "a video whose frames have more is refused before they are decoded"] = (
        89_478_485
    )

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("frames", "stride"):
            value = getattr(self, name)
            is_whole = isinstance(value, Integral) and not isinstance(value, bool)
            if not is_whole or not 1 <= int(value) <= _MOST:
                raise UsageError(
                    f"Video({name}={value!r}) cannot work", hint=f"use a whole number from 1 to {_MOST:,}"
                )
        try:
            _ = self.image
        except UsageError as error:
            raise UsageError(str(error).replace("Image(", "Video("), hint=error.hint) from None

    @property
    def image(self) -> Image:
        """What is to be made of each frame."""
        return Image(
            size=self.size,
            crop=self.crop,
            scale=self.scale,
            ratio=self.ratio,
            flip=self.flip,
            resize=self.resize,
            normalize=self.normalize,
            dtype=self.dtype,
            max_pixels=self.max_pixels,
        )

    @property
    def span(self) -> int:
        """Frames of a video from the first that is taken to the last."""
        return (self.frames - 1) * self.stride + 1
