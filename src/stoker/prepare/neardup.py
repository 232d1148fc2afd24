"""Near-duplicate detection: MinHash signatures over n-grams of folded words, compared band by band (LSH).

Documents that agree in a whole band are candidates; the true similarity of their n-grams confirms a pair,
and pairs that share a document are one cluster, of which one stays. Signatures are computed with a few numpy
operations per hash function for all documents of a run at once, because a Python loop over n-grams costs
more than the tokenising.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.errors import UsageError
from stoker.mixing import mixed
from stoker.prepare.shuffle import Table

HASHES = 112  # as many hash functions as datatrove takes
SHINGLE = 5  # words
_FOUND = 0.99  # of the pairs at the threshold, so many at least are candidates
_NEIGHBOURS = 8  # with which a document is compared in a band where many agree, beside the first of them
_BLOCK = 1 << 18  # shingles per round: every array of a round stays in the second-level cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Sketch:
    """How many bands of how many hashes, and the similarity that makes documents copies."""

    bands: int
    rows: int
    threshold: float = 0.8


def choose_sketch(threshold: float) -> Sketch:
    """The longest bands with which pairs at the threshold are still found: what else they let through is
    sorted out by the true similarity."""
    if not 0.0 < threshold < 1.0:
        raise UsageError(
            f"near-duplicate threshold {threshold} is not a similarity",
            hint="use a number between 0 and 1; 0.8 drops documents that share most of their 5-grams",
        )
    found = {r: 1 - (1 - threshold**r) ** (HASHES // r) for r in range(1, 33)}
    rows = max((r for r, chance in found.items() if chance >= _FOUND), default=1)
    return Sketch(bands=HASHES // rows, rows=rows, threshold=threshold)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sketches:
    """What copies of documents are told by."""

    bands: npt.NDArray[np.uint64]  # a value for each band and document: rows are bands
    shingles: npt.NDArray[np.uint32]  # the distinct ones of each document, sorted, back to back
    counts: npt.NDArray[np.uint32]  # how many those are

    def sets(self) -> list[npt.NDArray[np.uint32]]:
        """The distinct shingles of each document."""
        ends = np.cumsum(self.counts, dtype=np.int64)
        pairs = zip((ends - self.counts).tolist(), ends.tolist(), strict=True)
        return [self.shingles[start:end] for start, end in pairs]


def sketches(words: npt.NDArray[np.uint64], table: Table, sketch: Sketch) -> Sketches:
    """Of documents that are hashes of words, those of one behind those of another."""
    signatures = np.empty((sketch.bands * sketch.rows, len(table)), np.uint32)
    sets, counts = [np.zeros(0, np.uint32)], np.zeros(len(table), np.uint32)
    for first, last in _document_blocks(table):
        shingles, starts = _shingles(words, table[first:last])
        signatures[:, first:last] = _signatures(shingles, starts, len(signatures))
        distinct, counts[first:last] = _distinct(shingles, starts)
        sets.append(distinct)
    return Sketches(bands=_banded(signatures, sketch), shingles=np.concatenate(sets), counts=counts)


def _banded(signatures: npt.NDArray[np.uint32], sketch: Sketch) -> npt.NDArray[np.uint64]:
    values = np.empty((sketch.bands, signatures.shape[1]), np.uint64)
    for band in range(sketch.bands):
        value = np.full(signatures.shape[1], band, np.uint64)
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


def _signatures(
    shingles: npt.NDArray[np.uint32], starts: npt.NDArray[np.intp], count: int
) -> npt.NDArray[np.uint32]:
    """The minimum of each hash function over each document's shingles."""
    minima = np.empty((count, len(starts)), np.uint32)
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


def _distinct(
    shingles: npt.NDArray[np.uint32], starts: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """The distinct shingles of each document, sorted, and how many there are: one sort for all documents."""
    counts = np.diff(starts, append=len(shingles))
    document = np.repeat(np.arange(len(starts), dtype=np.uint64) << np.uint64(32), counts)
    ordered = np.sort(document | shingles)
    first = np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]
    distinct = ordered[first]
    found = np.bincount((distinct >> np.uint64(32)).astype(np.int64), minlength=len(starts))
    return distinct.astype(np.uint32), found


def similarity(one: npt.NDArray[np.uint32], other: npt.NDArray[np.uint32]) -> float:
    """Jaccard's index of two sorted sets."""
    if min(len(one), len(other)) == 0:
        return 0.0
    both = np.concatenate([one, other])
    both.sort()
    shared = int((both[1:] == both[:-1]).sum())
    return shared / (len(both) - shared)


def candidates(values: npt.NDArray[np.uint64], rows: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Pairs of rows whose value is the same: each with the first that has it and with its next neighbours, so
    that a page which a crawl holds a million times makes millions of pairs and not their square."""
    order = np.lexsort((rows, values))
    values, rows = values[order], rows[order]
    first = rows[np.searchsorted(values, values)]
    pairs = [np.stack([first, rows], axis=1)[first != rows]]
    for ahead in range(1, _NEIGHBOURS + 1):
        same = values[ahead:] == values[:-ahead]
        pairs.append(np.stack([rows[:-ahead][same], rows[ahead:][same]], axis=1))
    return distinct_pairs(np.concatenate(pairs))


def distinct_pairs(pairs: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """In their order. `np.unique` over rows compares them byte by byte, which takes longer."""
    ordered = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    repeated = (ordered[1:] == ordered[:-1]).all(axis=1)
    distinct: npt.NDArray[np.uint64] = ordered[np.append(True, ~repeated)[: len(ordered)]]
    return distinct


def clusters(pairs: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """(the rows that stand in a pair, a number for each that those of one cluster share): union-find."""
    rows, flat = np.unique(pairs, return_inverse=True)
    parents = list(range(len(rows)))

    def root(node: int) -> int:
        while parents[node] != node:
            parents[node] = node = parents[parents[node]]
        return node

    for one, other in flat.reshape(-1, 2).tolist():
        a, b = root(one), root(other)
        parents[max(a, b)] = min(a, b)
    return rows, np.array([root(node) for node in range(len(rows))], np.int64)


def later_copies(values: npt.NDArray[np.uint64], places: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The places of documents whose value stands at an earlier place too. Values may have columns."""
    columns = values.reshape(len(values), -1) if len(values) else values.reshape(0, 1)
    order = np.lexsort((places, *columns.T))
    ordered = columns[order]
    repeated = (ordered[1:] == ordered[:-1]).all(axis=1)
    return np.unique(places[order][1:][repeated])
