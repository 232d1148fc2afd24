"""Batch introspection: what a batch and its loader are, without importing torch: bytes, tokens, settings."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

_TOKEN_KEYS = ("input_ids", "tokens")
_LEAVES = 64


def tokens_of(batch: Any) -> int:
    """Tokens of a batch, -1 where it does not look like text."""
    part = text_part(batch)
    return -1 if part is None else int(part(batch).numel())


def text_part(batch: Any) -> Callable[[Any], Any] | None:
    """What takes the tokens out of a batch like this one; None where it does not look like text: integers in
    two dimensions are."""
    if hasattr(batch, "keys"):
        return next((itemgetter(key) for key in _TOKEN_KEYS if _counts(batch, key)), None)
    listed = isinstance(batch, (list, tuple)) and bool(batch)
    first = batch[0] if listed else batch
    if getattr(first, "ndim", 0) != 2 or not hasattr(first, "is_floating_point") or first.is_floating_point():
        return None
    return itemgetter(0) if listed else _itself


def _counts(batch: Any, key: str) -> bool:
    """Are there tokens of that name, as a tensor and not as words?"""
    return key in batch and hasattr(batch[key], "numel")


def _itself(batch: Any) -> Any:
    return batch


def batch_bytes(batch: Any) -> int:
    """Bytes of the tensors and arrays in a batch, looking at its first leaves only."""
    found, todo = 0, [batch]
    for _ in range(_LEAVES):
        if not todo:
            break
        one = todo.pop()
        if hasattr(one, "nbytes"):
            found += int(one.nbytes)
        elif hasattr(one, "keys"):
            todo += [one[key] for key in list(one.keys())[:_LEAVES]]
        elif isinstance(one, (list, tuple)):
            todo += one[:_LEAVES]
    return found


def loader_facts(iterator: Any, *, batch_bytes: int) -> dict[str, Any]:
    """How a DataLoader was set up, as its iterator knows it."""
    facts = {
        name: getattr(iterator, f"_{name}", None)
        for name in ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "timeout")
    }
    sampler = getattr(iterator, "_index_sampler", None)
    dataset = getattr(iterator, "_dataset", None)
    return {
        **facts,
        "batch_size": getattr(sampler, "batch_size", None),
        "batch_bytes": batch_bytes,
        "number": getattr(iterator, "_stoker_number", None),  # among the loaders of the process: knobs.py
        "kind": type(dataset).__name__ if dataset is not None else type(iterator).__name__,
    }
