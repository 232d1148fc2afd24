"""Which files a node needs, and in which order: what is to be brought near first. Pure."""

from __future__ import annotations

import math

import numpy as np

from stoker.load.parts import Parts
from stoker.manifest import Manifest, ShardRecord
from stoker.ordering.order import Order
from stoker.ordering.plan import Cursor
from stoker.reading.dataset import Dataset
from stoker.world import World


def files_in_order(parts: Parts, dataset: Dataset, cursor: Cursor, world: World) -> list[str]:
    """The files that the ranks of a node read from a position on, as they come to them."""
    found: dict[str, None] = {}
    mine = [n for n, owner in enumerate(parts.datasets) if owner is dataset]
    turn = cursor.epoch % len(mine)  # a dataset may hold several epochs
    for number in mine[turn:] + mine[:turn]:
        layout = parts.layouts[number]
        for first, stop in _stretches(parts.orders[number], cursor, world):
            low, high = layout.shard_of(np.array([first, stop - 1])).tolist()
            for shard in layout.shards[low : high + 1]:
                found.update(dict.fromkeys(file.name for file in shard.files))
    return list(found)


def share_of(manifest: Manifest, *, node: int, nodes: int) -> list[str]:
    """The files that one of so many nodes reads, if all have as many ranks: its part of the samples, and
    whatever shards that begins and ends in."""
    found = []
    for epoch in range(max(1, manifest.epochs)):
        shards = [shard for shard in manifest.shards if shard.epoch == epoch]
        total = sum(map(_weight, shards))
        low, high = total * node / nodes, total * (node + 1) / nodes
        # samples are not quite tokens: the end of a shard that fills no window is left out of them
        slack, at = (high - low) / 100, 0
        for shard in shards:
            if at + _weight(shard) > low - slack and at < high + slack:
                found += [file.name for file in shard.files]
            at += _weight(shard)
    return found


def _weight(shard: ShardRecord) -> int:
    return shard.tokens or shard.samples


def _stretches(order: Order, cursor: Cursor, world: World) -> list[tuple[int, int]]:
    """The stretches that a node's ranks read, as they come to them; those they have behind them go last."""
    if order.shuffle == "off":
        return [(cursor.position, order.samples), (0, max(1, cursor.position))]
    now = cursor.position // order.lanes
    coming = [
        (turns.stop <= now, turns.start, first, stop)
        for lane in _lanes(order.lanes, world)
        for turns, first, stop in order.stretches(lane, epoch=cursor.epoch)
    ]
    return [(first, stop) for _, _, first, stop in sorted(coming)]


def _lanes(lanes: int, world: World) -> list[int]:
    """The lanes that the ranks of a node read."""
    first = world.rank - world.local_rank
    apart = math.gcd(lanes, world.size)
    residues = {rank % apart for rank in range(first, first + world.local_size)}
    return [lane for lane in range(lanes) if lane % apart in residues]
