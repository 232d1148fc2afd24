"""Restore: a checkpoint back into live objects.

Every kind of object says which tensors it wants read, and where to; the ranks agree whether that matches what
was saved before a byte is read; values are handed over only after every tensor was read.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from stoker.checkpoint.agree import Rounds
from stoker.checkpoint.loading.match import Loading, LoadReport, Match, match_from, merged, report_of
from stoker.checkpoint.loading.optimizers import want_optimizer
from stoker.checkpoint.loading.wants import Want, want_module, want_other
from stoker.checkpoint.saved.layout import path_name
from stoker.checkpoint.saved.reader import Checkpoint
from stoker.checkpoint.saved.tiers import FAR, Tiers
from stoker.checkpoint.saved.values import decode
from stoker.checkpoint.saved.writer import Pace
from stoker.checkpoint.snapshot.state import Objects, check_object, nest, parameter_paths, set_random_state
from stoker.checkpoint.snapshot.tensors import Saved, new_tensor, read_tensors
from stoker.checkpoint.turns import Turns
from stoker.errors import BadCheckpointError, StokerError, UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What came back. `step` is 0 and `name` empty when there was no checkpoint: a fresh start."""

    step: int = 0
    name: str = ""
    extras: dict[str, Any] = field(default_factory=dict)  # Any: the plain values that were saved
    skipped: tuple[str, ...] = ()  # newer checkpoints that could not be used, and why
    report: LoadReport = field(default_factory=LoadReport)  # what was and was not restored, by name
    rounded: tuple[str, ...] = ()  # of those that were cast, which lost precision
    where: str = ""  # its folder or URL; of a foreign one its path
    saved_at: float = 0.0  # seconds since 1970, where that is known
    absent: tuple[str, ...] = ()  # objects that a foreign one holds nothing of: they are as they were

    @property
    def fresh(self) -> bool:
        return not self.name

    def line(self, root: Any) -> str:
        """What a log should know of it."""
        if self.fresh:
            return f"no checkpoint in {root}: a fresh start"
        age = f", saved {say_age(time.time() - self.saved_at)} ago" if self.saved_at else ""
        absent = f"; not in it, and as they were: {', '.join(self.absent)}" if self.absent else ""
        skipped = f"; skipped {'; '.join(self.skipped)}" if self.skipped else ""
        return f"restored step {self.step} from {self.where}{age}{absent}{skipped}"


def say_age(seconds: float) -> str:
    for size, word in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {word}"
    return f"{max(0.0, seconds):.0f} seconds"


def restore_newest(
    tiers: Tiers, rounds: Rounds, reads: Turns, objects: Objects, *, name: str, policy: Loading
) -> Restored:
    """Bring objects back to the newest checkpoint that all ranks can read, or to the one of this name; a
    fresh start when there is none at all."""
    skipped: list[str] = []
    candidates, tried = _Candidates(tiers, name, skipped), False
    while told := rounds.told(candidates.next):
        chosen, attempt = json.loads(told)["name"], Attempt(rounds, objects, policy)
        failure = attempt.match(partial(candidates.opened, told, reads.pace)) or attempt.read(reads)
        if not failure:
            set_random_state(attempt.saved.own)
            found = attempt.saved.checkpoint
            return replace(
                attempt.restored(skipped), where=found.folder.url, saved_at=found.manifest.saved_at
            )
        skipped.append(f"{chosen}: {failure}")
        tried = True
    if lost := rounds.told(candidates.lost):
        raise _none_usable(tiers, lost, tried=tried)
    if name:
        raise UsageError(f"{tiers.root} has no checkpoint {name}", hint="`stoker checkpoint ls` lists them")
    return Restored()


class Attempt:
    """One checkpoint, restored by all ranks or by none: first everybody says what does not match, before a
    byte is read; then all read. `there` says which of the objects a checkpoint is asked for: all of them."""

    def __init__(
        self,
        rounds: Rounds,
        objects: Objects,
        policy: Loading,
        *,
        there: Callable[[Saved, Objects], Objects] = lambda saved, objects: objects,
    ) -> None:
        self._rounds, self._objects, self._policy, self._there = rounds, objects, policy, there
        self._match, self._wanted = Match(), list[Want]()
        self._given, self._extras = dict[str, Any](), dict[str, Any]()
        self.saved: Saved
        self.asked: Objects = objects
        self.fault: StokerError | None = None  # of this rank

    def match(self, opened: Callable[[], Checkpoint]) -> str:
        """Why it cannot be used, if so; raises where objects are not those that were saved."""
        world = self._rounds.world

        def look() -> None:
            rename = self._policy.name_of if self._policy.rename else None
            self.saved = Saved(opened(), rank=world.rank, size=world.size, rename=rename)
            self.asked = self._there(self.saved, self._objects)
            self._wanted = wants_of(self.saved, self.asked, policy=self._policy, said=self._match)
            self._extras = self.saved.extras(self._objects)

        if failure := self._all_well(look):
            return failure
        self._match = match_from(self._rounds.pool(self._match.to_json(), merged))
        self._match.check(self._policy, self.saved.checkpoint.name)
        return ""

    def read(self, reads: Turns | None = None) -> str:
        def work() -> None:
            with reads.offered() if reads else nullcontext() as turn:
                if turn:
                    self.saved.checkpoint.turn = turn
                self._given = give(self.saved, self._wanted)

        return self._all_well(work)

    def restored(self, skipped: Sequence[str]) -> Restored:
        found = self.saved.checkpoint
        return Restored(
            step=found.step,
            name=found.name,
            extras=self._given | self._extras,
            skipped=tuple(skipped),
            report=report_of(self._match),
            rounded=tuple(self._match.rounded),
        )

    def _all_well(self, work: Callable[[], None]) -> str:
        """Empty, or what went wrong on some rank."""
        try:
            with _normal_mode():
                work()
        except StokerError as error:
            self.fault = error
        return self._rounds.all_well(self.fault)


