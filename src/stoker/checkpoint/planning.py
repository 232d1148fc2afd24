"""What a save will hold: the state, flattened, and the ranks' plan for it, kept while it fits all of them.

Tensors of one name that no mesh makes one are one where they are equal; and equal they may be before they are
trained: stages of a pipeline that were made with one seed, norms of ones. So what has not been seen to change
and to be alike all the same is compared again once torch has counted a change of it on any rank; and, since a
step in a CUDA graph is not counted, at the second save of a plan, the fourth, the eighth and so on. Once they
part they are saved apart.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Sequence

import torch

from stoker.checkpoint.agree import Rounds, agreed_plan
from stoker.checkpoint.copies import Copies
from stoker.checkpoint.options import CheckpointOptions
from stoker.checkpoint.saved.layout import Path
from stoker.checkpoint.saved.values import encoded
from stoker.checkpoint.saver import Save
from stoker.checkpoint.snapshot.copy import versions
from stoker.checkpoint.snapshot.kept import Kept
from stoker.checkpoint.snapshot.plan import Plan, local
from stoker.checkpoint.snapshot.state import Flat, Objects, random_state


class Planning:
    """Plans with the other ranks and remembers the plan. The loop's thread calls."""

    def __init__(self, options: CheckpointOptions, copies: Copies) -> None:
        self._options, self._copies = options, copies
        self._kept = Kept()
        self._plan: Plan | None = None
        self._saves = 0  # by this plan
        self._first: dict[Path, int] = {}  # what is one by its values → its digest when that was first seen
        self._unsettled: list[Path] = []  # of these, what has not changed since
        self._counted: dict[
            Path, tuple[weakref.ref[torch.Tensor], int]
        ] = {}  # its changes, when last compared
        self.check_s = 0.0  # spent to compare what ranks hold alike

    def flattened(self, objects: Objects) -> tuple[Flat, Exception | None]:
        """What is to be saved; or why it cannot be, to be raised once the other ranks can be told."""
        try:
            return self._kept.flatten(objects), None
        except Exception as error:  # also of a state_dict that is not ours
            return Flat(), error

    def is_due_again(self, flat: Flat) -> bool:
        """Whether what is one by its values is to be compared again at this save."""
        if not self._unsettled:
            return False
        if (self._saves + 1).bit_count() == 1:
            return True
        combed = set(self._plan.alike) if self._plan and not self._options.overlap else ()
        return any(self._has_changed(path, flat, is_combed=path in combed) for path in self._unsettled)

    def _has_changed(self, path: Path, flat: Flat, *, is_combed: bool) -> bool:
        """Whether torch has counted a change since it was compared. What is another tensor each time, a copy
        perhaps, may be anything, unless pieces of it are compared at every save (see `loose_digest`)."""
        now, (before, count) = flat.tensors.get(path), self._counted[path]
        if now is None or now is not before():
            return not is_combed
        return versions([local(now)]) != [count]

    def fitting(self, flat: Flat) -> Plan | None:
        """The last plan, if it still fits here: whether to go by it is for all ranks to say."""
        return self._plan if self._plan is not None and self._plan.fits(flat) else None

    def forget(self) -> None:
        self._plan = None

    def prepare(self, rounds: Rounds, objects: Objects, *, before: Callable[[], None]) -> None:
        """Plan at the first step, so that the memory of the first save is there when it is due."""
        flat, _ = self.flattened(objects)
        rounds.fresh = False
        plan = self._plan = agreed_plan(rounds, objects, flat, check=False)
        pinned = any(tensor.is_cuda for tensor in self._kept.tensors(plan, flat))
        self._copies.allocate(plan, pinned=pinned, before=before)

    def agreed(self, rounds: Rounds, objects: Objects, flat: Flat, *, replan: bool) -> Plan:
        """The last plan or a new one, made with the others, who have shown that they hold alike what they say
        they do."""
        if replan or self._plan is None:
            began = time.monotonic()
            made = agreed_plan(rounds, objects, flat, trust=self._options.replicas == "first")
            self.check_s += time.monotonic() - began
            self._first = {path: self._first.get(path, digest) for path, digest in made.compared.items()}
            self._unsettled = [path for path, digest in made.compared.items() if self._first[path] == digest]
            self._counted = {path: _count(flat.tensors[path]) for path in self._unsettled}
            if made != self._plan:  # else it was shown once more to be right
                self._plan, self._saves = made, 0
                _warn_of_apart(made.apart if self._options.world.rank == 0 else ())
        self._saves += 1
        return self._plan

    def save_of(self, flat: Flat, plan: Plan, *, number: int, step: int, asked_at: float) -> Save:
        return Save(
            number=number,
            step=step,
            asked_at=asked_at,
            snapshot=self._copies.snapshot(plan, self._kept.tensors(plan, flat)),
            pieces=plan.pieces,
            pieces_text=plan.pieces_text,
            values=encoded(flat.values),
            own=encoded(random_state()),
        )


def _count(tensor: torch.Tensor) -> tuple[weakref.ref[torch.Tensor], int]:
    return weakref.ref(tensor), versions([local(tensor)])[0]


def _warn_of_apart(apart: Sequence[str]) -> None:
    if apart:
        warnings.warn(
            f"{len(apart)} tensors differ by rank, {apart[0]} first: each is saved for every rank, and comes "
            "back on as many ranks only. Right for pipeline stages; replicas have drifted apart",
            RuntimeWarning,
            stacklevel=4,
        )
