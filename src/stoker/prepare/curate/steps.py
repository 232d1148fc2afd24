"""The steps themselves, each a small class over pure functions; STEPS names all that a recipe may ask for."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from stoker.errors import UsageError, require
from stoker.prepare.curate import private
from stoker.prepare.curate.batch import Batch, Outcome, Step, edited
from stoker.prepare.curate.corpus import CorpusLines
from stoker.prepare.curate.decontaminate import Decontaminate
from stoker.prepare.curate.language import Language
from stoker.prepare.curate.rules import C4, FineWeb, GopherQuality, GopherRepetition, without_repeated_parts
from stoker.prepare.curate.scores import Classify
from stoker.prepare.curate.users import UserFilter

_TRAILING, _BLANK_LINES = re.compile(r"[^\S\n]+\n"), re.compile(r"\n{3,}")
_CONTROLS = dict.fromkeys([*range(9), 11, 12, *range(14, 32), 127, *range(0x80, 0x85), *range(0x86, 0xA0)])


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Characters of a document."""

    min_chars: int = 1
    max_chars: int = 0
    name: str = "lengths"

    def __post_init__(self) -> None:
        if self.min_chars < 0 or self.max_chars < 0:
            raise UsageError("document lengths cannot be negative", hint="use --min-chars 1 or more")
        if self.max_chars and self.max_chars < self.min_chars:
            raise UsageError(
                f"--max-chars {self.max_chars} is under --min-chars {self.min_chars}: nothing would stay",
                hint="raise the one or lower the other",
            )

    def run(self, batch: Batch) -> Outcome:
        sizes = batch.texts.sizes
        if self.min_chars <= 1 and not self.max_chars:  # the default, worth a look at whole batches
            reasons = np.where(sizes > 0 if self.min_chars else sizes >= 0, "", "empty").tolist()
        else:
            reasons = [self._fault(len(text)) for text in batch.texts.strings]
        return Outcome(reasons=reasons)

    def _fault(self, chars: int) -> str:
        if chars < self.min_chars:
            return "too_short" if chars else "empty"
        return "too_long" if self.max_chars and chars > self.max_chars else ""


@dataclass(frozen=True, kw_only=True)
class Normalise:
    """One form of every text: NFC, Unix newlines, no control characters, no white space at the ends of lines;
    with ftfy also mended mojibake."""

    nfc: bool = True
    white_space: bool = True
    ftfy: bool = False
    name: str = "normalise"

    def __post_init__(self) -> None:
        if self.ftfy:
            require("ftfy", extra="curate")

    def run(self, batch: Batch) -> Outcome:
        return edited(batch, lambda text: (self.normalised(text), ""))

    def normalised(self, text: str) -> str:
        if self.ftfy:
            text = require("ftfy", extra="curate").fix_text(text, self._ftfy_options)
        if self.nfc and not text.isascii() and not unicodedata.is_normalized("NFC", text):
            text = unicodedata.normalize("NFC", text)
        return _spaced(text) if self.white_space else text

    @cached_property
    def _ftfy_options(self) -> Any:
        """The encoding is mended; what is a matter of taste (quotes, width, ligatures) is left."""
        return require("ftfy", extra="curate").TextFixerConfig(
            uncurl_quotes=False,
            fix_latin_ligatures=False,
            fix_character_width=False,
            fix_line_breaks=False,
            normalization=None,
        )


