"""Quality rules with their published thresholds: Gopher's, C4's and FineWeb's. Pure functions of a text.

Gopher: Rae et al. 2021, table A1 and appendix A. C4: Raffel et al. 2020, section 2.2. FineWeb: Penedo et al.
2024, section 3.6. Names of rules are datatrove's, and so is the order in which they are tried.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from stoker.prepare.curate.pieces import count_sentences, words

_GOPHER_STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
_MARKS = frozenset(
    "!/—”:％１〈&(、━\\【#%「」，】；+^]~“《„';’{|∶´[=-`*．（–？！：$～«〉,><》)?）。…@_.\"}►»।॥؟۔።៕။"
)
_SENTENCE_ENDS = tuple("?.!。！？｡．؟۔।॥።៕။՞։‼⁇⁈⁉‽")
_PARAGRAPHS, _LINES = re.compile(r"\n{2,}"), re.compile("\n+")
# Languages whose words are short, or that the Gopher stop words say nothing of
_OTHER_WORDS = frozenset(("ja", "zh", "ko", "th", "lo", "km", "my", "vi", "wuu", "yue"))


@dataclass(frozen=True, kw_only=True, slots=True)
class GopherQuality:
    """A rule whose threshold is 0 is off."""

    min_words: int = 50
    max_words: int = 100_000
    min_mean_word_length: float = 3
    max_mean_word_length: float = 10
    max_symbols_per_word: float = 0.1
    max_bullet_lines: float = 0.9
    max_ellipsis_lines: float = 0.3
    min_alphabetic_words: float = 0.8
    min_stop_words: int = 2

    def fault(self, text: str, language: str = "en") -> str:
        """The first rule a text breaks, or nothing. Of a language that is not English the stop words are not
        asked for, of one with short words or without spaces the length of words neither."""
        found = words(text)
        lengths = [len(word) for word in found if not _MARKS.issuperset(word)]
        if self.min_words and len(lengths) < self.min_words:
            return "gopher_short_doc"
        if self.max_words and len(lengths) > self.max_words:
            return "gopher_long_doc"
        mean = sum(lengths) / len(lengths) if lengths else 0.0
        if language not in _OTHER_WORDS:
            if mean < self.min_mean_word_length:
                return "gopher_below_avg_threshold"
            if self.max_mean_word_length and mean > self.max_mean_word_length:
                return "gopher_above_avg_threshold"
        return self._marks_fault(text, found) or self._words_fault(found, language)

    def _marks_fault(self, text: str, found: Sequence[str]) -> str:
        most = self.max_symbols_per_word
        if most and text.count("#") / max(1, len(found)) > most:
            return "gopher_too_many_hashes"
        if most and (text.count("...") + text.count("…")) / max(1, len(found)) > most:
            return "gopher_too_many_ellipsis"
        lines = text.splitlines() or [""]
        if (
            self.max_bullet_lines
            and _share(line.lstrip().startswith(("•", "-")) for line in lines) > self.max_bullet_lines
        ):
            return "gopher_too_many_bullets"
        if (
            self.max_ellipsis_lines
            and _share(line.rstrip().endswith(("...", "…")) for line in lines) > self.max_ellipsis_lines
        ):
            return "gopher_too_many_end_ellipsis"
        return ""

    def _words_fault(self, found: Sequence[str], language: str) -> str:
        alphabetic = sum(word.isalpha() or any(map(str.isalpha, word)) for word in found)
        if self.min_alphabetic_words and alphabetic / max(1, len(found)) < self.min_alphabetic_words:
            return "gopher_below_alpha_threshold"
        if (
            self.min_stop_words
            and language == "en"
            and len(_GOPHER_STOP_WORDS.intersection(found)) < self.min_stop_words
        ):
            return "gopher_enough_stop_words"
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GopherRepetition:
    """Shares of a text that repeat; 0 turns a rule off, an empty list the n-grams."""

    max_repeated_lines: float = 0.3
    max_repeated_paragraphs: float = 0.3
    max_repeated_line_chars: float = 0.2
    max_repeated_paragraph_chars: float = 0.2
    top_ngrams: tuple[tuple[int, float], ...] = ((2, 0.2), (3, 0.18), (4, 0.16))
    repeated_ngrams: tuple[tuple[int, float], ...] = (
        (5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10),
    )  # fmt: skip

    def fault(self, text: str, language: str = "en") -> str:
        if not text:
            return "empty"
        paragraphs, chars = _repeated(_PARAGRAPHS.split(text.strip()))
        if self.max_repeated_paragraphs and paragraphs > self.max_repeated_paragraphs:
            return "dup_para_frac"
        if self.max_repeated_paragraph_chars and chars / len(text) > self.max_repeated_paragraph_chars:
            return "dup_para_char_frac"
        lines, chars = _repeated(_LINES.split(text))
        if self.max_repeated_lines and lines > self.max_repeated_lines:
            return "dup_line_frac"
        if self.max_repeated_line_chars and chars / len(text) > self.max_repeated_line_chars:
            return "dup_line_char_frac"
        return self._ngram_fault(text)

    def _ngram_fault(self, text: str) -> str:
        found = words(text)
        numbers: dict[str, int] = {}
        ids = np.array([numbers.setdefault(word, len(numbers)) for word in found], np.uint64)
        ends = np.concatenate([[0], np.cumsum([len(word) for word in found], dtype=np.int64)])
        for size, most in self.top_ngrams:
            if _top_chars(ids, ends, size) / len(text) > most:
                return f"top_{size}_gram"
        for size, most in self.repeated_ngrams:
            hashes = _ngrams(ids, size)
            if len(np.unique(hashes)) == len(hashes):
                break  # what does not repeat repeats no longer either
            if _repeated_chars(hashes.tolist(), ends.tolist(), size) / len(text) > most:
                return f"duplicated_{size}_n_grams"
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FineWeb:
    """FineWeb's own rules."""

    min_ended_lines: float = 0.12
    max_short_lines: float = 0.67
    short_line: int = 30
    max_repeated_chars: float = 0.01
    max_newlines_per_word: float = 0.3

    def fault(self, text: str, language: str = "en") -> str:
        lines = [line for line in text.split("\n") if line.strip()]
        if not lines:
            return "empty"
        if (
            self.min_ended_lines
            and _share(line.endswith(_SENTENCE_ENDS) for line in lines) < self.min_ended_lines
        ):
            return "line_punct_ratio"
        if (
            self.max_short_lines
            and _share(len(line) <= self.short_line for line in lines) > self.max_short_lines
        ):
            return "short_line_ratio"
        newlines = text.count("\n")
        if self.max_repeated_chars and _repeated(lines)[1] / (len(text) - newlines) > self.max_repeated_chars:
            return "char_dup_ratio"
        if (
            self.max_newlines_per_word
            and newlines
            and newlines / max(1, len(words(text))) > self.max_newlines_per_word
        ):
            return "list_ratio"
        return ""


