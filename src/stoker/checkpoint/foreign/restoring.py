"""The beginning of a run from what others saved, or from another run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from stoker.checkpoint.agree import Rounds
from stoker.checkpoint.foreign.kinds import refuse_strangers
from stoker.checkpoint.foreign.opening import open_source
from stoker.checkpoint.foreign.source import Foreign, Held
from stoker.checkpoint.loading.match import Loading
from stoker.checkpoint.restore import Attempt, Restored
from stoker.checkpoint.saved.reader import Checkpoint
from stoker.checkpoint.saved.tiers import Tiers
from stoker.checkpoint.snapshot.state import Objects, bare, plain_name
from stoker.checkpoint.snapshot.tensors import Saved
from stoker.errors import BadCheckpointError, UsageError


def restore_source(source: str | Path, rounds: Rounds, objects: Objects, *, policy: Loading) -> Restored:
    """Bring objects to what a foreign checkpoint, or that of another run, holds of them. Objects of which it
    holds nothing stay as they are: a model that was downloaded has no optimizer."""

    def opened() -> Checkpoint:
        found = open_source(source)
        return with_ties(found, objects) if isinstance(found, Foreign) else found

    attempt = Attempt(rounds, objects, policy, there=_held_objects)
    if failure := attempt.match(opened) or attempt.read():
        raise BadCheckpointError(
            f"{source} cannot be restored from: {failure}",
            hint=attempt.fault.hint if attempt.fault else "see the other ranks",
        )
    absent = tuple(name for name in objects if name not in attempt.asked)
    return replace(attempt.restored(()), where=attempt.saved.checkpoint.name, absent=absent)


def _held_objects(saved: Saved, objects: Objects) -> Objects:
    names = {box.path[0] for box in map(saved.box, saved.pieces)} | {path[0] for path in saved.values}
    there = {name: thing for name, thing in objects.items() if name in names}
    if not there:
        raise UsageError(
            f"{saved.checkpoint.name} holds {_listed(sorted(map(str, names)))}, and none of "
            f"{_listed(list(objects))}",
            hint="give your objects these names, or rename= those",
        )
    return there


def with_ties(foreign: Foreign, objects: Objects) -> Foreign:
    """Also what a file leaves out because the model ties it to what is there, as Hugging Face does."""
    known = {one.box.path: one for one in foreign.held}
    added: list[Held] = []
    for name, thing in objects.items():
        if isinstance(thing, torch.nn.Module):
            tensors = {
                (name, plain_name(key)): one
                for key, one in bare(thing).state_dict().items()
                if isinstance(one, torch.Tensor) and one.numel() and not one.is_meta
            }
            first = {one.data_ptr(): known[path] for path, one in tensors.items() if path in known}
            added += [
                replace(first[one.data_ptr()], box=replace(first[one.data_ptr()].box, path=path))
                for path, one in tensors.items()
                if path not in known and one.data_ptr() in first and _same_box(first[one.data_ptr()], one)
            ]
    return foreign.with_more(added) if added else foreign


def _same_box(held: Held, tensor: torch.Tensor) -> bool:
    return held.box.sizes == held.box.shape == tuple(tensor.shape)


def refuse_a_foreign_folder(tiers: Tiers) -> str:
    """Before a fresh start, on rank 0: nobody's checkpoints may be ignored."""
    far = [entry.path for entry in tiers.remote.list()] if tiers.remote else []
    refuse_strangers(tiers.root, far, url=tiers.remote.url if tiers.remote else "")
    return ""


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
