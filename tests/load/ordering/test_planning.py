"""Planners against the plainest thing they could be: a list of positions, cut into batches."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.load.ordering import plan
from stoker.load.ordering.blend import dealing_of, make_blend
from stoker.load.ordering.cut import Cut
from stoker.load.ordering.find import positions_of
from stoker.load.ordering.order import Order
from stoker.load.ordering.packing import pack_best_fit
from stoker.load.ordering.plan import BestFitPlanner, Cursor, EpochsPlanner, FixedPlanner, Sorted
from stoker.load.ordering.rounds import Share
from stoker.load.ordering.spans import Elastic
from stoker.load.ordering.without import LeavingOut, LeftOut, closed_up, kept_parts, of_layout
from stoker.mixing import key_of


@pytest.fixture(autouse=True, scope="module")
def small():
    """Stretches and groups so small that a test has many of them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plan, "SORTED", 48)
        patched.setattr(plan, "_RUN", 8)
        patched.setattr(plan, "_PACKED", 40)
        patched.setattr(plan, "_DRAWN", 16)
        yield


def lengths(drawn):
    """Of a document, by its number."""
    return drawn.sample * 7919 % 23 + 1


def elastic(samples, world=1, seed=0):
    order = Order(samples=samples, chunk=4, stretch=3, cut=Cut.for_world(world, 1), seed=seed)
    return Elastic(order, order.cut)


def named(drawn):
    return list(zip(drawn.dataset.tolist(), drawn.sample.tolist(), strict=True))


def groups_of(sizes):
    """What the loader asks for: so many batches at a time, in turns."""
    turns = iter(sizes * 1000)
    return lambda: next(turns)


GROUPS = st.lists(st.integers(1, 5), min_size=1, max_size=3)
SHARES = st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(1, 5))


# --- one sample a row -----------------------------------------------------------------------------


@given(
    samples=st.integers(1, 200),
    share=SHARES,
    tail=st.sampled_from(["drop", "pad"]),
    groups=GROUPS,
    begin=st.integers(0, 3),
    epoch=st.integers(0, 2),
)
def test_batches_are_the_positions_in_turn_and_cursors_count_them(samples, share, tail, groups, begin, epoch):
    (world, batch), order = share, elastic(samples, share[0])
    cursor = Cursor(epoch=epoch, position=begin * world * batch)
    left = max(0, samples - cursor.position)
    batches = left // (world * batch) if tail == "drop" else -(-left // (world * batch))
    seen = []
    for rank in range(world):
        planner = FixedPlanner(order, Share(rank=rank, world=world, batch=batch), tail=tail)
        assert planner.batches(cursor) == batches
        after, real, drawn = [], [], []
        for task in planner.epoch(cursor, group=groups_of(groups)):
            assert len(task.draw) == task.batches * batch
            assert task.batches <= max(groups)
            assert task.epoch == epoch
            after += list(task.after)
            real += [True] * len(task.draw) if task.real is None else task.real.tolist()
            drawn += task.draw.sample.tolist()
        assert after == [
            Cursor(epoch=epoch + 1)
            if number == batches
            else Cursor(epoch=epoch, position=cursor.position + number * world * batch)
            for number in range(1, batches + 1)
        ]
        assert len(drawn) == batches * batch
        rows = [
            cursor.position + n * world * batch + row * world + rank
            for n in range(batches)
            for row in range(batch)
        ]
        assert real == [row < samples for row in rows]
        seen += [sample for sample, is_real in zip(drawn, real, strict=True) if is_real]
        again = [sample for sample, is_real in zip(drawn, real, strict=True) if not is_real]
        wrapped = [row % samples for row in rows if row >= samples]
        assert again == [int(order.draw(range(at, at + 1), epoch=epoch).sample[0]) for at in wrapped]
    stop = min(samples, cursor.position + batches * world * batch)
    expected = order.draw(range(cursor.position, max(stop, cursor.position)), epoch=epoch).sample
    assert sorted(seen) == sorted(expected.tolist())


def test_after_the_first_draw_many_positions_are_drawn_at_once():
    order, asked = elastic(400), []

    class Asked:
        positions = order.positions

        def deal(self, rows, *, epoch):
            asked.append(len(rows))
            return order.deal(rows, epoch=epoch)

    list(FixedPlanner(Asked(), Share(rank=0, world=1, batch=2)).epoch(Cursor(), group=lambda: 3))
    assert asked == [6] + [16] * 24 + [10]


