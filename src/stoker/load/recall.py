"""Loader states found again: in what a job saved, and the options they were saved with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stoker.errors import UsageError, require
from stoker.load.ordering.schedule import Mixture
from stoker.load.state import checked_order, past_in


def read_state(path: Path) -> Mapping[str, Any]:
    """The loader's state in a file of JSON or of torch.save."""
    text = path.read_bytes()
    if text[:1] in b"{[":
        try:
            held = json.loads(text)
        except ValueError as error:
            raise UsageError(f"{path} is no JSON: {error}", hint=_HINT) from error
    else:
        torch = require("torch", extra="torch")
        try:
            held = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises whatever its reader met
            raise UsageError(f"{path} cannot be read: {str(error).splitlines()[0]}", hint=_HINT) from error
    return the_state_in(held, str(path))


_HINT = "give a file that holds what `state_dict()` of a loader or feeder gave, or a checkpoint of stoker's"


def the_state_in(held: Any, where: str) -> Mapping[str, Any]:
    """The one loader state in values that a job saved together."""
    found = list(_states(held))
    if not found:
        raise UsageError(f"{where} holds no loader state", hint=_HINT)
    # the check is of the position alone: before their first steps two loaders may have the same
    if any((one["check"], one["order"]) != (found[0]["check"], found[0]["order"]) for one in found):
        raise UsageError(
            f"{where} holds {len(found)} loader states", hint="save the one you mean to a file of JSON"
        )
    return found[0]


def _states(held: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(held, Mapping):
        if {"version", "order", "check"} <= held.keys():
            yield held
            return
        held = list(held.values())
    if isinstance(held, (list, tuple)):
        for one in held:
            yield from _states(one)


def options_of_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a loader is made with to load this state; the ranks are those of its last steps."""
    order, past = checked_order(state), past_in(state)
    try:
        leg, stage = past["legs"][-1], past["mixture"][-1]
        found = {name: order[name] for name in _KEPT}
        if raw := _RAW.match(order["datasets"][0]):
            found["bin_dtype"] = raw[1]
        found |= {"batch_size": leg["batch"], "tail": leg["tail"], "ranks": leg["ranks"]}
        if len(stage["counts"]) > 1:
            points = dict(stage["points"])
            found["weights"] = Mixture(points, by=stage["by"], between=stage["between"])
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise UsageError(f"the loader state is not whole: {error!r}", hint=_HINT) from error
    return found


_RAW = re.compile(r"array:\(\d+,\):(\w+)#")  # a row of ids, of a raw .bin perhaps, and their type
_KEPT = ("seed", "shuffle", "packing", "seq_len", "chunk_bytes", "window")
