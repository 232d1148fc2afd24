"""Language identification: right on 27 languages, no worse than another library, code told apart."""

from __future__ import annotations

import pytest
from sentences import PROGRAMS, SENTENCES

from stoker.errors import UsageError
from stoker.prepare.curate.batch import Batch
from stoker.prepare.curate.language import Language, identify
from stoker.prepare.sources.documents import Documents


def batch(*texts: str) -> Batch:
    documents = Documents.of(list(texts), list(range(len(texts))))
    return Batch(texts=documents.texts, places=documents.places)


def test_nearly_every_sentence_is_told() -> None:
    cases = [(language, text) for language, texts in SENTENCES.items() for text in texts]
    wrong = [(language, identify(text)) for language, text in cases if identify(text)[0] != language]
    assert len(SENTENCES) >= 20
    assert len(wrong) <= len(cases) // 50, wrong


@pytest.mark.parametrize("language", ["ko", "ja", "zh", "en"])
def test_the_languages_most_asked_for_are_told_and_surely(language: str) -> None:
    found, score = identify(" ".join(SENTENCES[language]))
    assert (found, score > 0.65) == (language, True)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_code(program: str) -> None:
    assert identify(program)[0] == "code"


@pytest.mark.parametrize("text", ["", "12345 67", "\n\n", "!!! ???"])
def test_what_has_no_letters_has_no_language(text: str) -> None:
    assert identify(text) == ("und", 0.0)


def test_documents_of_other_languages_go() -> None:
    outcome = Language(keep=("ko",)).run(batch(SENTENCES["ko"][0], SENTENCES["de"][0]))
    assert list(outcome.reasons) == ["", "language_de"]
    assert outcome.found == {"ko": 1, "de": 1}


def test_of_a_mixed_document_the_lines_in_other_languages_go() -> None:
    mixed = "\n".join([SENTENCES["ko"][0], SENTENCES["en"][0], SENTENCES["ko"][1]])
    outcome = Language(keep=("ko",), by_line=True).run(batch(mixed))
    assert outcome.texts is not None
    assert outcome.texts.strings == ["\n".join(SENTENCES["ko"])]


def test_lines_need_to_know_which_languages_stay() -> None:
    with pytest.raises(UsageError, match="by_line"):
        Language(by_line=True)