@contextmanager
def _normal_mode() -> Iterator[None]:
    """What inference mode makes can never be trained: an optimizer's state is made here."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _none_usable(tiers: Tiers, lost: str, *, tried: bool) -> BadCheckpointError:
    """Where there are checkpoints and all are unusable, a fresh start would hide what is lost."""
    cure = "copy a good one back, or name another folder; to begin anew, delete them"
    if tried:
        cure += ". The objects may hold parts of a damaged one: start again with new ones"
    return BadCheckpointError(f"no checkpoint in {tiers.root} could be restored: {lost}", hint=cure)


class _Candidates:
    """The copies that are whole, the best first. Only rank 0 looks for them and reads what describes them;
    it tells the others, or a restore would take as many requests as ranks times ranks."""

    def __init__(self, tiers: Tiers, name: str, skipped: list[str]) -> None:
        self._tiers, self._name, self._skipped = tiers, name, skipped
        self._left: list[str] | None = None
        self._some = False

    def next(self) -> str:
        """The next one with its manifest and descriptions, or nothing."""
        if self._left is None:
            copies = self._tiers.copies(said=self._skipped)
            self._left = [one for one in copies if self._name in ("", one.removesuffix(FAR))]
            self._some = bool(self._left)
        while self._left:
            chosen = self._left.pop(0)
            for found in self._tiers.whole([chosen], skipped=self._skipped):
                return json.dumps({"name": chosen, "texts": found.texts})
        return ""

    def lost(self) -> str:
        """Once none is left: why none could be used, or nothing if there never was one."""
        return "; ".join(self._skipped) if self._some else ""

    def opened(self, told: str, pace: Pace) -> Checkpoint:
        plain = json.loads(told)
        found = self._tiers.checkpoint(plain["name"], told=plain["texts"])
        found.pace = pace
        return found


def wants_of(saved: Saved, objects: Objects, *, policy: Loading, said: Match) -> list[Want]:
    """What the objects want of a checkpoint; what does not match is noted."""
    paths = parameter_paths(objects)
    found = []
    for name, thing in objects.items():
        check_object(name, thing)
        if isinstance(thing, torch.nn.Module):
            found.append(want_module(name, thing, saved, policy, said))
        elif isinstance(thing, torch.optim.Optimizer):
            found.append(want_optimizer(name, thing, saved, paths, policy, said))
        else:
            found.append(want_other(name, thing, saved, policy, said))
    return [want for want in found if want.tensors or want.values]  # the rest was not saved


def give(saved: Saved, wanted: Sequence[Want]) -> dict[str, Any]:
    """Bring objects back to what they were; gives the state of those that cannot take it themselves."""
    read_tensors(saved, {path: tensor for want in wanted for path, tensor in want.tensors.items()})
    given = {}
    for want in wanted:
        state = nest(iter({**want.tensors, **want.values}.items())).get(want.name, {})
        if want.apply is None:
            given[want.name] = state
        else:
            want.apply(state)
    return given


def load_state(saved: Saved, *, keys: Sequence[str] = ("",)) -> dict[str, Any]:
    """The saved state itself, in new tensors on the CPU; only what begins with one of these keys."""
    tensors = {
        saved.box(name).path: new_tensor(saved.box(name))
        for name in saved.pieces
        if name.startswith(tuple(keys))
    }
    read_tensors(saved, tensors)
    values = {
        path: decode(value) for path, value in saved.values.items() if path_name(path).startswith(tuple(keys))
    }
    found: dict[str, Any] = nest(iter({**tensors, **values}.items()))
    return found


def warn_of_skipped(skipped: Sequence[str]) -> None:
    for one in skipped:
        warnings.warn(f"a checkpoint was skipped: {one}", RuntimeWarning, stacklevel=3)


def warn_of_rounded(rounded: Sequence[str]) -> None:
    if rounded:
        warnings.warn(
            f"{len(rounded)} tensors lost precision in a restore, {rounded[0]} first; say dtypes='cast' if "
            "that is meant, 'exact' to refuse it",
            RuntimeWarning,
            stacklevel=3,
        )
