"""Near copies of images: candidates by parts of their hashes, each pair confirmed by its pixels.

Cut into k + 3 parts, two hashes that differ in at most k bits share three of them: every choice of three
parts is a key to sort by, so that all pairs are found, and tasks share the choices. A pair counts if its
hashes are that near, its sides have nearly one ratio, and its pixels correlate. Of images that were joined
the largest stays.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from stoker.prepare.copies import complete, read_list
from stoker.prepare.job import Job
from stoker.prepare.media.recipe import HASH_BITS
from stoker.prepare.media.spill import LOOK
from stoker.prepare.neardup import clusters, later_copies
from stoker.prepare.shuffle import KEYS, Table

Numbers = npt.NDArray[np.uint64]
Looks = npt.NDArray[np.void]  # rows of LOOK
_SHARED = 3  # parts that a bucket has in common: of a million hashes few share three by chance
_CORRELATED = 0.95  # of the grey pixels of two thumbs: scaled and encoded copies reach 0.99
_FLAT = 2.0  # grey levels: thumbs that deviate by less have a hash of noise, and are compared by their level
_RATIO = 0.05  # by which the sides' ratios may differ: scaled copies round
_AT_ONCE = 1 << 14  # pairs confirmed at once: their thumbs take 32 MB


def match_looks(job: Job, number: int) -> None:
    """Confirmed pairs whose hashes share this part; after the last part, equal contents."""
    assert job.plan.media
    if number >= job.plan.media.bands:
        _match_exactly(job, number - job.plan.media.bands)
        return
    looks, bits = _looks(job), job.plan.media.near_bits
    firsts, of_first = _first_of_each(looks["hash"])
    found = [np.zeros((0, 2), np.int64)]
    if number == 0:  # equal hashes share every part: one task compares them
        rows = np.flatnonzero(firsts[of_first] != np.arange(len(looks)))
        found.append(_confirmed(looks, np.stack([firsts[of_first][rows], rows], axis=1)))
    found.append(_confirmed(looks, firsts[near_pairs(looks["hash"][firsts], part=number, bits=bits)]))
    complete(job, "match", number, np.concatenate(found).astype(np.uint64), near=True)


def cluster_looks(job: Job, number: int) -> None:
    """All pairs joined: what goes, and how many images that stay had copies in another class."""
    assert job.plan.media
    lists = [read_list(job.drops("match", part)) for part in range(job.plan.media.bands)]
    rows, names = clusters(np.concatenate(lists).reshape(-1, 2))
    some = _looks(job)[rows.astype(np.int64)]
    pixels = some["width"].astype(np.int64) * some["height"]
    order = np.lexsort((some["location"], -pixels, names))
    stays = np.ones(len(rows), np.bool_)
    stays[1:] = names[order][1:] != names[order][:-1]
    labels = {(int(name), int(label)) for name, label in zip(names, some["label"], strict=True)}
    across = len(labels) - len(set(names.tolist()))
    complete(job, "cluster", number, np.sort(some["location"][order][~stays]), across_classes=across)


def copies_told(job: Job) -> dict[tuple[str, str], int]:
    """What a user should know of copies: samples that share their media and not their label or caption, and
    near copies that lay in several classes."""
    runs = job.runs(epoch=0)
    digests = np.concatenate([np.zeros((0, 2), np.uint64), *(_digests(run.table()) for run in runs)])
    media = np.unique(digests, axis=0)[:, 0]
    _, counts = np.unique(media, return_counts=True)
    told = {
        "same media, other label or caption": int(counts[counts > 1].sum()),
        "near copies in other classes": sum(one.get("across_classes", 0) for one in job.results("cluster")),
    }
    return {("copies", what): count for what, count in told.items() if count}


def _digests(table: Table) -> Numbers:
    return np.stack([table["high"], table["low"]], axis=1)


def near_pairs(values: Numbers, *, part: int, bits: int) -> npt.NDArray[np.int64]:
    """Places of pairs of hashes that differ in at most so many bits, among those that one task looks at."""
    found = [np.zeros((0, 2), np.int64)]
    for mask in _masks(bits)[part :: bits + 1]:
        shared = values & mask
        order = np.argsort(shared, kind="stable")
        shared, ordered = shared[order], values[order]
        ends, ones, distance = np.searchsorted(shared, shared, "right"), np.arange(len(values)), 1
        while len(ones := ones[ones + distance < ends[ones]]):
            near = ones[bit_count(ordered[ones] ^ ordered[ones + distance]) <= bits]
            found.append(np.stack([order[near], order[near + distance]], axis=1))
            distance += 1
    return np.unique(np.sort(np.concatenate(found), axis=1), axis=0)


def _masks(bits: int) -> list[np.uint64]:
    """Every three of `bits` + 3 parts of a hash: two hashes that are near share one of these choices."""
    bounds = [HASH_BITS * part // (bits + _SHARED) for part in range(bits + _SHARED + 1)]
    parts = [(1 << stop) - (1 << start) for start, stop in itertools.pairwise(bounds)]
    return [np.uint64(sum(three)) for three in itertools.combinations(parts, _SHARED)]


def bit_count(values: Numbers) -> npt.NDArray[np.int64]:
    """How many bits are set in each."""
    return np.asarray(_COUNTS[values.view(np.uint16).reshape(-1, 4)].sum(axis=1, dtype=np.int64))


_COUNTS = np.array([number.bit_count() for number in range(1 << 16)], np.uint8)


def _confirmed(looks: Looks, pairs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    kept = [np.zeros((0, 2), np.int64)]
    for start in range(0, len(pairs), _AT_ONCE):
        some = pairs[start : start + _AT_ONCE]
        kept.append(some[_alike(looks[some[:, 0]], looks[some[:, 1]])])
    return np.concatenate(kept)


def _alike(ones: Looks, others: Looks) -> npt.NDArray[np.bool_]:
    ratios = [np.log(side["width"] / side["height"]) for side in (ones, others)]
    flat = [side["thumb"].reshape(len(side), -1).astype(np.float32) for side in (ones, others)]
    levels = [side.mean(axis=1) for side in flat]
    spread = [side.std(axis=1) for side in flat]
    centred = [side - level[:, None] for side, level in zip(flat, levels, strict=True)]
    together = (centred[0] * centred[1]).mean(axis=1)
    correlated = together >= _CORRELATED * spread[0] * spread[1]
    are_flat = np.maximum(*spread) < _FLAT
    alike = np.where(are_flat, np.abs(levels[0] - levels[1]) < _FLAT, correlated & (np.minimum(*spread) > 0))
    return np.asarray(alike & (np.abs(ratios[0] - ratios[1]) <= _RATIO))


def _first_of_each(values: Numbers) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The rows that are the first of a hash, and for every row which of these it repeats."""
    _, firsts, which = np.unique(values, return_index=True, return_inverse=True)
    return firsts.astype(np.int64), which.astype(np.int64).ravel()


def _looks(job: Job) -> Looks:
    """What is known of every image, in the order of the sources."""
    paths = [
        job.spill(number).with_name(f"{job.spill(number).name}.looks")
        for number in range(job.plan.stages["map"])
    ]
    found = [np.fromfile(path, LOOK) for path in paths if path.exists()]
    return np.concatenate([np.zeros(0, LOOK), *found])


def _match_exactly(job: Job, part: int) -> None:
    """Without a shuffle copies do not meet by themselves."""
    low, high = (KEYS * (part + side) // job.plan.match_parts for side in (0, 1))
    values, places = [np.zeros((0, 2), np.uint64)], [np.zeros(0, np.uint64)]
    for run in job.runs(epoch=0):
        table = run.table()
        inside = (table["low"] >= np.uint64(low)) & (table["low"] <= np.uint64(high - 1))
        values.append(np.stack([table["low"][inside], table["high"][inside]], axis=1))
        places.append(table["location"][inside])
    assert job.plan.media
    found = later_copies(np.concatenate(values), np.concatenate(places))
    complete(job, "match", job.plan.media.bands + part, found, near=False)
