"""Near-duplicate detection: MinHash signatures over token n-grams, compared band by band (LSH).

A document is dropped when an earlier one agrees with it in a whole band. The signature is computed on
the token ids with a few numpy operations per hash function for all documents of a run at once, because
a Python loop over n-grams costs more than the tokenising.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.errors import UsageError
from stoker.mixing import mixed
from stoker.prepare.shuffle import Table

HASHES = 112  # as many hash functions as datatrove takes: 14 bands of 8 at the usual threshold
SHINGLE = 5  # tokens
_BLOCK = 1 << 18  # shingles per round: every array of a round stays in the second-level cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Sketch:
    """How many bands of how many hashes; documents this similar agree in a band half of the time."""

    bands: int
    rows: int


def choose_sketch(threshold: float) -> Sketch:
    """Bands and rows whose collision curve is steepest nearest to the threshold, (1 / bands)^(1 / rows)."""
    if not 0.0 < threshold < 1.0:
        raise UsageError(
            f"near-duplicate threshold {threshold} is not a similarity",
            hint="use a number between 0 and 1; 0.8 drops documents that share most of their 5-grams",
        )
    rows = min(range(2, 33), key=lambda r: abs((r / HASHES) ** (1 / r) - threshold))
    return Sketch(bands=HASHES // rows, rows=rows)


def bands(tokens: npt.NDArray[Any], table: Table, sketch: Sketch) -> npt.NDArray[np.uint64]:
    """One 64-bit value per band and document; rows of the result are bands."""
    signatures = np.empty((sketch.bands * sketch.rows, len(table)), np.uint32)
    for first, last in _document_blocks(table):
        signatures[:, first:last] = _signatures(tokens, table[first:last], len(signatures))
    values = np.empty((sketch.bands, len(table)), np.uint64)
    for band in range(sketch.bands):
        value = np.full(len(table), band, np.uint64)
        for row in signatures[band * sketch.rows : (band + 1) * sketch.rows]:
            value = mixed(value ^ row)
        values[band] = value
    return values


def _document_blocks(table: Table) -> list[tuple[int, int]]:
    """Runs of documents of about _BLOCK shingles."""
    ends = np.cumsum(table["tokens"], dtype=np.int64)
    blocks, first = [], 0
    while first < len(table):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + _BLOCK)))
        blocks.append((first, last))
        first = last
    return blocks


def _signatures(tokens: npt.NDArray[Any], table: Table, count: int) -> npt.NDArray[np.uint32]:
    """The minimum of each hash function over each document's shingles."""
    shingles, starts = _shingles(tokens, table)
    minima = np.empty((count, len(table)), np.uint32)
    scratch = np.empty_like(shingles)
    for number, (factor, offset) in enumerate(_functions(count)):
        np.multiply(shingles, factor, out=scratch)
        scratch += offset
        np.minimum.reduceat(scratch, starts, out=minima[number])
    return minima


def _shingles(tokens: npt.NDArray[Any], table: Table) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.intp]]:
    """A 32-bit hash of each run of SHINGLE tokens, document by document, and where documents start.

    A document shorter than a shingle counts as one: the hash of what it has.
    """
    first = int(table["start"][0])
    lengths = table["tokens"].astype(np.int64)
    flat = tokens[first : first + int(lengths.sum())].astype(np.uint64)
    padded = np.concatenate([flat, np.zeros(SHINGLE, np.uint64)])
    document_ends = np.repeat(np.cumsum(lengths), lengths)
    hashes = np.zeros(len(flat), np.uint64)
    for ahead in range(SHINGLE):
        inside = (np.arange(ahead, ahead + len(flat)) < document_ends).astype(np.uint64)
        hashes = mixed(hashes ^ (padded[ahead : ahead + len(flat)] + np.uint64(1)) * inside)
    counts = np.maximum(lengths - SHINGLE + 1, 1)
    begins = np.cumsum(lengths) - lengths
    whole = np.concatenate([hashes, np.zeros(1, np.uint64)])  # an empty document at the end points past
    starts = np.cumsum(counts) - counts
    chosen = np.repeat(begins - starts, counts) + np.arange(int(counts.sum()))
    return (whole[chosen] >> np.uint64(32)).astype(np.uint32), starts.astype(np.intp)


def _functions(count: int) -> list[tuple[np.uint32, np.uint32]]:
    """Odd factors and offsets: each pair is a permutation of the 32-bit numbers."""
    numbers = mixed(np.arange(2 * count, dtype=np.uint64))
    factors = (numbers[:count] >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
    offsets = (numbers[count:] >> np.uint64(32)).astype(np.uint32)
    return list(zip(factors, offsets, strict=True))


def later_copies(values: npt.NDArray[np.uint64], places: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The places of documents whose value stands at an earlier place too. Values may have columns."""
    columns = values.reshape(len(values), -1)
    order = np.lexsort((places, *columns.T))
    ordered = columns[order]
    repeated = (ordered[1:] == ordered[:-1]).all(axis=1)
    return np.unique(places[order][1:][repeated])
