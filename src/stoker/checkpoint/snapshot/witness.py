"""Spot check of an overlapped copy: a second copy of a few pieces, taken at once, compared when it has ended.

Who writes past torch's counters (`.data`, numpy, a captured graph) while a copy runs mixes two moments. To
hash everything twice would cost what overlap saves; a comb of pieces that moves on with every save costs
two mebibytes. A write to a share f of the tensors is seen with 1 - (1 - f)^64, one that is repeated in every
save, to however little, at the latest when the comb has come by.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

_PIECES = 64
_PIECE_BYTES = 32 << 10


def comb(count: int, turn: int) -> list[int]:
    """Which of so many to look at this time: spread evenly, and all of them within count / 64 turns."""
    if count <= _PIECES:
        return list(range(count))
    tooth = -(-count // _PIECES)
    return list(range(turn % tooth, count, tooth))


def spots(tensors: Sequence[torch.Tensor], *, turn: int) -> list[torch.Tensor]:
    """Views of a few small pieces; the same for equal shapes and turns, on whichever rank."""
    chance = random.Random(turn)
    return [_corner(tensors[at], chance) for at in comb(len(tensors), turn)]


class Witness:
    """Some pieces of these tensors of the host as they are now."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, turn: int) -> None:
        self._places = comb(len(tensors), turn)
        self._live = spots(tensors, turn=turn)
        self._taken = [_as_bytes(one).clone() for one in self._live]
        self._differs: list[bool] = []

    def look(self) -> None:
        """Compare. By bytes: what is not a number equals nothing."""
        pairs = zip(self._live, self._taken, strict=True)
        self._differs = [bool(torch.ne(_as_bytes(live), taken).any()) for live, taken in pairs]
        self._live, self._taken = [], []

    def changed(self) -> int | None:
        """The first tensor that was another when it was looked at again."""
        for at, differs in zip(self._places, self._differs, strict=True):
            if differs:
                return at
        return None


def _corner(tensor: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """A view of a part that is small enough, wherever in the tensor."""
    for axis, length in enumerate(tensor.shape):
        if tensor.nbytes <= _PIECE_BYTES:
            break  # also where there is nothing in it
        some = max(1, _PIECE_BYTES // (tensor.nbytes // length))
        if some < length:
            tensor = tensor.narrow(axis, chance.randrange(length - some + 1), some)
    return tensor


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
