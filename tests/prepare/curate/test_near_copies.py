"""Planted near copies: found where they are similar, kept where they are not, one of a cluster stays."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from stoker.prepare.curate.batch import Batch
from stoker.prepare.curate.decontaminate import Decontaminate
from stoker.prepare.curate.recipe import Ask, Curation
from stoker.prepare.curate.words import folded_hashes, folded_words
from stoker.prepare.neardup import candidates, choose_sketch, clusters
from stoker.prepare.sources.documents import Texts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[..., Any]

SOUNDS = [a + b + c for a in "bcdfgklmnprst" for b in "aeiou" for c in "lmnrst"]


def original(seed: int, words: int = 240) -> str:
    chooser = random.Random(seed)
    found = [chooser.choice(SOUNDS) + chooser.choice(SOUNDS) for _ in range(words)]
    paragraphs = [" ".join(found[at : at + 40]).capitalize() + "." for at in range(0, words, 40)]
    return "\n\n".join(paragraphs)


def edited(text: str, share: float, seed: int) -> str:
    chooser = random.Random(seed)
    words = text.split(" ")
    for at in chooser.sample(range(len(words)), round(len(words) * share)):
        words[at] = chooser.choice(SOUNDS) + chooser.choice(SOUNDS)
    return " ".join(words)


def shuffled_paragraphs(text: str) -> str:
    parts = text.split("\n\n")
    return "\n\n".join([*parts[3:], *parts[:3]])


KINDS: dict[str, Callable[[str, int], str]] = {
    "one word in a hundred": lambda text, seed: edited(text, 0.01, seed),
    "two words in a hundred": lambda text, seed: edited(text, 0.02, seed),
    "capitals": lambda text, seed: text.upper(),
    "white space": lambda text, seed: text.replace(" ", "  \t").replace("\n\n", "\r\n \r\n"),
    "punctuation": lambda text, seed: text.replace(" ", ", ").replace(".", " !?"),
    "paragraphs moved": lambda text, seed: shuffled_paragraphs(text),
}
DISTINCT = {"ten words in a hundred": 0.1, "twenty words in a hundred": 0.2}


def jaccard(one: str, other: str) -> float:
    """The true similarity of two texts, computed without any of the code under test but the folding."""
    sets = [
        {tuple(words[at : at + 5]) for at in range(len(words) - 4)}
        for words in map(folded_words, (one, other))
    ]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


@pytest.mark.parametrize("kind", KINDS)
def test_planted_copies_are_found(kind: str, make: Make, write_jsonl: Any, tmp_path: Path) -> None:
    originals = [original(seed) for seed in range(100)]
    copies = [KINDS[kind](text, seed) for seed, text in enumerate(originals)]
    similar = sum(jaccard(one, other) >= 0.8 for one, other in zip(originals, copies, strict=True))
    found = make(write_jsonl(tmp_path / "x.jsonl", originals + copies), near_dedup=0.8).statistics
    assert similar >= 90
    assert found.dropped["near_duplicate"] == similar


@pytest.mark.parametrize("kind", DISTINCT)
def test_documents_under_the_similarity_stay(kind: str, make: Make, write_jsonl: Any, tmp_path: Path) -> None:
    originals = [original(seed) for seed in range(100)]
    copies = [edited(text, DISTINCT[kind], seed) for seed, text in enumerate(originals)]
    similar = sum(jaccard(one, other) >= 0.8 for one, other in zip(originals, copies, strict=True))
    found = make(write_jsonl(tmp_path / "x.jsonl", originals + copies), near_dedup=0.8).statistics
    assert similar == 0
    assert found.documents_out == 200


def test_a_chain_of_copies_is_one_cluster_of_which_the_longest_stays(
    make: Make, write_jsonl: Any, encode: Any, read_tokens: Any, tmp_path: Path
) -> None:
    chain = [original(1)]
    for step in range(4):
        chain.append(edited(chain[-1], 0.02, step))
    longest = chain.pop() + " " + " ".join(SOUNDS[:8])
    path = write_jsonl(tmp_path / "x.jsonl", [*chain, longest, original(2)])
    curation = Curation(keep="longest")
    made = make(path, near_dedup=0.7, shuffle=False, curation=curation)
    assert read_tokens(tmp_path / "out") == [encode(longest), encode(original(2))]
    assert made.statistics.dropped == {"near_duplicate": 4}


def test_copies_that_differ_in_case_and_marks_are_exact_copies_of_folded_texts(
    make: Make, write_jsonl: Any, tmp_path: Path
) -> None:
    texts = ["Coal, and steam!", "coal and  STEAM", "Çoal and steam", "coal or steam", "!!!", "???"]
    curation = Curation(steps=(Ask(step="lengths"),), fold=True)
    made = make(write_jsonl(tmp_path / "x.jsonl", texts), curation=curation)
    assert (made.statistics.documents_out, made.statistics.dropped) == (4, {"duplicate": 2})


@pytest.mark.long
def test_a_band_that_many_share_makes_no_square_of_pairs() -> None:
    rows = np.arange(100_000, dtype=np.uint64)
    pairs = candidates(np.zeros(100_000, np.uint64), rows)
    assert len(pairs) < 1_000_000
    assert len(set(clusters(pairs)[1].tolist())) == 1


@pytest.mark.parametrize("threshold", [0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
def test_pairs_at_the_threshold_are_nearly_all_candidates(threshold: float) -> None:
    sketch = choose_sketch(threshold)
    assert 1 - (1 - threshold**sketch.rows) ** sketch.bands >= 0.99


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2 + 3 = 5. The answer is 5.", "4 + 4 = 8. The answer is 8."),
        ("Call 1234 for fire.", "Call 12340 for fire."),
        ("वह की बात", "वह का बात"),  # vowel signs are no accents
    ],
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_documents_that_say_something_else_are_no_exact_copies(
    one: str, other: str, shuffle: bool, make: Make, write_jsonl: Any, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [one, other, one.upper() + "!"])
    found = make(path, curation=Curation(fold=True), shuffle=shuffle).statistics
    assert (found.documents_out, found.dropped) == (2, {"duplicate": 1})


def test_words_of_indian_scripts_stay_whole() -> None:
    assert folded_words("हिन्दी में। বাংলা தமிழ்") == ["हिन्दी", "में", "বাংলা", "தமிழ்"]


# Words, marks that compose, and what decomposes to several words; ASCII separates, and a mark may follow.
_ODD = "aZ9 ,_=\n'\u0301\u0338\u20ddΣσİßﬁ½ℂ…é가가日か\u3099हि\u00a0\x1c\x85\u2028\ud800"


@given(st.text(_ODD, max_size=40) | st.text(max_size=30))
def test_hashes_are_those_of_the_folded_words(text: str) -> None:
    expected = [xxhash.xxh3_64_intdigest(word.encode()) for word in folded_words(text)]
    assert folded_hashes(text).tolist() == expected
    assert folded_hashes(text).tolist() == expected  # known by now


def test_tables_of_other_numbers_are_no_near_copies(make: Make, write_jsonl: Any, tmp_path: Path) -> None:
    chooser = random.Random(0)
    texts = [
        " ".join(f"w{chooser.randrange(500)} {chooser.random():.3f}" for _ in range(50)) for _ in range(50)
    ]
    made = make(write_jsonl(tmp_path / "x.jsonl", texts), near_dedup=0.8, curation=Curation(fold=True))
    assert (made.statistics.documents_out, made.statistics.dropped) == (50, {})


def test_numbers_are_contaminated_by_the_same_numbers_only(tmp_path: Path) -> None:
    (tmp_path / "eval.txt").write_text("12 + 31 - 4 = 39 and 40 - 1 = 39\n")
    step = Decontaminate(against=(str(tmp_path / "eval.txt"),), ngram=5)
    texts = ["13 + 31 - 5 = 39 and 41 - 2 = 39", "So 12 + 31 - 4 = 39 and 40 - 1 = 39."]
    assert step.run(Batch(texts=Texts.of(texts), places=np.arange(2))).reasons == ["", "contaminated"]