def _spaced(text: str) -> str:
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.isprintable():
        text = text.translate(_CONTROLS)
    if " \n" in text or "\t\n" in text or "\u00a0\n" in text or "\u3000\n" in text:
        text = _TRAILING.sub("\n", text)
    if "\n\n\n" in text:
        text = _BLANK_LINES.sub("\n\n", text)
    return text.strip()


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Documents that break a rule of a published list."""

    rules: GopherQuality | GopherRepetition | FineWeb
    name: str

    def run(self, batch: Batch) -> Outcome:
        languages = batch.languages or ["en"] * len(batch.texts)
        pairs = zip(batch.texts.strings, languages, strict=True)
        return Outcome(reasons=[self.rules.fault(text, language) for text, language in pairs])


@dataclass(frozen=True, kw_only=True)
class C4Lines:
    rules: C4
    name: str = "c4"

    def run(self, batch: Batch) -> Outcome:
        return edited(batch, self.rules.edited)


@dataclass(frozen=True, kw_only=True)
class RepeatedParts:
    """Lines or paragraphs that stand twice in a document stay once."""

    paragraphs: bool = False
    min_chars: int = 20
    name: str = "repeated_lines"

    def run(self, batch: Batch) -> Outcome:
        return edited(batch, self._once)

    def _once(self, text: str) -> tuple[str, str]:
        if "\n" not in text:
            return text, ""
        left = without_repeated_parts(text, paragraphs=self.paragraphs, min_chars=self.min_chars)
        return (text if left == text else left), ""


@dataclass(frozen=True, kw_only=True)
class Private:
    """Private data replaced by tags."""

    kinds: tuple[str, ...] = tuple(kind.name for kind in private.KINDS)
    name: str = "pii"
    chosen: tuple[private.Kind, ...] = field(init=False)

    def __post_init__(self) -> None:
        known = {kind.name: kind for kind in private.KINDS}
        if unknown := sorted(set(self.kinds) - set(known)):
            raise UsageError(
                f"no kind of private data is called {unknown[0]}", hint=f"choose of {', '.join(known)}"
            )
        object.__setattr__(self, "chosen", tuple(kind for kind in private.KINDS if kind.name in self.kinds))

    def run(self, batch: Batch) -> Outcome:
        found: Counter[str] = Counter()

        def scrub(text: str) -> tuple[str, str]:
            clean, counts = private.scrubbed(text, self.chosen)
            found.update(counts)
            return (clean if counts else text), ""

        return edited(batch, scrub, found)


def _gopher_quality(**given: Any) -> Step:
    return Rules(rules=GopherQuality(**given), name="gopher_quality")


def _gopher_repetition(**given: Any) -> Step:
    for ngrams in {"top_ngrams", "repeated_ngrams"} & set(given):
        given[ngrams] = tuple((int(size), float(share)) for size, share in given[ngrams])
    return Rules(rules=GopherRepetition(**given), name="gopher_repetition")


def _fineweb(**given: Any) -> Step:
    return Rules(rules=FineWeb(**given), name="fineweb")


def _c4(**given: Any) -> Step:
    return C4Lines(rules=C4(**given))


def _repeated_paragraphs(**given: Any) -> Step:
    return RepeatedParts(paragraphs=True, name="repeated_paragraphs", **given)


def _corpus_paragraphs(**given: Any) -> Step:
    return CorpusLines(paragraphs=True, name="corpus_paragraphs", **given)


def _pii(**given: Any) -> Step:
    if "kinds" in given:
        given["kinds"] = tuple(given["kinds"])
    return Private(**given)


STEPS: dict[str, Any] = {  # name: what makes the step of its options
    "lengths": Lengths,
    "normalise": Normalise,
    "language": Language,
    "gopher_repetition": _gopher_repetition,
    "gopher_quality": _gopher_quality,
    "c4": _c4,
    "fineweb": _fineweb,
    "repeated_lines": RepeatedParts,
    "repeated_paragraphs": _repeated_paragraphs,
    "corpus_lines": CorpusLines,
    "corpus_paragraphs": _corpus_paragraphs,
    "pii": _pii,
    "decontaminate": Decontaminate,
    "classify": Classify,
    "filter": UserFilter,
}

OPTIONS: dict[str, type] = {  # whose fields are a step's options, where it is not the step itself
    "gopher_repetition": GopherRepetition,
    "gopher_quality": GopherQuality,
    "c4": C4,
    "fineweb": FineWeb,
    "repeated_paragraphs": RepeatedParts,
    "corpus_paragraphs": CorpusLines,
    "pii": Private,
}
