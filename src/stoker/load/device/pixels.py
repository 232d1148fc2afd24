"""Pixels to floats, where they are used: bytes cross to a card, and what is made of them there takes four
times the room. Plain operations of torch on the stream of whoever asks, the same on every device."""

from __future__ import annotations

from typing import Any

import torch

from stoker.load.assembly.rows import Batch
from stoker.load.device.crops import as_numbers
from stoker.load.device.streams import as_tensor
from stoker.load.media.image import Image
from stoker.load.media.images import IS_OK, LABEL, check_label, check_left_alone
from stoker.load.media.mixing import BOX, OTHER, WEIGHT


def as_asked(batch: Any, columns: dict[str, Image], *, are_numbers: bool = False) -> Any:
    """A batch of tensors with its images as they were asked for: [rows, channels, height, width] over memory
    that has the channels last, videos [rows, frames, channels, height, width]. `are_numbers`: a card has made
    them of the type that was asked for, and normalised them."""
    if not isinstance(batch, dict):
        return batch
    made: Batch = dict(batch)
    for name, image in columns.items():
        pixels: Any = made.get(name)
        if isinstance(pixels, list) and image.crop == "whole":  # each in its own size
            made[name] = [_floats(name, as_tensor(one), image) for one in pixels]
            continue
        made[name] = pixels.movedim(-1, -3) if are_numbers else _floats(name, pixels, image)
        if image.mixes:
            made[name] = _mixed(made[name], made)
    return _with_others(made)


def _floats(name: str, pixels: Any, image: Image) -> Any:
    """Pixels of [..., height, width, 3], or what a transform made of them, which is theirs."""
    wanted: torch.dtype = getattr(torch, image.number)
    is_picture = isinstance(pixels, torch.Tensor) and pixels.ndim in (3, 4, 5) and pixels.shape[-1] == 3
    if wanted == torch.uint8 or not is_picture or pixels.dtype != torch.uint8:
        check_left_alone(name, image, pixels)
        return pixels.movedim(-1, -3) if is_picture else pixels
    return as_numbers(pixels, image).movedim(-1, -3)


def _mixed(pixels: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Each image with the one before it: by its weight, or where its box lies."""
    other, box = pixels.roll(1, 0), batch[BOX]
    rows = torch.arange(pixels.shape[2], device=pixels.device).view(1, -1, 1)
    across = torch.arange(pixels.shape[3], device=pixels.device).view(1, 1, -1)
    top, left, bottom, right = (box[:, n].view(-1, 1, 1) for n in range(4))
    is_other = ((rows >= top) & (rows < bottom) & (across >= left) & (across < right))[:, None]
    is_cut = (box[:, 2] > box[:, 0]).view(-1, 1, 1, 1)
    weight = batch[WEIGHT].view(-1, 1, 1, 1)
    blended = (pixels * weight + other * (1 - weight)).to(pixels.dtype)
    return torch.where(is_cut, torch.where(is_other, other, pixels), blended).contiguous(
        memory_format=torch.channels_last
    )


def _with_others(batch: Batch) -> Batch:
    """The label of what each image was mixed with; the box has been used."""
    if BOX not in batch:
        return batch
    check_label(batch.get(LABEL), torch.Tensor)
    if IS_OK in batch:  # one that is mixed with a black one is not whole either
        batch[IS_OK] = batch[IS_OK] & batch[IS_OK].roll(1, 0)
    rest = {name: one for name, one in batch.items() if name != BOX}
    return {**rest, OTHER: batch[LABEL].roll(1, 0)}
