"""Load policy and report: how what was saved may differ from what it is restored into, what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

import torch

from stoker.errors import UsageError
from stoker.options import check_choices

# A name in the checkpoint → the name here, or None to leave it out; or a mapping of names and of what names
# begin with, up to a dot.
Rename = Callable[[str], str | None] | Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """What is allowed.

    strict: everything must be there, and have a place
    rename: names in the checkpoint → names here
    mismatched: a tensor of another shape is refused, left alone (skip), or, where it is larger now, filled
        from its first element on (grow); optimizer state follows its parameter
    dtypes: another precision is refused (exact), said in a warning (warn), or meant (cast). A number never
        becomes one of another kind, and a whole number never one with fewer bits
    """

    strict: bool = True
    rename: Rename | None = None
    mismatched: Literal["raise", "skip", "grow"] = "raise"
    dtypes: Literal["exact", "warn", "cast"] = "warn"

    def __post_init__(self) -> None:
        check_choices(self)

    def told(self) -> dict[str, str]:
        """What the ranks must have been told alike."""
        rename = self.rename if isinstance(self.rename, Mapping) else bool(self.rename)
        return {
            **{key: str(getattr(self, key)) for key in ("strict", "mismatched", "dtypes")},
            "rename": str(rename),
        }

    def name_of(self, saved: str) -> str | None:
        """What a name of the checkpoint is called here."""
        if self.rename is None:
            return saved
        if not isinstance(self.rename, Mapping):
            return self.rename(saved)
        for known in sorted(self.rename, key=len, reverse=True):
            if saved == known or saved.startswith(f"{known.removesuffix('.')}."):
                to = self.rename[known]
                return None if to is None else to.removesuffix(".") + saved[len(known.removesuffix(".")) :]
        return saved

    def fits(
        self, name: str, *, here: torch.Tensor, shape: tuple[int, ...], said: Match, where: str = ""
    ) -> bool:
        """Whether a tensor of this shape may go there; what was decided is noted."""
        now = tuple(here.shape)
        if now == shape:
            return True
        words = f"{name} is {now} here, in {where or 'the checkpoint'} {shape}"
        larger = len(now) == len(shape) and all(a >= b for a, b in zip(now, shape, strict=True))
        if self.mismatched == "grow" and larger:
            said.grown.append(words)
            return True
        (said.mismatched if self.mismatched == "skip" else said.refused).append(words)
        return False

    def casts(self, name: str, *, here: torch.dtype, saved: torch.dtype, said: Match) -> None:
        """Note what becomes of a dtype."""
        if here == saved:
            return
        words = f"{name} is {_word(saved)} in the checkpoint, {_word(here)} here"
        if kind_of(here) != kind_of(saved) or (kind_of(here) != "float" and not _holds(here, saved)):
            said.kinds.append(words)
        else:
            said.cast.append(words)
            if not _holds(here, saved):
                said.rounded.append(words)


def kind_of(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    return "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "int"


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether it has every value of the other; both are of one kind."""
    try:
        return torch.promote_types(dtype, other) == dtype
    except RuntimeError:  # of numbers with eight bits torch does not say
        return dtype.itemsize > other.itemsize


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(kw_only=True, slots=True)
class Match:
    """What one rank found; of all ranks together once it is `merged`."""

    names: list[str] = field(default_factory=list)  # given back
    missing: list[str] = field(default_factory=list)  # wanted here, not in the checkpoint
    unexpected: list[str] = field(default_factory=list)  # in the checkpoint, no place here
    strangers: list[str] = field(default_factory=list)  # parameters whose state no optimizer holds
    mismatched: list[str] = field(default_factory=list)  # left alone
    refused: list[str] = field(default_factory=list)
    grown: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    rounded: list[str] = field(default_factory=list)  # of the cast ones
    kinds: list[str] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)  # saved differently by ranks of another number

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    def check(self, policy: Loading, checkpoint: str) -> None:
        """Raise what is not allowed."""
        for some, hint in (
            (self.kinds, "build the model with the dtypes it was saved with, or leave it out with rename="),
            (self.cast if policy.dtypes == "exact" else [], "dtypes='cast' allows it"),
            (self.refused, "build the model with the options it was saved with, or use mismatched='skip'"),
            (
                self.apart if policy.strict else [],
                "restore with as many ranks; strict=False leaves them alone",
            ),
        ):
            if some:
                more = f" ({len(some)} such tensors)" if len(some) > 1 else ""
                raise UsageError(some[0].replace("the checkpoint", checkpoint) + more, hint=hint)
        if policy.strict and self.strangers:
            raise stranger(self.strangers[0])
        if policy.strict and (self.missing or self.unexpected):
            raise missing(self.missing, checkpoint, unexpected=self.unexpected)


def stranger(key: object) -> UsageError:
    return UsageError(
        f"the checkpoint has optimizer state for {key!r}, which this optimizer does not hold",
        hint="give its module too, with the same parameters, or restore without it",
    )


def missing(names: Sequence[str], checkpoint: str, *, unexpected: Sequence[str] = ()) -> UsageError:
    parts = []
    if names:
        parts.append(f"lacks {len(names)} of what is to be restored, {names[0]!r} first")
    if unexpected:
        parts.append(
            f"has {len(unexpected)} tensors or values that have no place here, {unexpected[0]!r} first"
        )
    return UsageError(
        f"{checkpoint} {' and '.join(parts)}",
        hint="give the objects that were saved, under the same names, or strict=False",
    )


# What has no place on one rank may have one on another: stages of a pipeline hold a part of the model each.
_ON_ALL = ("unexpected", "strangers")


def merged(notes: Sequence[bytes]) -> bytes:
    """What the ranks found, together; as a note."""
    found = [match_from(note) for note in notes]
    whole = Match()
    for key in (one.name for one in fields(Match)):
        lists = [getattr(one, key) for one in found]
        together = dict.fromkeys(name for some in lists for name in some)
        if key in _ON_ALL:
            everywhere = set.intersection(*map(set, lists))
            together = {name: None for name in together if name in everywhere}
        setattr(whole, key, list(together))
    return whole.to_json()


def match_from(note: bytes) -> Match:
    return Match(**json.loads(note))


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What a restore did, the same on every rank: tensors and values by name, each list of those that...

    restored: came back
    missing: are wanted here and not in the checkpoint
    unexpected: are in the checkpoint and have no place on any rank
    mismatched: have another shape here and were left alone
    grown: are larger here and were filled in part
    cast: have another dtype here
    """

    restored: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    grown: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = ((one.name, getattr(self, one.name)) for one in fields(self))
        return ", ".join(f"{len(some)} {name}" for name, some in counts if some or name == "restored")


def report_of(match: Match) -> LoadReport:
    return LoadReport(
        restored=tuple(match.names),
        missing=(*match.missing, *match.apart),
        unexpected=(*match.unexpected, *match.strangers),
        mismatched=tuple(match.mismatched),
        grown=tuple(match.grown),
        cast=tuple(match.cast),
    )