def test_datasets_of_several_epochs_take_turns():
    shares = Share(rank=0, world=1, batch=10)
    planners = [FixedPlanner(elastic(size), shares) for size in (30, 50)]
    both = EpochsPlanner(planners)
    for epoch in range(4):
        cursor = Cursor(epoch=epoch)
        assert both.batches(cursor) == (3, 5)[epoch % 2]
        assert sum(task.batches for task in both.epoch(cursor, group=lambda: 2)) == (3, 5)[epoch % 2]


# --- sorted by length -----------------------------------------------------------------------------


@given(samples=st.integers(1, 200), epoch=st.integers(0, 2), seed=st.integers(0, 99), data=st.data())
def test_stretches_hold_what_they_held_in_runs_of_like_length(samples, epoch, seed, data):
    order = elastic(samples)
    some = Sorted(order, lengths, seed=seed)
    assert some.positions == samples
    whole = some.draw(range(samples), epoch=epoch)
    for first in range(0, samples, 48):
        stretch = range(first, min(first + 48, samples))
        mine, plain = whole.sample[stretch.start : stretch.stop], order.draw(stretch, epoch=epoch).sample
        assert sorted(mine.tolist()) == sorted(plain.tolist())
        size = lengths(whole)[stretch.start : stretch.stop]
        runs = [size[at : at + 8] for at in range(0, len(size) // 8 * 8, 8)]
        assert all((np.diff(run) >= 0).all() for run in runs)
        by_length = sorted(runs, key=lambda run: (run[0], run[-1]))
        assert all(one[-1] <= two[0] for one, two in pairwise(by_length))
        rest = size[len(size) // 8 * 8 :]
        assert (np.diff(rest) >= 0).all()
        assert all(len(rest) == 0 or run[-1] <= rest[0] for run in runs)
    start = data.draw(st.integers(0, samples - 1))
    rows = range(start, samples, data.draw(st.integers(1, 60)))
    assert some.draw(rows, epoch=epoch).sample.tolist() == whole.sample[rows.start :: rows.step].tolist()
    assert some.deal(rows, epoch=epoch).sample.tolist() == some.draw(rows, epoch=epoch).sample.tolist()
    moved = some.moved(start, epoch=epoch)
    assert whole.sample[moved] == order.draw(range(start, start + 1), epoch=epoch).sample[0]


def test_runs_come_in_another_order_in_each_stretch_epoch_and_seed():
    order = Elastic(Order(samples=96, shuffle="off", cut=Cut(lanes=1)), Cut(lanes=1))
    seen = {
        tuple(
            Sorted(order, lambda drawn: drawn.sample % 48, seed=seed)
            .draw(range(at, at + 48), epoch=epoch)
            .sample
            % 48
        )
        for seed in (0, 1)
        for epoch in (0, 1)
        for at in (0, 48)
    }
    assert len(seen) == 8


# --- packed ---------------------------------------------------------------------------------------


def rows_of(task):
    """The documents' parts of each row of a task, with their columns."""
    found = [[] for _ in range(task.packed.rows)]
    for item, start, length, row, column in zip(
        *(getattr(task.packed, name).tolist() for name in ("item", "start", "length", "row", "column")),
        strict=True,
    ):
        found[row].append((int(task.draw.sample[item]), start, length, column))
    return found


def packed_epoch(order, epoch, *, room, seed):
    """All rows of an epoch: forty documents packed together, rows shuffled; and the cursor before each."""
    rows, cursors = [], []
    for first in range(0, order.positions, 40):
        drawn = order.draw(range(first, min(first + 40, order.positions)), epoch=epoch)
        packed = pack_best_fit(lengths(drawn), room=room).shuffled(key_of(seed, epoch, first))
        some = [[] for _ in range(packed.rows)]
        for item, start, length, row, column in zip(
            packed.item, packed.start, packed.length, packed.row, packed.column, strict=True
        ):
            some[row].append((int(drawn.sample[item]), int(start), int(length), int(column)))
        rows += some
        cursors += [Cursor(epoch=epoch, position=first, row=row) for row in range(packed.rows)]
    return rows, cursors


@settings(max_examples=18)
@given(
    samples=st.integers(1, 150),
    share=SHARES,
    groups=GROUPS,
    room=st.integers(8, 40),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 2),
    data=st.data(),
)
def test_packed_rows_are_shared_out_and_gone_on_with_from_any_cursor(
    samples, share, groups, room, seed, epoch, data
):
    (world, batch), order = share, elastic(samples)
    whole = world * batch
    rows, cursors = packed_epoch(order, epoch, room=room, seed=seed)
    begin = data.draw(st.integers(0, max(0, len(rows) - 1)))
    expected, total = rows[begin:], (len(rows) - begin) // whole
    for rank in range(world):
        planner = BestFitPlanner(
            order, Share(rank=rank, world=world, batch=batch), seq_len=room, lengths=lengths, seed=seed
        )
        assert planner.batches(cursors[begin]) is None
        found, after = [], []
        for task in planner.epoch(cursors[begin], group=groups_of(groups)):
            assert task.packed.rows == task.batches * batch
            assert task.batches <= max(groups)
            assert set(task.packed.item.tolist()) == set(range(len(task.draw)))
            found += rows_of(task)
            after += list(task.after)
        assert found == [
            sorted(one, key=lambda part: part[3]) for one in expected[rank : total * whole : world]
        ]
        ends = [begin + number * whole for number in range(1, total + 1)]
        assert after == [cursors[end] if end < len(rows) else Cursor(epoch=epoch + 1) for end in ends]


# --- without some samples -------------------------------------------------------------------------


def left_out(draw, *sizes):
    """Some samples of datasets of these sizes, one to three times."""
    every = [(dataset, sample) for dataset, size in enumerate(sizes) for sample in range(size)]
    return [
        LeftOut(
            since=Cursor(epoch=draw(st.integers(0, 2)), position=draw(st.integers(0, sizes[0] - 1))),
            samples=frozenset(draw(st.lists(st.sampled_from(every), max_size=6))),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]


def begins(some, epoch):
    if epoch < some.since.epoch:
        return None
    return some.since.position if epoch == some.since.epoch else 0


def closed(names, left, epoch):
    """Names in their order without what is left out: those that would come last take their places."""
    names = list(names)
    for some in left:
        begin = begins(some, epoch)
        if begin is None:
            continue
        holes = [at for at in range(begin, len(names)) if names[at] in some.samples]
        size = len(names) - len(holes)
        last = [at for at in range(size, len(names)) if at not in holes]
        for hole, at in zip([at for at in holes if at < size], last, strict=True):
            names[hole] = names[at]
        names = names[:size]
    return names


@pytest.mark.parametrize("kind", ["plain", "sorted", "blend"])
@settings(max_examples=18)
@given(size=st.integers(2, 120), share=SHARES, groups=GROUPS, epoch=st.integers(0, 3), data=st.data())
def test_what_is_left_out_does_not_come_and_the_last_take_its_places(kind, size, share, groups, epoch, data):
    world, batch = share
    left = left_out(data.draw, size, *([size // 2 + 1] if kind == "blend" else []))

    def arranged(order):
        return Sorted(order, lengths) if kind == "sorted" else order

    def order_of(rank):
        if kind != "blend":
            return elastic(size, world)
        orders = tuple(Order(samples=n, chunk=4, cut=Cut.for_world(world, 1)) for n in (size, size // 2 + 1))
        return make_blend(orders, dealing_of((2.0, 1.0)), share=Share(rank=rank, world=world, batch=batch))

    order = order_of(0)
    plain = named(arranged(order).draw(range(order.positions), epoch=epoch))
    expected = closed(plain, left, epoch)
    size_left, moved = closed_up(order, arranged(order), left, epoch)
    assert size_left == len(expected)
    assert [plain[moved.get(at, at)] for at in range(size_left)] == expected
    begin = data.draw(st.integers(0, 3)) * world * batch
    cursor, seen = Cursor(epoch=epoch, position=begin), []
    for rank in range(world):
        share_ = Share(rank=rank, world=world, batch=batch)
        planner = LeavingOut(
            order_of(rank),
            share_,
            left,
            make=lambda some, share_=share_: FixedPlanner(some, share_),
            arranged=arranged,
        )
        assert planner.batches(cursor) == max(0, len(expected) - begin) // (world * batch)
        mine = [task.draw for task in planner.epoch(cursor, group=groups_of(groups))]
        seen += [name for drawn in mine for name in named(drawn)]
        for drawn in mine:
            for (dataset, sample), chunk in zip(named(drawn), drawn.chunk.tolist(), strict=True):
                key = drawn.keys[chunk]
                assert key[0] == dataset
                assert key[1] <= sample < key[2]
    count = max(0, len(expected) - begin) // (world * batch) * world * batch
    assert sorted(seen) == sorted(expected[begin : begin + count])


@given(size=st.integers(2, 120), data=st.data(), epoch=st.integers(0, 3))
def test_a_blend_without_some_shows_others_in_their_places(size, data, epoch):
    orders = tuple(Order(samples=n, chunk=4) for n in (size, size // 2 + 1))
    blend = make_blend(orders, dealing_of((2.0, 1.0)))
    left = left_out(data.draw, size, size // 2 + 1)
    count, moved = closed_up(blend, blend, left, epoch)
    begin = epoch * blend.samples
    less = replace(blend, size=count, moved={begin + at: begin + by for at, by in moved.items()})
    plain = named(blend.draw(range(blend.positions), epoch=epoch))
    assert less.positions == (count or blend.samples)
    assert named(less.draw(range(count), epoch=epoch)) == [plain[moved.get(at, at)] for at in range(count)]


@given(data=st.data(), epoch=st.integers(0, 2), first=st.sampled_from([0, 40, 80]))
def test_parts_left_out_of_packed_rows_are_those_from_their_cursor_on(data, epoch, first):
    order = elastic(120)
    drawn = order.draw(range(first, first + 40), epoch=epoch)
    packed = pack_best_fit(lengths(drawn), room=30)
    left = [
        LeftOut(
            since=Cursor(
                epoch=data.draw(st.integers(0, 2)),
                position=data.draw(st.sampled_from([0, 40, 80])),
                row=data.draw(st.integers(0, 5)),
            ),
            samples=frozenset((0, data.draw(st.integers(0, 119))) for _ in range(20)),
        )
        for _ in range(2)
    ]
    at = Cursor(epoch=epoch, position=first)
    stay = kept_parts(left)(drawn, packed, at)
    for number, (item, row) in enumerate(zip(packed.item.tolist(), packed.row.tolist(), strict=True)):
        name = (0, int(drawn.sample[item]))
        here = (epoch, first, row)
        gone = any(
            name in one.samples and here >= (one.since.epoch, one.since.position, one.since.row)
            for one in left
        )
        assert stay[number] == (not gone)


def test_layouts_that_are_not_blended_leave_out_their_own():
    both = [LeftOut(since=Cursor(), samples=frozenset({(0, 1), (1, 5)}))]
    assert of_layout(both, None) == both
    assert [one.samples for one in of_layout(both, 1)] == [frozenset({(1, 5)})]
    assert [one.samples for one in of_layout(both, 2)] == [frozenset()]


@given(size=st.integers(2, 120), start=st.integers(0, 30), step=st.integers(1, 9), epoch=st.integers(0, 2))
def test_rows_of_a_blend_that_are_far_apart_are_drawn_as_in_the_whole(size, start, step, epoch):
    orders = tuple(Order(samples=n, chunk=4) for n in (size, size // 2 + 1))
    blend = make_blend(orders, dealing_of((2.0, 1.0)))
    whole = named(blend.draw(range(blend.positions), epoch=epoch))
    assert named(blend.draw(range(start, blend.positions, step), epoch=epoch)) == whole[start::step]


@pytest.mark.parametrize("stretch", [19, 37])
def test_every_sample_is_found_also_where_a_pool_is_dealt_in_hands_that_are_not_full(stretch):
    order = Order(samples=8 * 50, chunk=1, stretch=stretch, cut=Cut(lanes=8), seed=3)
    whole = Elastic(order, order.cut)
    drawn = whole.draw(range(order.samples), epoch=1).sample.tolist()
    assert sorted(drawn) == list(range(order.samples))
    assert [positions_of(whole, 0, sample, epoch=1) for sample in drawn] == [[at] for at in range(len(drawn))]
