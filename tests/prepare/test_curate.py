"""Which documents stay: lengths, quality rules, the user's own filter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from curations import curation_of
from stoker.errors import TaskError, UsageError
from stoker.prepare.curate.rules import GopherQuality, GopherRepetition
from stoker.prepare.curate.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[..., Any]
    Encode = Callable[[str], list[int]]


PROSE = (
    "The fireman shovels coal into the firebox while the driver watches the line ahead of the train. "
    "Without steam nothing moves, and without coal there is no steam, so the work never ends. "
    "In winter the cab is warm near the fire and freezing everywhere else, which everybody learns soon. "
    "At every stop they take water, oil the bearings and rake the ash from under the grate again."
)


def fault(text: str) -> str:
    return GopherRepetition().fault(text) or GopherQuality().fault(text)


def test_prose_breaks_no_rule() -> None:
    assert fault(PROSE) == ""


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (" ".join(PROSE.split()[:45]), "gopher_short_doc"),
        (PROSE.replace(" ", " ... "), "gopher_too_many_ellipsis"),
        (PROSE.replace(" ", " # "), "gopher_too_many_hashes"),
        (PROSE + " ".join(map(str, range(1000, 1080))), "gopher_below_alpha_threshold"),
        ("\n".join(["the very same line of text again"] * 20), "dup_line_frac"),
        ("lorem ipsum " * 200, "top_2_gram"),
        ("\n".join(f"- {line}" for line in PROSE.split(". ")), "gopher_too_many_bullets"),
        ("...\n".join(PROSE.split(". ")) + "...", "gopher_too_many_end_ellipsis"),
        (" ".join(f"{word[::-1]}{at}x" for at, word in enumerate(PROSE.split())), "gopher_enough_stop_words"),
    ],
)
def test_the_first_broken_rule_is_named(text: str, rule: str) -> None:
    assert fault(text) == rule


def test_quality_drops_what_breaks_a_rule(
    make: Make, write_jsonl: Any, encode: Encode, read_tokens: Any, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [PROSE, "too short", PROSE + " 12345" * 80])
    found = make(path, curation=curation_of(quality=True)).statistics
    assert (read_tokens(tmp_path / "out"), found.dropped) == (
        [encode(PROSE)],
        {"top_2_gram": 2},
    )


def test_short_and_long_documents_are_dropped(
    make: Make, write_jsonl: Any, encode: Encode, read_tokens: Any, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ["ab", "abc", "äöüß", "abcde", "abcdef"])
    found = make(path, curation=curation_of(min_chars=3, max_chars=5), shuffle=False).statistics
    assert read_tokens(tmp_path / "out") == [encode(text) for text in ("abc", "äöüß", "abcde")]
    assert found.dropped == {"too_short": 1, "too_long": 1}


FILTER = """
def judge(text):
    if "secret" in text:
        return text.replace("secret", "[gone]")
    if "nothing" in text:
        return text.replace("nothing", "")
    return "spam" not in text

def breaks(text):
    raise ZeroDivisionError("boom")
"""


@pytest.fixture
def filter_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"filter_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(FILTER)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_filter_keeps_drops_and_replaces(
    filter_module: str, make: Make, write_jsonl: Any, encode: Encode, read_tokens: Any, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ["fine", "spam spam", "a secret"])
    found = make(path, curation=curation_of(filter=f"{filter_module}:judge"), shuffle=False).statistics
    assert read_tokens(tmp_path / "out") == [encode("fine"), encode("a [gone]")]
    assert found.dropped == {"filter": 1}


def test_what_a_filter_leaves_too_short_is_dropped(
    filter_module: str, make: Make, write_jsonl: Any, encode: Encode, read_tokens: Any, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ["fine", "nothing", "nothing!"])
    found = make(path, curation=curation_of(filter=f"{filter_module}:judge"), shuffle=False).statistics
    assert read_tokens(tmp_path / "out") == [encode("fine"), encode("!")]
    assert found.dropped == {"empty": 1}
    assert found.bytes_in == len("fine" + "nothing" + "nothing!")


@pytest.mark.parametrize("content", ["def judge(:", "raise RuntimeError('no GPU')", "judge = 3"])
def test_a_filter_whose_module_is_broken_is_wrong_usage(
    content: str, filter_module: str, make: Make, corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / f"{filter_module}.py").write_text(content)
    with pytest.raises(UsageError, match="cannot load the filter"):
        make(corpus, curation=curation_of(filter=f"{filter_module}:judge"))


def test_a_filter_that_raises_fails_the_task_in_its_own_words(
    filter_module: str, make: Make, write_jsonl: Any, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ["fine"])
    with pytest.raises(TaskError, match=r"the filter .*:breaks: ZeroDivisionError: boom"):
        make(path, curation=curation_of(filter=f"{filter_module}:breaks"))


@pytest.mark.parametrize("name", ["nonsense", "no_such_module_of_ours:f", "json:no_such_function"])
def test_a_filter_that_cannot_be_loaded_is_wrong_usage(name: str, make: Make, corpus: Path) -> None:
    with pytest.raises(UsageError, match="cannot load the filter"):
        make(corpus, curation=curation_of(filter=name))


def test_a_filter_works_in_worker_processes(
    filter_module: str, run_stoker: Any, write_jsonl: Any, tokenizer_path: Path, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ["fine", "spam spam"])
    arguments = ["--out", tmp_path / "out", "--tokenizer", tokenizer_path, "--workers", 1]
    ran = run_stoker(
        "prepare", path, *arguments, "--filter", f"{filter_module}:judge", env={"PYTHONPATH": str(tmp_path)}
    )
    assert "dropped  1 document: filter" in ran.stdout


def test_statistics_of_tasks_add_up() -> None:
    one, other = Statistics(documents_in=3), Statistics(documents_in=4)
    one.drop("filter", 10)
    other.drop("filter", 5, documents=2)
    one.add(other)
    assert (one.documents_in, one.dropped, one.dropped_bytes) == (7, {"filter": 3}, {"filter": 15})


def test_statistics_come_back_from_their_plain_form() -> None:
    one = Statistics(documents_in=3, lengths={2: 5})  # type: ignore[arg-type]
    one.drop("filter", 10)
    one.note_bad("invalid_json", "a.jsonl at byte 3")
    assert Statistics.from_plain(one.to_plain()) == one
