"""Batches, states and ledgers of drawn loaders, and answers to states and options that cannot be: kept.

    PYTHONPATH=tests:tests/load python tests/load/kept_batches.py

writes `kept/` anew. A job that goes on with a newer version must get the batches it would have got: where
these differ, it wants a line in CHANGELOG.
"""

from __future__ import annotations

import copy
import json
import random
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from small_datasets import make_tars, make_tokens

from kept_values import keep, plain
from stoker import Loader, Mixture, World
from stoker.errors import StokerError, UsageError
from stoker.load.options import LoaderOptions
from stoker.load.recall import options_of_state
from stoker.load.state import _digest

KEPT = Path(__file__).parent / "kept"
DRAWN = 18
_LENGTHS = [[random.Random(7).randint(1, 90) for _ in range(count)] for count in (60, 37, 1, 80, 40)]


def drawn(seed: int) -> dict[str, Any]:
    """Options of a loader of tokens, or of several blended."""
    draw = random.Random(seed)
    ranks = draw.choice([1, 2, 3, 4])
    packing = draw.choice(["concat", "concat", "best-fit", "pad", "buckets"])
    options: dict[str, Any] = {
        "batch_size": draw.choice([1, 2, 5]),
        "seq_len": draw.choice([16, 32, 64]),
        "seed": draw.choice([0, 9]),
        "shuffle": draw.choice(["full", "full", "blocks", "off"]),
        "packing": packing,
        "labels": draw.choice(["next", "same", ""]),
        "documents": packing == "concat" and draw.random() < 0.5,
        "pad_id": draw.choice([0, 7]),
        "tail": "drop" if packing == "best-fit" else draw.choice(["drop", "pad"]),
        "window": draw.choice([1, 3]),
        "chunk_bytes": draw.choice([256, 4096]),
        "dtype": draw.choice(["int64", "int32", None]),
        "lanes": draw.choice([0, 0, 12 * ranks]),
        "reader": draw.choice(["pread", "mmap"]),
        "output": "numpy",
        "workers": "inline",
    }
    blend = draw.choice([1, 1, 2])
    if blend == 2:
        by = draw.choice(["samples", "steps"])
        options["weights"] = draw.choice([(1.0, 2.0), Mixture({0: [0.9, 0.1], 40: [0.2, 0.8]}, by=by)])
    if draw.random() < 0.3 and blend == 1:
        options["skip"] = [f"e0-0000.bin#{draw.randrange(60)}" for _ in range(3)]
    return {
        "options": options,
        "ranks": ranks,
        "blend": blend,
        "zstd": draw.random() < 0.2,
        "then": draw.choice([ranks, 1, 2, 3]),
    }


def ran(seed: int) -> dict[str, Any]:
    """Of all ranks: batches by their digests, then on with other ranks, and what the ledger says."""
    given = drawn(seed)
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        sources: Any = make_tokens(folder / "a", _LENGTHS, zstd=given["zstd"])
        if given["blend"] == 2:
            sources = [sources, make_tokens(folder / "b", [[25] * 20])]
        try:
            first, state, ledger = _ranks(sources, given["options"], given["ranks"], None)
        except UsageError as error:  # a document that is in no row
            return {"refused": error.message.replace(where, "")}
        on = {name: one for name, one in given["options"].items() if name not in ("lanes", "skip")}
        later, last, _ = _ranks(sources, on, given["then"], state)
        found = {
            "first": first,
            "state": state,
            "later": later,
            "last": last,
            "ledger": ledger,
            "recalled": _recalled(state),
        }
        return dict(json.loads(json.dumps(plain(found)).replace(where, "")))


def _recalled(state: dict[str, Any]) -> Any:
    found = options_of_state(state)
    return {name: one.as_state() if isinstance(one, Mixture) else one for name, one in found.items()}


def _ranks(sources: Any, options: dict[str, Any], ranks: int, state: Any) -> tuple[Any, Any, Any]:
    batches, states, ledger = [], [], []
    for rank in range(ranks):
        world = World(rank=rank, size=ranks, local_rank=rank, local_size=ranks)
        with Loader(sources, world=world, **options) as loader:
            if state:
                loader.load_state_dict(json.loads(json.dumps(state)))
            files = loader.files_in_order()
            mine = [batch for _, batch in zip(range(3), loader, strict=False)]
            batches.append([_digests(batch) for batch in mine])
            states.append(json.loads(json.dumps(loader.state_dict())))
            if rank == 0:
                rows = [row for step in (0, loader.step + 1) for row in loader.samples(step)][:8]
                ledger = [[row.rank, row.row, [document.name for document in row.documents]] for row in rows]
                ledger += [files[:6], loader.epoch, loader.step, _length(loader)]
    assert all(one == states[0] for one in states)
    return batches, states[0], ledger


