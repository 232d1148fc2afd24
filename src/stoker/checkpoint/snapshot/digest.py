"""Tensor digests, taken where tensors lie: equal for equal bytes. To compare, not to keep."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
import xxhash

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_AT_ONCE = 4 << 20  # elements: what a card needs beside the tensor is 32 MiB and a few times that
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # the golden ratio's bits, as a signed number
_MIX = 0x2545F4914F6CDD1D


def digests(tensors: Iterable[torch.Tensor]) -> list[int]:
    """A digest of each tensor's bytes in the order of its elements. On a card the card computes them, after
    what the loop has asked of it, and they come over together."""
    found: list[int | torch.Tensor] = []
    for tensor in tensors:
        tensor = tensor.detach()
        found.append(card_digest(tensor) if tensor.is_cuda else _in_memory(tensor.contiguous()))
    by_device: dict[torch.device, list[int]] = {}
    for at, one in enumerate(found):
        if isinstance(one, torch.Tensor):
            by_device.setdefault(one.device, []).append(at)
    for places in by_device.values():
        numbers = torch.stack([one for at in places if isinstance(one := found[at], torch.Tensor)]).tolist()
        for at, number in zip(places, numbers, strict=True):
            found[at] = number
    return [int(one) & 0xFFFFFFFFFFFFFFFF for one in found]


def _in_memory(tensor: torch.Tensor) -> int:
    if not tensor.nbytes:
        return 0
    return xxhash.xxh3_64_intdigest((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def card_digest(tensor: torch.Tensor) -> torch.Tensor:
    """A sum of mixed words, each with its place: sums of whole numbers do not depend on their order. Made of
    what every device of torch can do."""
    words = tensor.reshape(-1)
    words = words.view(_WORDS[words.element_size()]) if words.numel() else words.view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _AT_ONCE):
        some = words[start : start + _AT_ONCE].to(torch.int64)
        some = some + torch.arange(start + 1, start + 1 + len(some), device=some.device) * _ODD
        some = (some ^ (some >> 29)) * _MIX
        total = total + (some ^ (some >> 32)).sum()
    return total
