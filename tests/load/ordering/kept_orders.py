"""Orders, position by position: a cursor that was saved must lead to the same samples in every later version.

    PYTHONPATH=tests python tests/load/ordering/kept_orders.py

writes `kept/` anew. Jobs that go on with the new version then see other samples: it wants a line in
CHANGELOG.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kept_values import keep
from stoker.load.ordering.blend import dealing_of, make_blend
from stoker.load.ordering.cut import Cut
from stoker.load.ordering.order import Order
from stoker.load.ordering.plan import BestFitPlanner, Cursor, FixedPlanner, Sorted
from stoker.load.ordering.rounds import Share, lanes_at, lanes_of
from stoker.load.ordering.spans import Elastic

KEPT = Path(__file__).parent / "kept"
_ORDERS = {
    "as it comes": Order(samples=1_000_000),
    "small": Order(samples=500),
    "seeded": Order(samples=300_000, seed=7, chunk=64, stretch=16),
    "windows": Order(samples=300_000, seed=7, chunk=32, window=8),
    "of blocks": Order(samples=100_000, chunk=16, shuffle="blocks"),
    "of two nodes": Order(samples=200_000, chunk=8, cut=Cut.for_world(16, 2), seed=3),
    "of five ranks": Order(samples=200_001, chunk=8, cut=Cut.for_world(5, 1), seed=3),
}


def _lengths(drawn):
    return drawn.sample * 7919 % 501 + 1


def _some(size):
    return sorted(int(at) for at in np.random.default_rng(size).integers(0, size, 12))


def of_order(name):
    order = _ORDERS[name]
    found = {"chunk": order.chunk, "lanes": order.lanes, "lanes at 3": lanes_at(order, 3, epoch=1)}
    for epoch in (0, 3):
        rows = [order.draw(range(at, at + 1), epoch=epoch) for at in _some(order.positions)]
        found[f"samples {epoch}"] = [int(row.sample[0]) for row in rows]
        found[f"chunks {epoch}"] = [row.keys[0] for row in rows]
        found[f"lanes {epoch}"] = lanes_of(order, range(48, 72), epoch=epoch)
        ranks = order.cut.ranks if order.cut.ranks > 1 else 4
        found[f"dealt {epoch}"] = order.deal(
            Share(rank=1, world=ranks, batch=2).rows(0, 10), epoch=epoch
        ).sample
        found[f"needed {epoch}"] = list(order.stretches(1, range(5, 90), epoch=epoch))[:12]
    return found


def gone_on():
    """Cut anew on the way, twice."""
    order = _ORDERS["of five ranks"]
    cut = order.cut.resumed(4, 1, epoch=0, position=1000).resumed(3, 1, epoch=0, position=90_000)
    lanes = Elastic(order, cut)
    return {
        "cut": cut.as_state(),
        "samples": lanes.draw(range(999, 200_000, 7001), epoch=0).sample,
        "dealt": lanes.deal(Share(rank=2, world=3, batch=4).rows(90_000, 5), epoch=0).sample,
        "next": lanes.draw(range(0, 200_000, 17_001), epoch=1).sample,
        "later": cut.later(7, 1, epoch=0).as_state(),
    }


def blended():
    orders = (_ORDERS["small"], _ORDERS["seeded"], _ORDERS["windows"])
    shares = [Share(rank=rank, world=4, batch=3) for rank in range(4)]
    blends = [make_blend(orders, dealing_of((1.0, 3.0, 2.5)), share=share) for share in shares]
    drawn = blends[0].draw(range(700, 740), epoch=1)
    dealt = [blend.deal(share.rows(0, 4), epoch=0) for blend, share in zip(blends, shares, strict=True)]
    return {
        "datasets": drawn.dataset,
        "samples": drawn.sample,
        "laps": drawn.laps,
        "dealt": [one.sample for one in dealt],
        "read": [blend.read_factor for blend in blends],
        "reached": [blends[0].reached(which, 5000, epoch=1) for which in range(3)],
    }


def planned():
    order = Elastic(_ORDERS["seeded"], _ORDERS["seeded"].cut)
    share = Share(rank=1, world=2, batch=4)
    fixed = FixedPlanner(order, share).epoch(Cursor(epoch=1, position=4000), group=lambda: 2)
    sizes = Sorted(order, _lengths, seed=5)
    best = BestFitPlanner(order, share, seq_len=512, lengths=_lengths, seed=5)
    tasks = [next(fixed) for _ in range(3)]
    (first, *_), (second, *_) = (_tasks(best, 3), _tasks(best, 1, Cursor(position=4096, row=17)))
    long = _tasks(best, 600)[-1]
    return {
        "fixed": [(task.draw.sample, list(task.after)) for task in tasks],
        "drawn": [len(task.draw) for task in _tasks(FixedPlanner(order, share), 5)],
        "sorted": sizes.draw(range(4000, 4200, 9), epoch=2).sample,
        "packed": [
            (one.draw.sample[:20], one.packed.row[:20], one.packed.column[:20], one.after)
            for one in (first, second)
        ],
        "long": [long.after, long.draw.sample[:10]],
    }


def _tasks(planner, count, cursor=None):
    some = planner.epoch(cursor or Cursor(), group=lambda: 2)
    return [next(some) for _ in range(count)]


def rows():
    found = {name: of_order(name) for name in _ORDERS}
    return {**found, "gone on": gone_on(), "blended": blended(), "planned": planned()}


if __name__ == "__main__":
    keep(KEPT / "orders.json", rows())
