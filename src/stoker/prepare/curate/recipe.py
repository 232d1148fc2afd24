"""A curation as data: the list of steps with their options, from flags, a preset or a YAML file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from stoker.errors import UnreadableError, UsageError, require
from stoker.prepare.curate.batch import Step
from stoker.prepare.curate.options import check_options, kinds_of
from stoker.prepare.curate.steps import OPTIONS, STEPS
from stoker.prepare.curate.users import code_digest

# What is found where documents meet, after all other steps: no list of a batch's.
_MEETING = {
    "duplicates": {"normalised": "bool"},
    "near_duplicates": {"similarity": "float", "keep": "str"},
}
CORPUS_STEPS = ("corpus_lines", "corpus_paragraphs")
KEEPS = ("first", "longest")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """A step by its name, and its options."""

    step: str
    options: dict[str, Any] = field(default_factory=dict)

    def make(self) -> Step:
        check_options(self.step, self.options, kinds_of(OPTIONS.get(self.step, STEPS[self.step])))
        try:
            made: Step = STEPS[self.step](**self.options)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"step {self.step} cannot take {self.options}: {error}",
                hint="docs/concepts/curation.md lists the options of each step",
            ) from error
        return made


@dataclass(frozen=True, kw_only=True, slots=True)
class Curation:
    """The steps, in order, and how copies are told. By default only what is empty goes."""

    steps: tuple[Ask, ...] = (Ask(step="lengths"),)
    fold: bool = False  # copies are compared without case, punctuation, accents and white space
    keep: str = "first"  # of near copies

    def __post_init__(self) -> None:
        if self.keep not in KEEPS:
            raise UsageError(
                f"near copies: nothing keeps the {self.keep}", hint=f"keep one of {', '.join(KEEPS)}"
            )

    def make(self) -> list[Step]:
        return [ask.make() for ask in self.steps]

    @property
    def lines_at(self) -> int:
        """Where in the list the step stands that looks at the lines of the whole corpus; -1 for nowhere."""
        return next((at for at, ask in enumerate(self.steps) if ask.step in CORPUS_STEPS), -1)

    def digest(self) -> str:
        """What the plan must know beside the options: the user's code and the files that steps read."""
        parts = [
            code_digest(ask.options["function"]) if ask.options.get("function") else "" for ask in self.steps
        ]
        files = [path for ask in self.steps for path in _files(ask)]
        parts += [xxhash.xxh3_128_hexdigest(Path(path).read_bytes()) for path in files]
        return xxhash.xxh3_128_hexdigest(repr(parts).encode()) if any(parts) else ""

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Curation:
        return cls(**{**plain, "steps": tuple(Ask(**ask) for ask in plain["steps"])})


