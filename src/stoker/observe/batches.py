"""What a batch and its loader are, read without importing torch: bytes, tokens, settings."""

from __future__ import annotations

from typing import Any

_TOKEN_KEYS = ("input_ids", "tokens")
_LEAVES = 64


def tokens_of(batch: Any) -> int:
    """Tokens of a batch, -1 where it does not look like text: integers in two dimensions are."""
    if hasattr(batch, "keys"):
        for key in _TOKEN_KEYS:
            if key in batch:
                return int(batch[key].numel())
        return -1
    first = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
    if getattr(first, "ndim", 0) != 2 or not hasattr(first, "is_floating_point"):
        return -1
    return -1 if first.is_floating_point() else int(first.numel())


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
        "kind": type(dataset).__name__ if dataset is not None else type(iterator).__name__,
    }