def _length(loader: Any) -> Any:
    try:
        return len(loader)
    except (StokerError, TypeError) as error:
        return str(error)


def _digests(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [str(one.dtype), list(one.shape), xxhash.xxh3_64_hexdigest(np.ascontiguousarray(one).tobytes())]
        for name, one in batch.items()
    }


def of_tars() -> Any:
    """Samples of tars: their keys in the order in which they come."""
    found = []
    with tempfile.TemporaryDirectory() as where:
        folder = make_tars(Path(where) / "tars", [9, 4, 7])
        for options in ({}, {"shuffle": "off"}, {"tail": "pad", "seed": 3}, {"skip": ["e0-0000.tar#1"]}):
            try:
                with Loader(folder, batch_size=4, output="numpy", workers="inline", **options) as loader:
                    found.append(
                        [[plain(batch.get("__key__")), plain(batch.get("real"))] for batch in loader]
                    )
            except StokerError as error:
                found.append(error.message.replace(where, ""))
    return found


# --- what cannot be -------------------------------------------------------------------------------

_BAD: tuple[Any, ...] = (None, -1, "x", True, 1 << 70, [], 0, 1, 10**6)


def refusals() -> dict[str, str]:
    """A saved state with one value in it another: what is said, or that it goes on."""
    with tempfile.TemporaryDirectory() as where:
        source = make_tokens(Path(where) / "a", _LENGTHS)
        other = make_tokens(Path(where) / "b", [[25] * 20])
        found = {}
        options = {"batch_size": 2, "seq_len": 32, "output": "numpy", "workers": "inline"}
        cases: dict[str, Any] = {
            "one": ({"skip": ["e0-0000.bin#3"]}, source),
            "blend": ({"weights": Mixture({0: [0.9, 0.1], 40: [0.2, 0.8]})}, [source, other]),
            "packed": ({"packing": "best-fit"}, source),
        }
        for name, (more, sources) in cases.items():
            with Loader(sources, world=World(rank=0, size=2), **options, **more) as loader:
                next(iter(loader))
                state = json.loads(json.dumps(loader.state_dict()))
                state["past"] = json.loads(state["past"])
            more.pop("skip", None)
            with Loader(sources, world=World(rank=0, size=2), **options, **more) as loader:
                for path in _paths(state):
                    for value in _BAD:
                        changed = copy.deepcopy(state)
                        inside = changed
                        for step in path[:-1]:
                            inside = inside[step]
                        inside[path[-1]] = value
                        key = f"{name} {'.'.join(map(str, path))} {value!r}"
                        found[key] = _answer(loader, changed).replace(where, "")
    return found


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Any:
    inside = (
        value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    )
    for name, one in inside:
        yield (*path, name)
        yield from _paths(one, (*path, name))


def _answer(loader: Any, state: Any) -> str:
    """As somebody would write it who makes the check right: it says who wrote, not that it can be."""
    if isinstance(state, dict) and "past" in state:
        state = {**state, "past": json.dumps(state["past"])}
        with suppress(AttributeError, TypeError, ValueError, KeyError, OverflowError):
            state = {**state, "check": _digest(state)}
    try:
        loader.load_state_dict(state)
    except StokerError as error:
        return f"{type(error).__name__}: {error.message}"[:200]
    return "goes on"


def asked() -> dict[str, str]:
    """Options with one of them another."""
    found = {}
    odd: tuple[Any, ...] = (None, -1, 0, 1, 2**64, 2**64 - 1, 1.5, True, "x", "", [], (1 << 20) - 1, 1 << 20)
    names = [
        "batch_size",
        "seq_len",
        "seed",
        "pad_id",
        "processes",
        "threads",
        "memory",
        "lanes",
        "chunk_bytes",
        "window",
        "readers",
        "shuffle",
        "packing",
        "labels",
        "tail",
        "workers",
        "reader",
        "output",
        "dtype",
        "world",
        "weights",
    ]
    for name in names:
        for value in odd:
            try:
                made = LoaderOptions("x", **{"batch_size": 1, name: value})
                found[f"{name} {value!r}"] = f"= {getattr(made, name)!r}"
            except StokerError as error:
                found[f"{name} {value!r}"] = f"{error.message} / {error.hint}"
            except TypeError:
                found[f"{name} {value!r}"] = "TypeError"
    return found


def main() -> None:
    rows: dict[str, Any] = {str(seed): ran(seed) for seed in range(DRAWN)}
    keep(KEPT / "batches.json", {**rows, "tars": of_tars()})
    keep(KEPT / "refusals.json", {"states": refusals(), "options": asked()})


if __name__ == "__main__":
    main()