Rules = GopherQuality | GopherRepetition | FineWeb


def _share(marks: Iterable[bool]) -> float:
    found = list(marks)
    return sum(found) / len(found)


def _repeated(parts: Sequence[str]) -> tuple[float, int]:
    """The share of parts that stood before, and their characters."""
    seen: set[str] = set()
    count = chars = 0
    for part in parts:
        if part in seen:
            count, chars = count + 1, chars + len(part)
        seen.add(part)
    return count / len(parts), chars


def _ngrams(ids: npt.NDArray[np.uint64], size: int) -> npt.NDArray[np.uint64]:
    """A number for each run of so many words, the same for the same words."""
    count = max(0, len(ids) - size + 1)
    hashes = np.zeros(count, np.uint64)
    for ahead in range(size):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + ids[ahead : ahead + count] + np.uint64(1)
        hashes ^= hashes >> np.uint64(29)
    return hashes


def _top_chars(ids: npt.NDArray[np.uint64], ends: npt.NDArray[np.int64], size: int) -> int:
    """Characters, with spaces, that the most frequent n-gram covers; of equals the first."""
    hashes = _ngrams(ids, size)
    if not len(hashes):
        return 0
    _, first, counts = np.unique(hashes, return_index=True, return_counts=True)
    at = int(first[counts == counts.max()].min())
    return (int(ends[at + size] - ends[at]) + size - 1) * int(counts.max())


def _repeated_chars(hashes: Sequence[int], ends: Sequence[int], size: int) -> int:
    """Characters in n-grams that stood before, none counted twice."""
    seen: set[int] = set()
    chars = at = 0
    while at < len(hashes):
        if hashes[at] in seen:
            chars += ends[at + size] - ends[at]
            at += size
        else:
            seen.add(hashes[at])
            at += 1
    return chars


_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")


@dataclass(frozen=True, kw_only=True, slots=True)
class C4:
    """C4's rules: lines go, and pages with too little left."""

    terminal_punctuation: bool = True
    min_sentences: int = 5
    min_words_per_line: int = 3
    max_word_length: int = 1000
    lorem_ipsum: bool = True
    javascript: bool = True
    curly_bracket: bool = True
    policy: bool = True
    citations: bool = True

    def edited(self, text: str) -> tuple[str, str]:
        """(what is left of a text, the rule that drops all of it or nothing)."""
        kept, sentences = [], 0
        for line in map(str.strip, text.splitlines()):
            found = line.split()
            if (
                self.max_word_length
                and len(line) > self.max_word_length
                and max(map(len, found)) > self.max_word_length
            ):
                continue
            if self.citations and "[" in line:
                line = _CITATION.sub("", line)
            if self.terminal_punctuation and (
                not line.endswith((".", "?", "!", '"', "'")) or line.endswith("...")
            ):
                continue
            if len(found) < self.min_words_per_line:
                continue
            low = line.lower()
            if self.lorem_ipsum and "lorem ipsum" in low:
                return text, "lorem_ipsum"
            if self.javascript and "javascript" in low:
                continue
            if self.curly_bracket and "{" in line:
                return text, "curly_bracket"
            if self.policy and any(phrase in low for phrase in _POLICY):
                continue
            if sentences < self.min_sentences:
                sentences += count_sentences(line, most=self.min_sentences)
            kept.append(line)
        if sentences < self.min_sentences:
            return text, "too_few_sentences"
        return "\n".join(kept).strip(), ""


def without_repeated_parts(text: str, *, paragraphs: bool, min_chars: int) -> str:
    """A text whose lines, or paragraphs, stand in it once; short ones (of a list, say) may repeat."""
    pieces = re.split(r"(\n{2,})" if paragraphs else r"(\n)", text)
    seen: set[str] = set()
    kept: list[str] = []
    for part, ending in pairwise([*pieces, ""]):
        if part.strip("\n") == "" and kept and part:
            continue  # a separator, which goes with the part before it
        folded = " ".join(part.split()).lower()
        if len(folded) >= min_chars and folded in seen:
            continue
        seen.add(folded)
        kept.append(part + (ending if ending.strip("\n") == "" else ""))
    return "".join(kept)
