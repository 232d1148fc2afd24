"""Access order of files: which a node needs, and in which order they are to be brought near. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from stoker.load.ordering.blend import Blend
from stoker.load.ordering.draw import Key
from stoker.load.ordering.order import Order
from stoker.load.ordering.plan import Cursor
from stoker.load.ordering.rounds import Lanes
from stoker.load.ordering.spans import Cuttable, Elastic
from stoker.load.parts import Parts
from stoker.load.reading.dataset import Dataset
from stoker.manifest import Manifest, ShardRecord
from stoker.world import World

# Positions up to which the turn of each chunk is worked out, in some 0.5 s. Beyond that only the pools that
# chunks are dealt from are told apart: a budget that holds the shards of a pool needs no more.
_EXACT = 4 << 20
_AT_ONCE = 1024  # rows of each rank


def files_in_order(parts: Parts, dataset: Dataset, cursor: Cursor, world: World) -> list[str]:
    """The files that the ranks of a node read from a position on, as they come to them; a file that they come
    back to stands there again. What they have behind them goes last."""
    mine = [n for n, owner in enumerate(parts.datasets) if owner is dataset]
    turn = cursor.epoch % len(mine)  # a dataset may hold several epochs
    mine = mine[turn:] + mine[:turn]
    found: list[str] = []
    lanes = parts.lanes[0 if isinstance(parts.lanes[0], Blend) else mine[0]]
    if lanes.positions - cursor.position <= _EXACT:
        for number, first, stop in _chunks(lanes, cursor, world):
            if number in mine:
                _add(found, parts, number, first, stop)
    known, coarse = set(found), list[str]()
    for number in mine:
        for first, stop in _stretches(parts, number, cursor, world):
            _add(coarse, parts, number, first, stop)
    return found + [name for name in coarse if name not in known]


def _add(found: list[str], parts: Parts, number: int, first: int, stop: int) -> None:
    layout = parts.layouts[number]
    low, high = layout.shard_of(np.array([first, stop - 1])).tolist()
    for shard in layout.shards[low : high + 1]:
        found += [file.name for file in shard.files]


def _chunks(lanes: Elastic | Blend, cursor: Cursor, world: World) -> Iterator[Key]:
    """The chunks that a node's ranks read, in the order of their rows; each rank reads a chunk once."""
    first, step = world.rank - world.local_rank, world.size * _AT_ONCE
    if isinstance(lanes, Blend):  # shared out by whole global batches
        step = lanes.share.global_batch * max(1, _AT_ONCE // lanes.share.batch)
    ranks = range(first, min(world.size, first + world.local_size))
    seen: set[tuple[int, Key]] = set()
    for start in range(cursor.position, lanes.positions, step):
        coming: list[tuple[int, int, Key]] = []
        for rank in ranks:
            rows = range(start + rank, min(start + step, lanes.positions), world.size)
            if rows:
                draw = _of_rank(lanes, rank).deal(rows, epoch=cursor.epoch)
                chunks, turns = np.unique(draw.chunk, return_index=True)
                pairs = zip(turns.tolist(), (draw.keys[chunk] for chunk in chunks.tolist()), strict=True)
                coming += [(turn, rank, key) for turn, key in pairs if (rank, key) not in seen]
        for _, rank, key in sorted(coming):
            seen.add((rank, key))
            yield key


def _of_rank(lanes: Elastic | Blend, rank: int) -> Elastic | Blend:
    """As another rank has them: a blend shares rows out for the one that it was made for."""
    return replace(lanes, share=replace(lanes.share, rank=rank)) if isinstance(lanes, Blend) else lanes


def share_of(manifest: Manifest, *, node: int, nodes: int) -> list[str]:
    """The files that one of so many nodes reads, if all have as many ranks: its part of the samples. A shard
    of which that takes next to nothing is left out: a node whose part ends with a shard would else bring its
    neighbours for a few samples, since these are not quite tokens; `feed` reads those through the cache."""
    found = []
    for epoch in range(max(1, manifest.epochs)):
        shards = [shard for shard in manifest.shards if shard.epoch == epoch]
        total = sum(map(_weight, shards))
        low, high = total * node / nodes, total * (node + 1) / nodes
        little, at = (high - low) / 100, 0
        for shard in shards:
            overlap = min(at + _weight(shard), high) - max(at, low)
            if overlap > 0 and overlap >= min(little, _weight(shard) / 2):
                found += [file.name for file in shard.files]
            at += _weight(shard)
    return found


def _weight(shard: ShardRecord) -> int:
    return shard.tokens or shard.samples


def _stretches(parts: Parts, number: int, cursor: Cursor, world: World) -> list[tuple[int, int]]:
    """The stretches that a node's ranks read, as they come to them; those they have behind them go last."""
    order = parts.orders[number]
    if order.shuffle == "off":
        return [(cursor.position, order.samples), (0, max(1, cursor.position))]
    lanes, cursor, start = _lanes_at(parts, number, cursor)
    now = (cursor.position - start) // lanes.cut.lanes
    coming = []
    for lane in _lanes_of(lanes, world):
        size = lanes.lane_size(lane)
        for turns in (range(min(now, size), size), range(min(now, size))):
            found = lanes.stretches(lane, turns, epoch=cursor.epoch)
            coming += [(turn < now, turn, first, stop) for turn, first, stop in found]
    return [(first, stop) for _, _, first, stop in sorted(coming)]


def _lanes_at(parts: Parts, number: int, cursor: Cursor) -> tuple[Cuttable, Cursor, int]:
    """The lanes that a dataset is in, the cursor among its own samples, and where these lanes begin."""
    if isinstance(blend := parts.lanes[0], Blend):
        epoch, position = blend.reached(number, cursor.position, epoch=cursor.epoch)
        return parts.orders[number], Cursor(epoch=epoch, position=position), 0
    elastic = parts.lanes[number]
    assert isinstance(elastic, Elastic)
    start, lanes = elastic.at(cursor.position, epoch=cursor.epoch)
    return lanes, cursor, start


def _lanes_of(lanes: Lanes, world: World) -> list[int]:
    """The lanes that the ranks of a node read; one of each node's will do where those need the same."""
    first = world.rank - world.local_rank
    ranks = range(first, first + world.local_size)
    cut = lanes.cut
    read = [lane for lane in range(cut.lanes) if not cut.fits(world.size) or lane % world.size in ranks]
    return list({cut.node_of(lane): lane for lane in read}.values()) if isinstance(lanes, Order) else read
