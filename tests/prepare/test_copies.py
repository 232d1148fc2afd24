"""Copies and near copies: the first stays, the others go and are counted."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from stoker.errors import UsageError
from stoker.prepare import tasks
from stoker.prepare.shuffle import Gathered, gather

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[..., Any]
    Read = Callable[..., list[list[int]]]
    Encode = Callable[[str], list[int]]


def test_many_copies_of_a_document_do_not_meet_in_memory(
    make: Make, write_jsonl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[int] = []

    def measured(*args: Any, **given: Any) -> Gathered:
        cell = gather(*args, **given)
        gathered.append(cell.bytes)
        return cell

    monkeypatch.setattr(tasks, "gather", measured)
    made = make(write_jsonl(tmp_path / "a.jsonl", ["404 Not Found " * 50] * 5000))
    assert made.manifest.samples == 1
    assert made.statistics.dropped == {"duplicate": 4999}
    assert max(gathered) < 2000


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_exact_copy_is_dropped(
    shuffle: bool, make: Make, texts: list[str], write_jsonl: Any, read_tokens: Read, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [*texts[:50], *texts[:10], texts[3]])
    found = make(path, shuffle=shuffle).statistics
    assert (found.documents_out, found.dropped) == (50, {"duplicate": 11})


def test_without_a_shuffle_the_first_copy_stays(
    make: Make, write_jsonl: Any, encode: Encode, read_tokens: Read, tmp_path: Path
) -> None:
    make(write_jsonl(tmp_path / "x.jsonl", ["a", "b", "a", "c", "b"]), shuffle=False)
    assert read_tokens(tmp_path / "out") == [encode("a"), encode("b"), encode("c")]


@pytest.mark.parametrize("shuffle", [False, True])
def test_copies_are_kept_if_asked(
    shuffle: bool, make: Make, texts: list[str], write_jsonl: Any, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [*texts[:50], *texts[:10]])
    assert make(path, shuffle=shuffle, dedup=False).statistics.documents_out == 60


def test_copies_in_different_files_are_found(
    make: Make, texts: list[str], write_jsonl: Any, tmp_path: Path
) -> None:
    one, other = (write_jsonl(tmp_path / f"{name}.jsonl", texts[:20]) for name in "xy")
    assert make(one, other).statistics.dropped == {"duplicate": 20}


def test_documents_that_differ_in_one_character_are_no_copies(
    make: Make, write_jsonl: Any, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ["same text", "same text.", "same text ", "Same text"])
    assert make(path).statistics.documents_out == 4


def prose(seed: int, words: int = 300) -> str:
    chooser = random.Random(seed)
    return " ".join(
        f"{chooser.choice('bcdfgklmnprst')}{chooser.choice('aeiou')}{chooser.randrange(100)}"
        for _ in range(words)
    )


def edited(text: str) -> str:
    """The text with one word in a hundred replaced."""
    words = text.split(" ")
    words[50:150:50] = ["changed", "here"]
    return " ".join(words)


@pytest.fixture
def near(write_jsonl: Any, tmp_path: Path) -> tuple[Path, list[str]]:
    """Fifty documents, then edited copies of twenty of them."""
    originals = [prose(seed) for seed in range(50)]
    return write_jsonl(tmp_path / "near.jsonl", [*originals, *map(edited, originals[:20])]), originals


@pytest.mark.parametrize("shuffle", [False, True])
def test_near_copies_are_found(shuffle: bool, near: Any, make: Make) -> None:
    assert make(near[0], near_dedup=0.8, shuffle=shuffle).statistics.dropped["near_duplicate"] == 20


def test_of_near_copies_the_first_stays(
    near: Any, make: Make, encode: Encode, read_tokens: Read, tmp_path: Path
) -> None:
    make(near[0], near_dedup=0.8, shuffle=False)
    assert read_tokens(tmp_path / "out") == [encode(text) for text in near[1]]


def test_distinct_documents_are_no_near_copies(make: Make, write_jsonl: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [prose(seed) for seed in range(200)])
    assert make(path, near_dedup=0.8).statistics.documents_out == 200


def test_without_near_dedup_near_copies_stay(near: Any, make: Make) -> None:
    assert make(near[0]).statistics.documents_out == 70


def test_near_and_exact_copies_are_counted_apart(
    near: Any, make: Make, write_jsonl: Any, tmp_path: Path
) -> None:
    copies = write_jsonl(tmp_path / "zcopies.jsonl", near[1][:5])
    dropped = make(near[0], copies, near_dedup=0.8).statistics.dropped
    assert dropped == {"duplicate": 5, "near_duplicate": 20}


def test_short_documents_are_near_copies_only_of_their_like(
    make: Make, write_jsonl: Any, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ["a", "b", "c d", "c e", "x y z", "x y"])
    assert make(path, near_dedup=0.8).statistics.documents_out == 6


@pytest.mark.integration
def test_near_copies_are_the_same_whatever_the_order_of_tasks(
    large_corpus: Path, make: Make, inline: Any, snapshot: Any, tmp_path: Path
) -> None:
    make(large_corpus, out=tmp_path / "a", near_dedup=0.7, shard_bytes=4 << 20)
    backward = inline(lambda numbers: numbers[::-1])
    make(large_corpus, out=tmp_path / "b", near_dedup=0.7, shard_bytes=4 << 20, launcher=backward)
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")


@pytest.mark.parametrize("threshold", [-0.1, 1.0, 7.0])
def test_a_threshold_that_is_no_similarity_is_refused(threshold: float, make: Make, corpus: Path) -> None:
    with pytest.raises(UsageError, match="is not a similarity"):
        make(corpus, near_dedup=threshold)
