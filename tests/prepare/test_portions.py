"""Weights, caps and parts held out: told by content, the same on any machine, counted in the funnel."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from stoker.errors import BadInputError, UsageError
from stoker.manifest import read_manifest
from stoker.prepare.check import verify_dataset
from stoker.prepare.finish import read_statistics
from stoker.prepare.portions import Share, held_out, parse_holdout, parse_share
from stoker.prepare.sources.documents import Texts
from stoker.report.curation import funnel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[..., Any]
    Encode = Callable[[str], list[int]]
    Read = Callable[..., list[list[int]]]


def bag(documents: list[list[int]]) -> Counter[tuple[int, ...]]:
    return Counter(map(tuple, documents))


# --- held out -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": False}, {"dedup": False}, {"shuffle": False, "dedup": False}]
)
def test_parts_held_out_are_datasets_and_nothing_is_lost(
    options: dict[str, Any],
    make: Make,
    corpus: Path,
    texts: list[str],
    encode: Encode,
    read_tokens: Read,
    tmp_path: Path,
) -> None:
    holdout = (("validation", 0.1), ("test", 0.05))
    made = make(corpus, holdout=holdout, **options)
    folders = [tmp_path / "out", tmp_path / "out" / "validation", tmp_path / "out" / "test"]
    parts = [bag(read_tokens(folder)) for folder in folders]
    assert sum(parts, Counter()) == bag([encode(text) for text in texts])
    assert 0.04 < sum(parts[1].values()) / len(texts) < 0.2
    assert [verify_dataset(str(folder)) for folder in folders] == [[], [], []]
    assert made.statistics.dropped["held_out_validation"] == sum(parts[1].values())
    assert "holdout" in made.statistics.order


def test_copies_that_differ_in_case_and_white_space_are_on_one_side() -> None:
    some = [f"Document number {n} says: something." for n in range(2000)]
    other = [text.upper().replace(" ", "  \n") + "!!" for text in some]
    holdout = parse_holdout("validation=0.3,test=0.2")
    sides = held_out(Texts.of(some), holdout)
    assert sides.tolist() == held_out(Texts.of(other), holdout).tolist()
    assert np.allclose(np.bincount(sides) / len(some), [0.5, 0.3, 0.2], atol=0.05)


def test_a_document_stays_on_its_side_with_another_seed_or_source(
    make: Make, corpus: Path, write_jsonl: Any, read_tokens: Read, tmp_path: Path
) -> None:
    more = write_jsonl(tmp_path / "more.jsonl", [f"another document, number {n}" for n in range(300)])
    holdout = (("validation", 0.2),)
    make(corpus, holdout=holdout, out=tmp_path / "a")
    make(more, corpus, holdout=holdout, seed=5, out=tmp_path / "b")
    small, large = (bag(read_tokens(tmp_path / name / "validation")) for name in "ab")
    assert small <= large
    assert not bag(read_tokens(tmp_path / "a")) & large


def test_near_copies_are_on_one_side(make: Make, write_jsonl: Any, read_tokens: Read, tmp_path: Path) -> None:
    words = [f"w{n}x" for n in range(4000)]
    chooser = np.random.default_rng(1)
    firsts = [" ".join(chooser.choice(words, 120)) for _ in range(80)]
    seconds = [text + " and a few more" for text in firsts]
    path = write_jsonl(tmp_path / "x.jsonl", [*firsts, *seconds])
    make(path, holdout=(("validation", 0.5),), near_dedup=0.8)
    sides = [read_tokens(tmp_path / "out"), read_tokens(tmp_path / "out" / "validation")]
    assert sum(map(len, sides)) == 80  # of each pair one is left, on one side


def test_a_part_that_gets_nothing_is_told(make: Make, write_jsonl: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ["one", "two"])
    with pytest.raises(BadInputError, match="validation"):
        make(path, holdout=(("validation", 1e-9),))


@pytest.mark.parametrize(
    "text", ["validation", "validation=2", "a=0.5,b=0.5", "../x=0.1", "loss_mask=0.1", "A=x"]
)
def test_parts_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_holdout(text)


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dedup", [True, False])
def test_a_weight_under_one_takes_that_share_and_counts_the_rest(
    dedup: bool, make: Make, write_jsonl: Any, encode: Encode, read_tokens: Read, tmp_path: Path
) -> None:
    some, other = ([f"{name} {n}" for n in range(1000)] for name in ("some", "other"))
    one, two = write_jsonl(tmp_path / "1.jsonl", some), write_jsonl(tmp_path / "2.jsonl", other)
    made = make(two, shares=(Share(path=str(one), weight=0.3),), dedup=dedup).statistics
    out = bag(read_tokens(tmp_path / "out"))
    assert all(out[tuple(encode(text))] == 1 for text in other)
    taken = sum(out[tuple(encode(text))] for text in some)
    assert 240 < taken < 360
    assert made.funnel["sampling", "sampled_out", str(one)] == 1000 - taken == made.dropped["sampled_out"]


@pytest.mark.parametrize("options", [{}, {"dedup": False}, {"near_dedup": 0.8}, {"format": "webdataset"}])
def test_a_weight_over_one_takes_documents_again(
    options: dict[str, Any], make: Make, write_jsonl: Any, encode: Encode, read_tokens: Read, tmp_path: Path
) -> None:
    some = [f"{n} {n * 7} {n * 13} some words {n * 17} {n * 29}" for n in range(400)]
    one = write_jsonl(tmp_path / "1.jsonl", [*some, *some[:100]])
    made = make(shares=(Share(path=str(one), weight=2.5),), **options)
    extra = 100 * (options.get("dedup") is False)
    assert 2.35 * (400 + extra) < made.manifest.samples < 2.65 * (400 + extra)
    if options.get("format") != "webdataset":
        out = bag(read_tokens(tmp_path / "out"))
        times = {out[tuple(encode(text))] for text in some[100:]}
        assert times == {2, 3}


def test_documents_taken_again_stand_apart(
    make: Make, write_jsonl: Any, read_tokens: Read, tmp_path: Path
) -> None:
    one = write_jsonl(tmp_path / "1.jsonl", [f"document {n}" for n in range(500)])
    make(shares=(Share(path=str(one), weight=2),))
    out = [tuple(ids) for ids in read_tokens(tmp_path / "out")]
    assert sum(one == other for one, other in pairwise(out)) < 10
    assert set(Counter(out).values()) == {2}


def test_parts_held_out_are_not_taken_again(
    make: Make, write_jsonl: Any, read_tokens: Read, tmp_path: Path
) -> None:
    one = write_jsonl(tmp_path / "1.jsonl", [f"document {n}" for n in range(300)])
    make(shares=(Share(path=str(one), weight=3),), holdout=(("validation", 0.2),), epochs=2)
    train, held = bag(read_tokens(tmp_path / "out")), bag(read_tokens(tmp_path / "out" / "validation"))
    assert (set(train.values()), set(held.values())) == ({3}, {1})
    assert not train & held


def test_a_weight_over_one_without_a_shuffle_is_refused(make: Make, corpus: Path) -> None:
    with pytest.raises(UsageError, match="side by side"):
        make(shares=(Share(path=str(corpus), weight=2),), shuffle=False)


# --- caps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"dedup": False}, {"shuffle": False}, {"shuffle": False, "dedup": False}, {"near_dedup": 0.8}],
)
def test_a_cap_is_met_and_what_is_over_it_counted(
    options: dict[str, Any], make: Make, write_jsonl: Any, encode: Encode, read_tokens: Read, tmp_path: Path
) -> None:
    some, other = ([f"{name} {n}" for n in range(1000)] for name in ("some", "other"))
    one, two = write_jsonl(tmp_path / "1.jsonl", [*some, *some]), write_jsonl(tmp_path / "2.jsonl", other)
    made = make(two, shares=(Share(path=str(one), max_tokens=1500),), **options).statistics
    taken = made.sources["tokens_out", str(one)]
    assert 1450 <= taken <= 1500
    out = bag(read_tokens(tmp_path / "out"))
    assert all(out[tuple(encode(text))] == 1 for text in other)
    assert made.funnel["caps", "over_cap", str(one)] == made.dropped["over_cap"] > 0
    assert verify_dataset(str(tmp_path / "out")) == []


def test_a_cap_over_what_there_is_changes_nothing(
    make: Make, corpus: Path, snapshot: Any, tmp_path: Path
) -> None:
    make(corpus, out=tmp_path / "a")
    make(shares=(Share(path=str(corpus), max_tokens=10**12),), out=tmp_path / "b")
    a, b = (snapshot(tmp_path / name) for name in "ab")
    assert {k: v for k, v in a.items() if k.endswith((".bin", ".idx"))} == {
        k: v for k, v in b.items() if k.endswith((".bin", ".idx"))
    }


def test_the_funnel_ends_with_what_is_kept(make: Make, write_jsonl: Any, tmp_path: Path) -> None:
    some = [f"document number {n} of some" for n in range(400)]
    one = write_jsonl(tmp_path / "1.jsonl", [*some, *some[:50]])
    two = write_jsonl(tmp_path / "2.jsonl", [f"{text} and others" for text in some] + some[:20])
    shares = (Share(path=str(one), weight=2.5), Share(path=str(two), weight=0.5, max_tokens=1000))
    found = make(shares=shares, holdout=(("validation", 0.1),)).statistics
    last = funnel(found)[-1]
    assert last.documents - last.gone == found.documents_out
    assert found.documents_in + found.found["weights", "taken_again"] == found.documents_out + sum(
        found.dropped.values()
    )


# --- the same everywhere --------------------------------------------------------------------------


@pytest.mark.long
def test_portions_are_the_same_bytes_in_any_order_of_tasks(
    make: Make, large_corpus: Path, inline: Any, snapshot: Any, tmp_path: Path
) -> None:
    names = sorted(large_corpus.glob("*.jsonl"))
    shares = (
        Share(path=str(names[0]), weight=1.5),
        Share(path=str(names[1]), weight=0.5, max_tokens=200_000),
    )
    given = {"shares": shares, "holdout": (("validation", 0.05),), "shard_bytes": 1 << 20}
    make(names[2], out=tmp_path / "a", **given)
    make(names[2], out=tmp_path / "b", launcher=inline(order=lambda numbers: numbers[::-1]), **given)
    a, b = (snapshot(tmp_path / name) for name in "ab")
    assert a == b
    assert len(read_manifest(tmp_path / "a").shards) > 1


def test_the_command_takes_sources_and_parts(
    run_stoker: Any, write_jsonl: Any, tokenizer_path: Path, tmp_path: Path
) -> None:
    rows = "".join(json.dumps({"head": f"h{n}", "body": f"b{n}"}) + "\n" for n in range(200))
    (tmp_path / "a.jsonl").write_text(rows)
    write_jsonl(tmp_path / "b.jsonl", [f"plain {n}" for n in range(200)])
    ran = run_stoker(
        "prepare", tmp_path / "b.jsonl", "--tokenizer", tokenizer_path, "--out", tmp_path / "out",
        "--source", rf"path={tmp_path / 'a.jsonl'},weight=0.5,template={{head}}, {{body}}",
        "--holdout", "validation=0.1", "--workers", "2",
    )  # fmt: skip
    assert ran.rc == 0, ran.stderr
    found = read_statistics(str(tmp_path / "out"))
    assert 60 < found.dropped["sampled_out"] < 140
    assert read_manifest(tmp_path / "out" / "validation").samples == found.dropped["held_out_validation"]


def test_a_source_says_what_it_cannot_take() -> None:
    assert parse_share("path=a,b/,weight=2") == Share(path="a,b/", weight=2.0)
    assert parse_share("path=x,max-tokens=1e9").max_tokens == 10**9
    for text in (
        "weight=1",
        "path=x,wait=2",
        "path=x,weight=0",
        "path=x,weight=nan",
        "path=x,max-tokens=inf",
    ):
        with pytest.raises(UsageError):
            parse_share(text)
