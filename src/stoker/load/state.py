"""What a loader saves: the position of the whole job, and which order it is a position of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from numbers import Integral
from typing import Any

from xxhash import xxh3_64_hexdigest

from stoker.errors import UsageError
from stoker.load.options import LoaderOptions
from stoker.load.ordering.cut import Cut, Recut
from stoker.load.ordering.dealing import Dealing, Stage
from stoker.load.ordering.plan import Cursor
from stoker.load.ordering.schedule import Mixture, Schedule
from stoker.load.ordering.without import LeftOut
from stoker.load.past import Leg, Past

# 2: an order whose lanes were the same parts of the corpus in every epoch; 3: blends by a pattern, no steps
VERSION = 4
_MOST_LANES = 1 << 20  # more than any job has ranks: they are laid out in memory
_ANY, _SOME = range(1 << 62), range(1, _MOST_LANES)


def order_state(fingerprints: Sequence[str], options: LoaderOptions) -> dict[str, Any]:
    """All that the order of samples depends on from its beginning."""
    return {
        "datasets": list(fingerprints),
        "seed": options.seed,
        "shuffle": options.shuffle,
        "packing": options.packing,
        "seq_len": options.seq_len,
        "chunk_bytes": options.chunk_bytes,
        "window": options.window,
    }


def save(cursor: Cursor, order: dict[str, Any], past: Past) -> dict[str, Any]:
    state = {"version": VERSION, **asdict(cursor), "order": order, "past": json.dumps(_past_state(past))}
    return {**state, "check": _digest(state)}


def load(state: Any, *, order: Mapping[str, Any]) -> tuple[Cursor, Past]:  # anybody's: it is checked here
    """The saved position and the course of its job, for a loader of this order."""
    saved = checked_order(state)
    _check_order(saved, order)
    past = _past_of(past_in(state), len(order["datasets"]))
    cursor = Cursor(**_counts(state, [*Cursor.__dataclass_fields__], _ANY))
    _check_recuts(past, cursor)
    if state.get("check") != _digest(state):
        raise UsageError(
            f"the loader state was changed after it was saved: {cursor} and its course do not have the check "
            f"{state.get('check')!r:.40}",
            hint="take the state from another checkpoint, or start without it",
        )
    return cursor, past


def checked_order(state: Any) -> Mapping[str, Any]:
    """What a state says of the order it belongs to, if it is a state of this version."""
    if not isinstance(state, Mapping):
        raise UsageError(
            f"a loader state is a dict, not {type(state).__name__}", hint="give what state_dict() gave"
        )
    if state.get("version") != VERSION:
        raise UsageError(
            f"the saved position is of version {state.get('version')!r}, this stoker reads version "
            f"{VERSION}: those below 3 belong to an order that shuffled less, 3 to another way to blend",
            hint="finish that epoch with the stoker that saved it, or start an epoch without the state",
        )
    saved = state.get("order")
    if not isinstance(saved, Mapping):
        raise _malformed("order", saved)
    return saved


def past_in(state: Mapping[str, Any]) -> Any:
    """The course as it was written: as text, since checkpoints take lists of records apart."""
    try:
        return json.loads(state["past"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise _malformed("past", state.get("past")) from error


def step_of(state: Mapping[str, Any]) -> int:
    return int(past_in(state)["step"])


def _digest(state: Mapping[str, Any]) -> str:
    """What tells a position that was saved from one that a disk, or a hand, has changed: it would lead to
    other samples without a word."""
    told = [int(state[name]) for name in Cursor.__dataclass_fields__]
    return xxh3_64_hexdigest(f"{told} {state['past']}".encode())


def _past_state(past: Past) -> dict[str, Any]:
    assert past.cut is not None
    assert past.dealing is not None
    known = past.dealing.known
    return {
        "step": past.step,
        "cut": past.cut.as_state(),
        "legs": [leg.as_state() for leg in past.legs],
        "mixture": [
            {
                "begin": stage.begin,
                "counts": list(stage.counts),
                **stage.schedule.mixture.as_state(),
                "samples": stage.schedule.samples,
                "of": stage.schedule.of,
            }
            for stage in past.dealing.stages
        ],
        "left_out": [
            {**asdict(some.since), "samples": [list(one) for one in sorted(some.samples)]}
            for some in past.left_out
        ],
        "dealt": {"position": known[0], "counts": list(known[1])} if known else None,
    }


def _past_of(found: Any, datasets: int) -> Past:
    dealt = found.get("dealt") if isinstance(found, Mapping) else None
    return Past(
        **_counts(found, ["step"], _ANY),
        cut=cut_of(found.get("cut")),
        legs=tuple(_leg_of(one) for one in _many("legs", found)),
        left_out=tuple(_left_out_of(one) for one in _many("left_out", found)),
        dealing=_check_counts(
            Dealing(
                stages=tuple(_stage_of(one, datasets) for one in _many("mixture", found)),
                known=None
                if dealt is None
                else (_counts(dealt, ["position"], _ANY)["position"], _each(dealt, datasets)),
            )
        ),
    )


def _leg_of(found: Any) -> Leg:
    if not isinstance(found, Mapping) or found.get("tail") not in ("drop", "pad"):
        raise _malformed("legs", found)
    return Leg(
        **_counts(found, ["step"], _ANY),
        cursor=Cursor(**_counts(found, [*Cursor.__dataclass_fields__], _ANY)),
        **_counts(found, ["ranks", "batch"], range(1, 1 << 40)),
        tail=found["tail"],
    )


def _left_out_of(found: Any) -> LeftOut:
    since = Cursor(**_counts(found, [*Cursor.__dataclass_fields__], _ANY))
    samples = [
        _counts(dict(zip(("layout", "sample"), one, strict=False)), ("layout", "sample"), _ANY)
        for one in _many("samples", found)
        if isinstance(one, (list, tuple))
    ]
    return LeftOut(since=since, samples=frozenset((one["layout"], one["sample"]) for one in samples))


def _stage_of(found: Any, datasets: int) -> Stage:
    points = _many("points", found)
    try:
        mixture = Mixture(
            {at: [float(weight) for weight in weights] for at, weights in points},
            by=found.get("by"),
            between=found.get("between"),
        )
    except (UsageError, TypeError, ValueError) as error:
        raise _malformed("points", points) from error
    if mixture.datasets != datasets:
        raise _malformed("points", points)
    scale = _counts(found, ["samples", "of"], range(1, 1 << 40))
    return Stage(
        **_counts(found, ["begin"], _ANY),
        counts=_each(found, datasets),
        schedule=Schedule(mixture=mixture, **scale),
    )


def _each(found: Mapping[str, Any], datasets: int) -> tuple[int, ...]:
    counts = _many("counts", found)
    if len(counts) != datasets:
        raise _malformed("counts", counts)
    return tuple(_counts({"counts": one}, ["counts"], _ANY)["counts"] for one in counts)


def _many(name: str, found: Any) -> Sequence[Any]:
    many = found.get(name) if isinstance(found, Mapping) else None
    if not isinstance(many, (list, tuple)) or (not many and name not in ("then", "left_out")):
        raise _malformed(name, many)
    return many


def cut_of(found: Any) -> Cut:
    recuts = [
        Recut(**_counts(one, ("epoch", "position"), _ANY), **_counts(one, ("lanes", "ranks", "nodes"), _SOME))
        for one in _many("then", found)
    ]
    return Cut(**_counts(found, ("lanes", "ranks", "nodes"), _SOME), then=tuple(recuts))


def _check_recuts(past: Past, cursor: Cursor) -> None:
    """A job is cut anew where it is, and goes on from there; where an epoch has gaps, the one after it is."""
    places = [(recut.epoch, recut.position) for recut in (past.cut or Cut()).then]
    here, next_epoch = (cursor.epoch, cursor.position), (cursor.epoch + 1, 0)
    is_ahead = places[-1:] > [here] and not (past.left_out and places[-1] == next_epoch)
    if is_ahead or any(second <= first for first, second in pairwise(places)):
        raise _malformed("cut", places)


def _counts(found: Any, names: Iterable[str], allowed: range) -> dict[str, int]:
    """The numbers of a record; none may be missing, or be what it cannot be."""
    if not isinstance(found, Mapping):
        raise _malformed(" and ".join(names), found)
    for name in names:
        value = found.get(name)
        if not isinstance(value, Integral) or isinstance(value, bool) or int(value) not in allowed:
            raise _malformed(name, value)
    return {name: int(found[name]) for name in names}


def check_position(cursor: Cursor, *, samples: int) -> None:
    """An epoch ends with its samples."""
    if cursor.position > samples or cursor.epoch * max(1, samples) >= 1 << 62:
        raise _malformed("position", f"{cursor.position:,} of {samples:,} samples")


def check_left_out(past: Past, samples: Sequence[int]) -> None:
    """What is left out is something of these layouts."""
    for layout, sample in (one for some in past.left_out for one in some.samples):
        if layout >= len(samples) or sample >= samples[layout]:
            raise _malformed("left_out", f"sample {sample:,} of layout {layout}")


def _check_counts(dealing: Dealing) -> Dealing:
    """Datasets of a blend have come as often together as there are positions, stage after stage."""
    known = [(stage.begin, stage.counts) for stage in dealing.stages]
    begins = [begin for begin, _ in known]
    if begins[0] or begins != sorted(set(begins)):
        raise _malformed("mixture", begins)
    for position, counts in [*known, *([dealing.known] if dealing.known else [])]:
        if sum(counts) != position:
            raise _malformed("counts", f"{counts} at position {position:,}")
    return dealing


def _check_order(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    differing = [name for name in mine if mine[name] != saved.get(name)]
    if differing:
        shown = ", ".join(f"{name} {saved.get(name)!r} (here {mine[name]!r})" for name in differing)
        raise UsageError(
            f"the saved position belongs to another order: {shown}",
            hint="make the loader with the same dataset and options, or start without the saved state",
        )


def _malformed(name: str, value: object) -> UsageError:
    return UsageError(
        f"the loader state has {name} {value!r:.100}, which no loader saves",
        hint="take the state from another checkpoint, or start without it",
    )
