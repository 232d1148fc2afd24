"""Megatron's indexed dataset: `NAME.bin` holds the tokens, `NAME.idx` the length and place of each.

The layout of the index, little-endian, as Megatron-LM and NeMo read it:

    9 bytes   b"MMIDIDX\\0\\0"
    u64       version, 1
    u8        code of the token type
    u64       number of sequences
    u64       number of document boundaries
    i32[]     tokens in each sequence
    i64[]     byte offset of each sequence in the .bin
    i64[]     index of the first sequence of each document, and the end
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from stoker.errors import BadShardError
from stoker.formats.sizes import counted

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_CODES: dict[int, np.dtype[Any]] = {
    code: np.dtype(kind)
    for code, kind in enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), start=1)
}

# Megatron's own rule: vocabularies under this many ids fit uint16 with room for its padding.
_UINT16_VOCABULARY = 65500


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronIndex:
    """Where each sequence of a `.bin` lies."""

    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def bin_bytes(self) -> int:
        return self.tokens * self.dtype.itemsize


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """uint16 where the vocabulary fits, int32 otherwise."""
    return np.dtype("<u2" if vocabulary < _UINT16_VOCABULARY else "<i4")


def index_bytes(lengths: npt.NDArray[np.integer[Any]], *, dtype: np.dtype[Any]) -> bytes:
    """The `.idx` of documents of these lengths, one sequence each, back to back in the `.bin`."""
    code = next(code for code, kind in _CODES.items() if kind == dtype)
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    starts = np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1]])
    return b"".join(
        (
            _HEADER.pack(_MAGIC, 1, code, len(lengths), len(lengths) + 1),
            lengths.astype("<i4").tobytes(),
            starts.astype("<i8").tobytes(),
            np.arange(len(lengths) + 1, dtype="<i8").tobytes(),
        )
    )


def read_dtype(path: Path) -> str:
    """The token type in the header of an `.idx`; of one that is none, what it says instead."""
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
    code = header[17] if len(header) == _HEADER.size else 0
    return _CODES[code].name if code in _CODES else f"code {code}"


def read_index(file: BinaryIO, *, name: str) -> MegatronIndex:
    """Parse an `.idx`; a torn or foreign one, or one that contradicts itself, raises BadShardError."""
    raw = file.read()
    try:
        magic, version, code, sequences, documents = _HEADER.unpack_from(raw)
    except struct.error:
        raise _bad(name, f"is {len(raw)} bytes, too short for a header") from None
    if magic != _MAGIC or version != 1 or code not in _CODES:
        raise _bad(
            name, f"does not start like a Megatron index (magic {magic!r}, version {version}, type {code})"
        )
    wanted = _HEADER.size + sequences * 12 + documents * 8
    if len(raw) != wanted:
        raise _bad(name, f"is {len(raw):,} bytes, its header says {wanted:,}")
    lengths = np.frombuffer(raw, "<i4", sequences, _HEADER.size)
    offsets = np.frombuffer(raw, "<i8", sequences, _HEADER.size + sequences * 4)
    starts = np.frombuffer(raw, "<i8", documents, _HEADER.size + sequences * 12)
    index = MegatronIndex(dtype=_CODES[code], lengths=lengths, offsets=offsets, documents=starts)
    _check(index, name)
    return index


def _check(index: MegatronIndex, name: str) -> None:
    """Its sequences must lie end to end from the first byte on, and its documents be made of all of them."""
    if index.dtype.kind not in "iu":
        raise _bad(name, f"describes numbers of type {index.dtype.name}, which are no token ids")
    if len(index.lengths) and (shortest := int(index.lengths.argmin())) >= 0 > index.lengths[shortest]:
        raise _bad(name, f"gives sequence {shortest:,} {index.lengths[shortest]:,} tokens")
    ends = np.cumsum(index.lengths, dtype=np.int64) * index.dtype.itemsize
    wrong = np.flatnonzero(index.offsets != np.concatenate([[0], ends])[: len(ends)])
    if len(wrong):
        where = int(wrong[0])
        raise _bad(
            name,
            f"puts sequence {where:,} at byte {index.offsets[where]:,}, which is not where the one "
            "before it ends",
        )
    documents = index.documents
    whole = len(documents) and documents[0] == 0 and documents[-1] == len(index.lengths)
    if not whole or (np.diff(documents) < 0).any():
        raise _bad(
            name, f"has documents that are not made of its {counted(len(index.lengths), 'sequence')} in order"
        )


def check_pair(index: MegatronIndex, *, bin_bytes: int, name: str) -> None:
    """The index must describe exactly the bytes of its `.bin`."""
    if index.bin_bytes != bin_bytes:
        raise _bad(name, f"describes {index.bin_bytes:,} bytes of tokens, the .bin holds {bin_bytes:,}")


def _bad(name: str, what: str) -> BadShardError:
    return BadShardError(f"{name} {what}", hint="restore the file from where it came, or prepare it again")
