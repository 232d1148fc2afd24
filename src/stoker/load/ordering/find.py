"""Where a sample comes: the order, read backwards. Every step of it is a permutation that can be undone."""

from __future__ import annotations

import numpy as np

from stoker.load.ordering.blend import Blend
from stoker.load.ordering.order import (
    _DEALT,
    _HAND,
    _HANDS,
    _INSIDE,
    _LISTED,
    _STRETCHES,
    _WITHIN,
    Order,
    _key,
    _listed,
    _NodeShare,
)
from stoker.load.ordering.rounds import Lanes, lanes_at
from stoker.load.ordering.spans import Cuttable, Elastic, Spans
from stoker.mixing import key_of, permutation, unpermuted


def positions_of(order: Elastic | Blend, dataset: int, sample: int, *, epoch: int) -> list[int]:
    """The positions of an epoch at which a sample comes: one, or of a blend any number."""
    if isinstance(order, Blend):
        return _in_blend(order, dataset, sample, epoch)
    return [_in_elastic(order, sample, epoch)]


def _in_elastic(order: Elastic, sample: int, epoch: int) -> int:
    """In the last of the lanes that an epoch was in which still had the sample before them."""
    stages = order.stages(epoch)
    place = _found(_root(stages[0][1]), sample, epoch)
    for begin, lanes in reversed(stages):
        here = lanes.place_of(*place) if isinstance(lanes, Spans) else place
        if here is not None:
            return begin + _position(lanes, *here, epoch)
    raise AssertionError(f"sample {sample} is in no lane")


def _in_blend(blend: Blend, dataset: int, sample: int, epoch: int) -> list[int]:
    order, begin = blend.orders[dataset], epoch * blend.samples
    first, stop = (blend.dealing.counts(at)[dataset] for at in (begin, begin + blend.samples))
    found = []
    for turn in range(first // order.samples, -(-stop // order.samples)):
        number = turn * order.samples + _position(order, *_found(order, sample, turn), turn)
        if first <= number < stop:
            found.append(_dealt(blend, dataset, number, range(begin, begin + blend.samples)) - begin)
    return found


def _dealt(blend: Blend, dataset: int, number: int, within: range) -> int:
    """The position at which a dataset comes for the number-th time."""
    low, high = within.start, within.stop  # before `low` it came at most so often, before `high` more often
    while high - low > 1:
        middle = (low + high) // 2
        few = blend.dealing.counts(middle)[dataset] <= number
        low, high = (middle, high) if few else (low, middle)
    return low


def _position(lanes: Lanes, lane: int, turn: int, epoch: int) -> int:
    if isinstance(lanes, Order) and lanes.shuffle == "off":
        return turn
    return turn * lanes.cut.lanes + lanes_at(lanes, turn, epoch=epoch).index(lane)


def _root(lanes: Cuttable) -> Cuttable:
    return lanes.root if isinstance(lanes, Spans) else lanes


def _found(lanes: Cuttable, sample: int, epoch: int) -> tuple[int, int]:
    """Lane and turn of a sample, in lanes that were never cut."""
    assert isinstance(lanes, Order)
    if lanes.shuffle == "off":
        return 0, sample
    for node in range(lanes.cut.nodes):
        share = lanes._share(node, epoch)
        samples = share.rest + share.rows * share.chunk * len(share.place)
        if share.first <= sample < share.first + samples:
            break
    lane, at = _in_share(lanes, share, sample)
    size, span = lanes.lane_size(lane), lanes.window * lanes.chunk
    number, inside = divmod(at, span)
    room = min(span, size - number * span)
    if lanes.shuffle == "full" and room > 1:
        key = key_of(key_of(lanes.seed, epoch, lane, _WITHIN), number)
        inside = int(np.flatnonzero(permutation(room, key) == inside)[0])
    return lane, (number * span + inside - share.phases[lane]) % size


def _in_share(order: Order, share: _NodeShare, sample: int) -> tuple[int, int]:
    """The lane that visits a sample, and how many samples it has visited before, windows in their order."""
    offset, rest = sample - share.first, share.gap * share.chunk
    if rest <= offset < rest + share.rest:
        for lane, first in share.pieces.items():
            if first <= sample < first + order.lane_size(lane) - share.rows * share.chunk:
                return lane, share.rows * share.chunk + sample - first
    place, inside = divmod(offset - (share.rest if offset >= rest else 0), share.chunk)
    lane, turn = _visit(share, (place - share.shift) % (share.rows * len(share.place)))
    return lane, turn * share.chunk + inside


def _visit(share: _NodeShare, chunk: int) -> tuple[int, int]:
    """The lane and turn that visit a chunk: `_NodeShare.visit`, backwards."""
    stratum, row = divmod(chunk, share.rows)
    pool, inside = divmod(row, share.stretch)
    whole = share.rows // share.stretch
    if whole > 1 and pool < whole:
        pool = _unpermuted(pool, whole, _key(share.key, _STRETCHES, stratum))
    lanes, rows = len(share.place), min(share.stretch, share.rows - pool * share.stretch)
    each = max(1, min(_HAND, rows // _HANDS))
    hand, number = divmod(_unpermuted(inside, rows, _key(share.key, _INSIDE, pool, stratum)), each)
    size = lanes * min(each, rows - hand * each)
    dealt = _unpermuted(number * lanes + stratum, size, _key(share.key, _DEALT, pool, hand))
    row, place = divmod(dealt, lanes)
    lane = next(lane for lane, at in share.place.items() if at == place)
    return lane, pool * share.stretch + hand * each + row


def _unpermuted(number: int, size: int, key: int) -> int:
    if size <= _LISTED:
        return int(np.flatnonzero(_listed(size, key) == number)[0])
    return unpermuted(number, size, key)
