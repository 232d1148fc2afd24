"""Pixels to floats, where they are used: bytes cross to a card, and what is made of them there takes four
times the room. Plain operations of torch on the stream of whoever asks, the same on every device."""

from __future__ import annotations

from typing import Any

import torch

from stoker.errors import UsageError
from stoker.load.assembly.rows import Batch
from stoker.load.media.image import Image
from stoker.load.media.images import LABEL
from stoker.load.media.mixing import BOX, OTHER, WEIGHT


def as_asked(batch: Any, columns: dict[str, Image]) -> Any:
    """A batch of tensors with its images as they were asked for: [rows, channels, height, width] over memory
    that has the channels last."""
    if not isinstance(batch, dict):
        return batch
    made: Batch = dict(batch)
    for name, image in columns.items():
        pixels = made.get(name)
        if not isinstance(pixels, torch.Tensor) or pixels.ndim != 4 or pixels.shape[-1] != 3:
            _check_left_alone(name, image, pixels)
            continue
        made[name] = _floats(pixels.permute(0, 3, 1, 2), image)
        if image.mixes:
            made[name] = _mixed(made[name], made)
    return _with_others(made)


def _floats(pixels: torch.Tensor, image: Image) -> torch.Tensor:
    wanted: torch.dtype = getattr(torch, image.number)
    if pixels.dtype != torch.uint8 or wanted == torch.uint8:
        return pixels  # a transform's own numbers, or the bytes that were asked for
    floats = pixels.to(torch.float32).div_(255)
    if image.mean_and_std:
        mean, std = (floats.new_tensor(three).view(1, 3, 1, 1) for three in image.mean_and_std)
        floats.sub_(mean).div_(std)
    return floats.to(wanted)


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
    labels = batch.get(LABEL)
    if not isinstance(labels, torch.Tensor):
        raise UsageError(
            f"mixed images need a label each, and batches have no numbers in {LABEL!r}",
            hint="use samples with a member `cls`, or leave mixup and cutmix out",
        )
    return {**{name: one for name, one in batch.items() if name != BOX}, OTHER: labels.roll(1, 0)}


def _check_left_alone(name: str, image: Image, found: Any) -> None:
    """What a transform or a collate made instead is theirs; what was asked for of pixels cannot be done."""
    if image.number == "uint8" or image.crop == "whole":
        return
    raise UsageError(
        f"normalize=, dtype= and mixing have nothing to work on: {name!r} is "
        f"{f'{tuple(found.shape)}' if hasattr(found, 'shape') else type(found).__name__} after `transform` "
        "or `collate`, not bytes of [rows, height, width, 3]",
        hint="let them leave the pixels as they are, or leave those options out",
    )
