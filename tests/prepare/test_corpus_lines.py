"""Lines and paragraphs over the whole corpus: the first document keeps them, others lose them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from stoker.errors import UsageError
from stoker.prepare.curate.recipe import parse_recipe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[..., Any]

MENU = "Home | Products | About us | Contact us | Terms"


def curation(*steps: Any) -> Any:
    return parse_recipe(list(steps), name="x").curation


def test_the_first_document_keeps_a_line_and_others_lose_it(
    make: Make, write_jsonl: Any, encode: Any, read_tokens: Any, tmp_path: Path
) -> None:
    pages = [f"{MENU}\nPage {n} has its own words.\nshort" for n in range(5)]
    one = write_jsonl(tmp_path / "1.jsonl", pages[:2])
    two = write_jsonl(tmp_path / "2.jsonl", [*pages[2:], f"  {MENU.upper()}  ", f"x\n{MENU}\ny\n{MENU}"])
    made = make(one, two, curation=curation("corpus_lines"), shuffle=False).statistics
    wanted = [pages[0], *(page.removeprefix(f"{MENU}\n") for page in pages[1:]), "x\ny"]
    assert read_tokens(tmp_path / "out") == [encode(text) for text in wanted]
    assert made.found["corpus_lines", "lines"] == 7
    assert made.dropped == {"only_repeated_lines": 1}
    assert made.changed["corpus_lines", "changed", str(two)] == 4


def test_paragraphs_are_looked_at_whole(
    make: Make, write_jsonl: Any, encode: Any, read_tokens: Any, tmp_path: Path
) -> None:
    same = f"{MENU}\nand a second line"
    path = write_jsonl(
        tmp_path / "1.jsonl", [f"{same}\n\nfirst", f"second\n\n{same}\n\nend", f"{MENU}\nalone"]
    )
    make(path, curation=curation("corpus_paragraphs"), shuffle=False, dedup=False)
    wanted = [f"{same}\n\nfirst", "second\n\nend", f"{MENU}\nalone"]
    assert read_tokens(tmp_path / "out") == [encode(text) for text in wanted]


def test_lines_are_compared_as_the_steps_before_left_them(
    make: Make, write_jsonl: Any, encode: Any, read_tokens: Any, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "1.jsonl", [f"{MENU} a@b.example\none", f"{MENU} c@d.example\ntwo"])
    make(path, curation=curation("pii", "corpus_lines"), shuffle=False)
    assert read_tokens(tmp_path / "out") == [encode(f"{MENU} <EMAIL>\none"), encode("two")]


@pytest.mark.long
def test_any_order_of_tasks_gives_the_same_bytes(
    make: Make, large_corpus: Path, inline: Any, snapshot: Any, tmp_path: Path
) -> None:
    given = {"curation": curation("normalise", "corpus_lines"), "shard_bytes": 1 << 20}
    made = make(large_corpus, out=tmp_path / "a", **given)
    make(large_corpus, out=tmp_path / "b", launcher=inline(order=lambda numbers: numbers[::-1]), **given)
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")
    assert made.statistics.found["corpus_lines", "lines"] > 1000


def test_the_corpus_is_looked_at_once() -> None:
    with pytest.raises(UsageError, match="once"):
        curation("corpus_lines", "corpus_paragraphs")
