"""Folded words: what of a text is compared where copies and contamination are looked for."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from itertools import chain
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

# Scripts that write no spaces: each character counts as a word where copies are compared.
_ALONE = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
# Vowel signs and the like of Indian scripts, which Python takes for no part of a word (the danda is none).
_SIGNS = r"\u0900-\u0963\u0966-\u0dff"
_FOLDED = re.compile(rf"[{_ALONE}]|(?:[^\W_{_ALONE}]|[{_SIGNS}])+")
_ACCENTS = re.compile(r"[\u0300-\u036f\u0483-\u0487\u0591-\u05bd\u064b-\u065f\u3099\u309a]")

Hashes = npt.NDArray[np.uint64]
_T = TypeVar("_T")


def folded_words(text: str) -> list[str]:
    """Lower case, no punctuation, no accents: what is left of a text when the differences that make no other
    document of it are gone. Numbers stay: with every number 0, as datatrove has it, all tables are copies of
    one another, all sums too, and each holds any evaluation set of them."""
    text = text.lower()
    if not text.isascii():
        text = unicodedata.normalize("NFC", _ACCENTS.sub("", unicodedata.normalize("NFKD", text)))
    return _FOLDED.findall(text)


def folded_hashes(text: str) -> Hashes:
    """A 64-bit hash of each folded word: `folded_words` piece by piece, since what stands between ASCII
    punctuation repeats, and what is known costs a third of the regular expression."""
    pieces = text.lower().encode(errors="replace").translate(_SPACED).split()
    if text.isascii():
        return np.fromiter(map(_HASH_OF.__getitem__, pieces), np.uint64, count=len(pieces))
    return np.fromiter(chain.from_iterable(map(_HASHES_OF.__getitem__, pieces)), np.uint64)


def _hashes(piece: bytes) -> tuple[int, ...]:
    if piece.isascii():
        return (xxhash.xxh3_64_intdigest(piece),)
    return tuple([_HASH_OF[word.encode()] for word in folded_words(piece.decode())])


class _Known(dict[bytes, _T]):
    """What was made of short pieces, a bounded number of them."""

    def __init__(self, make: Callable[[bytes], _T]) -> None:
        self._make = make

    def __missing__(self, piece: bytes) -> _T:
        made = self._make(piece)
        if len(piece) <= _SHORT:
            if len(self) >= _MOST:
                self.clear()
            self[piece] = made
        return made


_MOST, _SHORT = 1 << 17, 24
_SPACED = bytes(byte if byte >= 0x80 or chr(byte).isalnum() else 0x20 for byte in range(256))
_HASH_OF = _Known(xxhash.xxh3_64_intdigest)
_HASHES_OF = _Known(_hashes)
