"""Crops of images that lie decoded in a device's memory: in one kernel where Triton is, else image by image
with torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stoker.load.device.streams import Device
from stoker.load.media.boxes import REVERSED_ACROSS, REVERSED_DOWN, SWAPPED, Crop
from stoker.load.media.image import Image

_NUMBERS = 12  # of an image in `Cuts.whole`
_LEVELS = 255


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """An image in memory: three planes of bytes, one behind the other."""

    at: int
    width: int
    height: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """What to cut out of which image: [images] and rows of numbers for each.

    `whole`: the row it goes to, width, height, what may be looked at (left, top, right, bottom), whether to
    turn it over its diagonal, to reverse its rows, its columns, and to mirror what comes out.
    """

    at: npt.NDArray[np.int64]
    whole: npt.NDArray[np.int32]
    boxes: npt.NDArray[np.float32]


def cuts_of(places: Sequence[Place], crops: Sequence[Crop], rows: Sequence[int]) -> Cuts:
    whole = np.zeros((len(places), _NUMBERS), np.int32)
    for number, (place, crop, row) in enumerate(zip(places, crops, rows, strict=True)):
        turn = crop.turn
        ways = turn in SWAPPED, turn in REVERSED_DOWN, turn in REVERSED_ACROSS, crop.mirrored
        whole[number, :11] = row, place.width, place.height, *crop.clip, *ways
    return Cuts(
        at=np.array([place.at for place in places], np.int64),
        whole=whole,
        boxes=np.array([crop.box for crop in crops], np.float32),
    )


def put_crops(device: Device, arena: torch.Tensor, cuts: Cuts, out: torch.Tensor, image: Image) -> None:
    """Crops into rows of `out`, [rows, side, side, 3], as bytes or as the numbers that were asked for."""
    if (kernel := _kernel()) and device.is_cuda:
        parts = [
            one.reshape(-1).view(np.uint8) for one in (cuts.whole, cuts.boxes, cuts.at)
        ]  # each begins even
        whole, boxes, at = torch.split(device.sent(np.concatenate(parts)), [len(part) for part in parts])
        kernel.crop(
            arena,
            at.view(torch.int64),
            whole.view(torch.int32),
            boxes.view(torch.float32),
            out,
            scaling_of(image),
        )
        return
    for at, whole, box in zip(cuts.at.tolist(), cuts.whole.tolist(), cuts.boxes.tolist(), strict=True):
        row, width, height, left, top, right, bottom, is_swapped, down, across, mirrored, _ = whole
        planes = arena[at : at + 3 * width * height].view(3, height, width)[:, top:bottom, left:right]
        here = box[0] - left, box[1] - top, box[2] - left, box[3] - top
        pixels = _resized(planes.float(), here, out.shape[1]).add_(0.5).floor_()
        pixels = pixels.flip([n for n, is_so in ((1, down), (2, across)) if is_so])
        pixels = pixels.transpose(1, 2) if is_swapped else pixels
        pixels = pixels.flip([2]) if mirrored else pixels
        out[row] = as_numbers(pixels.movedim(0, -1), image)


def cropped_by() -> str:
    return "one Triton kernel" if _kernel() else "torch, image by image, for want of triton"


def as_numbers(pixels: torch.Tensor, image: Image) -> torch.Tensor:
    """Levels from 0 to 255, channels last, as the numbers that were asked for."""
    wanted: torch.dtype = getattr(torch, image.number)
    if wanted == torch.uint8:
        return pixels.to(wanted)
    floats = pixels.to(torch.float32).div_(_LEVELS) if pixels.dtype == torch.uint8 else pixels / _LEVELS
    if image.mean_and_std:
        mean, std = (floats.new_tensor(three) for three in image.mean_and_std)
        floats.sub_(mean).div_(std)
    return floats.to(wanted)


def scaling_of(image: Image) -> tuple[float, ...]:
    """Means and deviations of values from 0 to 1."""
    mean, std = image.mean_and_std or ((0.0,) * 3, (1.0,) * 3)
    return (*mean, *std)


def _resized(planes: torch.Tensor, box: tuple[float, float, float, float], side: int) -> torch.Tensor:
    """A box of three planes as a square, by a triangle as wide as a pixel of it."""
    down = _weights(box[1], box[3], planes.shape[1], side, planes)
    across = _weights(box[0], box[2], planes.shape[2], side, planes)
    return torch.einsum("yh,chw,xw->cyx", down, planes, across)


def _weights(begin: float, end: float, size: int, side: int, like: torch.Tensor) -> torch.Tensor:
    """How much of each of `size` pixels is in each of `side`."""
    by = (end - begin) / side
    wide = max(by, 1.0)
    centres = begin + (torch.arange(side, device=like.device) + 0.5) * by
    far = (torch.arange(size, device=like.device) + 0.5 - centres[:, None]).abs() / wide
    weights = (1 - far).clamp_(min=0).to(like.dtype)
    return weights / weights.sum(1, keepdim=True)


@cache
def _kernel() -> Any:
    try:
        from stoker.load.device import kernel  # the home of triton
    except ImportError:
        return None
    return kernel
