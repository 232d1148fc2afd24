"""What a save will hold: the state, flattened, and the ranks' plan for it, kept while it fits all of them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence

from stoker.checkpoint.agree import Rounds, agreed_plan
from stoker.checkpoint.copies import Copies
from stoker.checkpoint.options import CheckpointOptions
from stoker.checkpoint.saved.values import encoded
from stoker.checkpoint.saver import Save
from stoker.checkpoint.snapshot.kept import Kept
from stoker.checkpoint.snapshot.plan import Plan
from stoker.checkpoint.snapshot.state import Flat, Objects, random_state


class Planning:
    """Plans with the other ranks and remembers the plan. The loop's thread calls."""

    def __init__(self, options: CheckpointOptions, copies: Copies) -> None:
        self._options, self._copies = options, copies
        self._kept = Kept()
        self._plan: Plan | None = None
        self.check_s = 0.0  # spent to compare what ranks hold alike

    def flattened(self, objects: Objects) -> tuple[Flat, Exception | None]:
        """What is to be saved; or why it cannot be, to be raised once the other ranks can be told."""
        try:
            return self._kept.flatten(objects), None
        except Exception as error:  # also of a state_dict that is not ours
            return Flat(), error

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
            self._plan = agreed_plan(rounds, objects, flat, trust=self._options.replicas == "first")
            self.check_s += time.monotonic() - began
            _warn_of_apart(self._plan.apart if self._options.world.rank == 0 else ())
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


def _warn_of_apart(apart: Sequence[str]) -> None:
    if apart:
        warnings.warn(
            f"{len(apart)} tensors differ by rank, {apart[0]} first: each is saved for every rank, and comes "
            "back on as many ranks only. Right for pipeline stages; replicas have drifted apart",
            RuntimeWarning,
            stacklevel=4,
        )
