"""The rules beside datatrove's own: the same verdicts on documents of several languages and kinds.

`datatrove.json` holds datatrove 0.10.1's verdicts (spaCy 3 words) on the generator's first documents; the
slow test asks datatrove itself, on 20,000. Differences come from words: spaCy knows units (5km),
abbreviations and emoticons that one regular expression does not.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from made_documents import documents

from stoker.prepare.curate.pieces import count_sentences, words
from stoker.prepare.curate.rules import C4, FineWeb, GopherQuality, GopherRepetition

RECORDED = Path(__file__).with_name("datatrove.json")
OURS: dict[str, Any] = {
    "gopher_quality": GopherQuality().fault,
    "gopher_repetition": GopherRepetition().fault,
    "c4": lambda text: C4().edited(text)[1],
    "fineweb": FineWeb().fault,
}
AGREEMENT = 0.99


def datatrove_verdicts(texts: list[str]) -> dict[str, list[str]]:
    """What datatrove says of each text: the rule that it breaks, or nothing."""
    from datatrove.data import Document
    from datatrove.pipeline import filters

    theirs = {
        "gopher_quality": filters.GopherQualityFilter(),
        "gopher_repetition": filters.GopherRepetitionFilter(),
        "c4": filters.C4QualityFilter(),
        "fineweb": filters.FineWebQualityFilter(),
    }

    def verdict(one: Any, text: str) -> str:
        found = one.filter(Document(text=text, id=""))
        return "" if found is True else found[1]

    return {name: [verdict(one, text) for text in texts] for name, one in theirs.items()}


def check(texts: list[str], wanted: dict[str, list[str]]) -> None:
    for step, verdicts in wanted.items():
        found = [OURS[step](text) for text in texts]
        for rule in sorted(set(verdicts) | set(found)):
            same = sum((a == rule) == (b == rule) for a, b in zip(found, verdicts, strict=True))
            differences = Counter((a, b) for a, b in zip(verdicts, found, strict=True) if a != b)
            assert same / len(texts) >= AGREEMENT, (step, rule, differences.most_common(5))


def test_the_verdicts_are_those_that_datatrove_gave() -> None:
    recorded = json.loads(RECORDED.read_text())
    texts = documents(len(recorded["c4"]))
    assert {rule for verdicts in recorded.values() for rule in verdicts} >= {
        "gopher_enough_stop_words", "gopher_below_alpha_threshold", "top_3_gram", "dup_line_frac",
        "curly_bracket", "too_few_sentences", "line_punct_ratio", "char_dup_ratio", "short_line_ratio",
    }  # fmt: skip
    check(texts, recorded)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_verdicts_are_datatroves_on_twenty_thousand_documents() -> None:
    pytest.importorskip("datatrove")
    pytest.importorskip("spacy")
    texts = documents(20_000, seed=7)
    check(texts, datatrove_verdicts(texts))


@pytest.mark.parametrize("step", [GopherQuality(), GopherRepetition(), FineWeb()])
@pytest.mark.parametrize("text", ["", " ", "\n\n", "...", "a", "\u200b", "𝕏" * 500])
def test_odd_texts_have_a_verdict(step: Any, text: str) -> None:
    assert isinstance(step.fault(text), str)
    assert isinstance(C4().edited(text)[1], str)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("They don't say (U.S. $5km) hello...", "They do n't say ( U.S. $ 5 km ) hello ..."),
        ("I'm Dr. Who's son, 10:30 a.m.; 3am", "I 'm Dr. Who 's son , 10:30 a.m. ; 3 am"),
        ("if (x[0]):  y=a-b; f(x).y", "if ( x[0 ] ): y = a - b ; f(x).y"),
        ("see https://a.org/x?y=1, mail a@b.org.", "see https://a.org/x?y=1 , mail a@b.org ."),
        ("서울의 봄。다음 문장.", "서울의 봄。다음 문장 ."),
        ("well its hell, cannot wont", "well its hell , can not wo nt"),
    ],
)
def test_words_are_spacys(text: str, wanted: str) -> None:
    assert words(text) == wanted.split()


def test_a_million_brackets_are_parted_in_no_time() -> None:
    assert len(words("(" * 1_000_000)) == 1_000_000


def test_a_sentence_ends_where_no_abbreviation_does() -> None:
    assert count_sentences("Dr. Who came. He went! (Why?) Nobody knows... no", most=9) == 4
