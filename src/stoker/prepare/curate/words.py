"""Words: as the published rules count them, and folded as copies are compared.

The rules of Gopher, C4 and FineWeb are used as datatrove has them, whose words are spaCy's: punctuation
stands alone, numbers and abbreviations stay whole, English contractions part. One regular expression does
that here; where the two differ is told in docs/concepts/curation.md.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import xxhash

_MARK = (
    r"!-/:-@\[-^`{-~\u2010-\u2027\u2030-\u205e\u00a1-\u00bf\u3001-\u3003\u3008-\u3020"
    r"\uff01-\uff0f\uff1a-\uff20"
)
_RUN = rf"[^\s{_MARK}]"
# Marks that stay inside a word where one follows: f(x).y, a@b.org; hyphens, slashes and dashes part it.
_INNER = r"()\[\]{}\"@#$%&*+|\\?!;^`~"
_ENDING = r"(?:s|S|re|RE|ve|VE|ll|LL|d|D|m|M)\b"
_WORD = re.compile(
    rf"""
      \.\.+ | --+
    | \d+(?:[.,:]\d+)+                      # 1,000.50 and 10:30
    | (?:[A-Za-z]\.){{2,}}                  # U.S.
    | {_RUN}+?(?=[nN]['’][tT]\b) | [nN]['’][tT]\b   # do + n't
    | ['’]{_ENDING}
    | {_RUN}+(?:(?:['’](?!{_ENDING})|\.(?=[a-z0-9])|[{_INNER}]+){_RUN}+)*
    | \S
    """,
    re.VERBOSE,
)

# Scripts that write no spaces: each character counts as a word where copies are compared.
_ALONE = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
# Vowel signs and the like of Indian scripts, which Python takes for no part of a word (the danda is none).
_SIGNS = r"\u0900-\u0963\u0966-\u0dff"
_FOLDED = re.compile(rf"[{_ALONE}]|(?:[^\W_{_ALONE}]|[{_SIGNS}])+")
_ACCENTS = re.compile(r"[\u0300-\u036f\u0483-\u0487\u0591-\u05bd\u064b-\u065f\u3099\u309a]")

Hashes = npt.NDArray[np.uint64]


def words(text: str) -> list[str]:
    """The words and marks of a text."""
    return _WORD.findall(text)


def folded_words(text: str) -> list[str]:
    """Lower case, no punctuation, no accents: what is left of a text when the differences that make no other
    document of it are gone. Numbers stay: with every number 0, as datatrove has it, all tables are copies of
    one another, all sums too, and each holds any evaluation set of them."""
    text = text.lower()
    if not text.isascii():
        text = unicodedata.normalize("NFC", _ACCENTS.sub("", unicodedata.normalize("NFKD", text)))
    return _FOLDED.findall(text)


def folded_hashes(text: str) -> Hashes:
    """A 64-bit hash of each folded word."""
    found = folded_words(text)
    return np.fromiter(map(_hash, found), np.uint64, count=len(found))


@lru_cache(1 << 17)  # words repeat: a hit costs a third of the hash
def _hash(word: str) -> int:
    return xxhash.xxh3_64_intdigest(word.encode())