def _files(ask: Ask) -> Sequence[str]:
    return [*ask.options.get("against", ()), *([ask.options["model"]] if ask.options.get("model") else [])]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A curation, and the similarity at which near copies go (0: they stay)."""

    curation: Curation
    near_dedup: float = 0.0


WEB: list[Any] = [
    "normalise",
    "language",
    "gopher_repetition",
    "gopher_quality",
    {"c4": {"terminal_punctuation": False}},  # as FineWeb has it: that rule takes a third of all that is left
    "fineweb",
    "pii",
    "duplicates",
    {"near_duplicates": {"similarity": 0.8}},
]


def read_recipe(name: str) -> Recipe:
    """`none`, `web`, or a YAML or JSON file with a list of steps."""
    if name in ("", "none"):
        return Recipe(curation=Curation())
    return parse_recipe(WEB if name == "web" else _load(Path(name)), name=name)


def _load(path: Path) -> Any:
    try:
        text = path.read_text("utf-8")
        plain = (
            json.loads(text) if path.suffix == ".json" else require("yaml", extra="curate").safe_load(text)
        )
    except (OSError, ValueError) as error:
        raise UnreadableError(
            f"cannot read the recipe {path}: {error}", hint="use --curate web, none, or a YAML file of steps"
        ) from error
    except Exception as error:  # yaml's own kinds
        if type(error).__module__.startswith("yaml"):
            raise UsageError(
                f"{path} is no YAML: {error}", hint="write a list of steps under `steps:`"
            ) from error
        raise
    return plain.get("steps") if isinstance(plain, dict) else plain


def parse_recipe(steps: Any, *, name: str) -> Recipe:
    """A list whose items are names of steps, or one name with its options."""
    if not isinstance(steps, list) or not steps:
        raise UsageError(
            f"the recipe {name} has no list of steps", hint="write `steps:` and below it `- normalise`"
        )
    asks = [_ask(item, name) for item in steps]
    meeting = {ask.step: ask.options for ask in asks if ask.step in _MEETING}
    for step, options in meeting.items():
        if sum(ask.step == step for ask in asks) > 1:
            raise UsageError(f"{name}: {step} stands twice", hint="write it once, with all its options")
        check_options(step, options, _MEETING[step])
        if unknown := sorted(set(options) - set(_MEETING[step])):
            raise UsageError(
                f"{name}: {step} has no option {unknown[0]}",
                hint=f"it has {', '.join(sorted(_MEETING[step]))}",
            )
    if sum(ask.step in CORPUS_STEPS for ask in asks) > 1:
        raise UsageError(
            f"{name}: the lines of the whole corpus are looked at once",
            hint=f"write one of {' and '.join(CORPUS_STEPS)}",
        )
    near = meeting.get("near_duplicates")
    curation = Curation(
        steps=(Ask(step="lengths"), *(ask for ask in asks if ask.step not in _MEETING)),
        fold=bool(meeting.get("duplicates", {}).get("normalised", "duplicates" in meeting)),
        keep=str((near or {}).get("keep", "longest" if near is not None else "first")),
    )
    curation.make()  # a wrong option is told before anything is read
    return Recipe(
        curation=curation, near_dedup=float(near.get("similarity", 0.8)) if near is not None else 0.0
    )


def _ask(item: Any, name: str) -> Ask:
    if isinstance(item, str):
        item = {item: {}}
    if not isinstance(item, dict) or len(item) != 1:
        raise UsageError(f"{name}: {item!r} is no step", hint="write `- name` or `- name: {option: value}`")
    ((step, options),) = item.items()
    if step not in STEPS and step not in _MEETING:
        raise UsageError(
            f"{name}: there is no step {step!r}", hint=f"choose of {', '.join([*STEPS, *_MEETING])}"
        )
    if options is not None and not isinstance(options, dict):
        raise UsageError(
            f"{name}: the options of {step} are no mapping", hint=f"write `- {step}: {{option: value}}`"
        )
    return Ask(step=step, options=options or {})


def with_flags(
    recipe: Recipe,
    *,
    min_chars: int = 1,
    max_chars: int = 0,
    quality: bool = False,
    filter: str = "",
    languages: Sequence[str] = (),
) -> Recipe:
    """What flags add to a recipe: lengths and language before its steps, Gopher's rules and the user's filter
    after them."""
    lengths = {"min_chars": min_chars, "max_chars": max_chars}
    first = Ask(step="lengths", options={} if (min_chars, max_chars) == (1, 0) else lengths)
    inner = [ask for ask in recipe.curation.steps if ask.step != "lengths" or ask.options]
    if languages:
        place = next((at for at, ask in enumerate(inner) if ask.step == "language"), None)
        given = {} if place is None else inner[place].options
        asked = Ask(step="language", options={**given, "keep": list(languages)})
        inner[: 0 if place is None else place + 1] = [*inner[: place or 0], asked]
    if quality:
        inner += [Ask(step="gopher_repetition"), Ask(step="gopher_quality")]
    if filter:
        inner += [Ask(step="filter", options={"function": filter}), replace(first)]
    curation = replace(recipe.curation, steps=(first, *inner))
    curation.make()
    return replace(recipe, curation=curation)
