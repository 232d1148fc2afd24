"""The same command makes what it made (`kept_datasets.py`); copies against plain models."""

from __future__ import annotations

import json
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_datasets import COMMANDS, KEPT, PLANS, RECORD, adopted, dataset, planned

from kept_values import alike, kept
from stoker.errors import UsageError
from stoker.prepare.neardup import (
    HASHES,
    Sketch,
    candidates,
    choose_sketch,
    clusters,
    later_copies,
    similarity,
    sketches,
)
from stoker.prepare.plan import Options, make_plan
from stoker.prepare.shuffle import DOCUMENT, Cells
from stoker.prepare.sources.documents import Source
from stoker.prepare.spill import Marks

PLANNED, DATASETS = kept(KEPT / "plans.json"), kept(KEPT / "datasets.json")


@pytest.mark.parametrize("seed", range(PLANS))
def test_a_command_is_cut_into_the_tasks_it_was_cut_into(seed: int) -> None:
    found, was = json.loads(json.dumps(planned(seed))), PLANNED[str(seed)]
    assert found.keys() == was.keys()
    for part, one in was.items():
        assert alike(one, found[part]), f"{part}: {found[part]}\nwas {one}"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_makes_the_dataset_it_made(name: str) -> None:
    found, was = dataset(name), DATASETS[name]
    for part, one in was.items():
        assert alike(one, found[part]), f"{part}: {found[part]}\nwas {one}"


def test_damage_is_told_as_it_was_and_datasets_without_a_manifest_are_taken_over() -> None:
    found, was = adopted(), DATASETS["adopted"]
    for name, (told, record, again) in was.items():
        for one, now in zip(told, found[name][0], strict=True):
            assert now == one
        assert alike(record, found[name][1])
        assert found[name][2] == again == []


# --- copies ---------------------------------------------------------------------------------------

SETS = st.sets(st.integers(0, 30), max_size=12).map(lambda some: np.array(sorted(some), np.uint32))


@given(SETS, SETS)
def test_similarity_is_jaccards(one: np.ndarray, other: np.ndarray) -> None:
    a, b = set(one.tolist()), set(other.tolist())
    assert similarity(one, other) == (len(a & b) / len(a | b) if a and b else 0.0)


@given(st.floats(0.01, 0.99))
def test_bands_are_the_longest_that_still_find_99_of_100_at_the_threshold(threshold: float) -> None:
    sketch = choose_sketch(threshold)
    assert sketch.threshold == threshold
    assert sketch.bands == HASHES // sketch.rows == 112 // sketch.rows

    def chance(rows: int) -> float:
        return 1 - (1 - threshold**rows) ** (112 // rows)

    assert sketch.rows == max([rows for rows in range(1, 33) if chance(rows) >= 0.99], default=1)


@pytest.mark.parametrize("threshold", [0.0, 1.0, -0.5, 1.5])
def test_a_threshold_that_is_no_similarity_is_refused(threshold: float) -> None:
    with pytest.raises(UsageError, match="is not a similarity"):
        choose_sketch(threshold)


@given(st.lists(st.integers(0, 4), max_size=40))
def test_rows_of_one_value_are_paired_with_the_first_and_the_next_eight(values: list[int]) -> None:
    rows = np.arange(100, 100 + len(values), dtype=np.uint64)
    expected = set()
    for value in set(values):
        mine = [int(row) for row, one in zip(rows, values, strict=True) if one == value]
        expected |= {(mine[0], row) for row in mine[1:]}
        expected |= {
            (mine[at], mine[at + ahead])
            for at in range(len(mine))
            for ahead in range(1, 9)
            if at + ahead < len(mine)
        }
    found = candidates(np.array(values, np.uint64), rows)
    assert [tuple(pair) for pair in found.tolist()] == sorted(expected)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=15))
def test_clusters_are_what_pairs_connect(pairs: list[tuple[int, int]]) -> None:
    rows, names = clusters(np.array(pairs, np.uint64).reshape(-1, 2))
    groups = {number: {number} for pair in pairs for number in pair}
    for one, other in pairs:
        both = groups[one] | groups[other]
        for number in both:
            groups[number] = both
    assert rows.tolist() == sorted(groups)
    by_name = dict(zip(rows.tolist(), names.tolist(), strict=True))
    for one, other in combinations(groups, 2):
        assert (by_name[one] == by_name[other]) == (other in groups[one])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), max_size=20), st.randoms())
def test_later_copies_are_all_but_the_first_of_a_content(contents: list[tuple[int, int]], random) -> None:
    places = random.sample(range(1000), len(contents))
    first: dict[tuple[int, int], int] = {}
    for content, place in sorted(zip(contents, places, strict=True), key=lambda pair: pair[1]):
        first.setdefault(content, place)
    expected = sorted(set(places) - set(first.values()))
    values = np.array(contents, np.uint64).reshape(-1, 2)
    assert later_copies(values, np.array(places, np.uint64)).tolist() == expected


def table_of(documents: list[list[int]]) -> np.ndarray:
    table = np.zeros(len(documents), DOCUMENT)
    table["tokens"] = [len(one) for one in documents]
    table["start"] = np.cumsum(table["tokens"]) - table["tokens"]
    return table


WORDS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=12), min_size=1, max_size=6)


@given(WORDS)
def test_shingles_are_runs_of_five_words_and_of_fewer_all_there_are(documents: list[list[int]]) -> None:
    flat = np.array([word for one in documents for word in one], np.uint64)
    found = sketches(flat, table_of(documents), Sketch(bands=1, rows=1))
    sets, counts = found.sets(), found.counts
    runs = [{tuple(one[at : at + 5]) for at in range(max(1, len(one) - 4))} for one in documents]
    assert counts.tolist() == [len(one) for one in sets] == [len(one) for one in runs]
    for (a, mine), (b, other) in combinations(zip(sets, runs, strict=True), 2):
        assert len(set(a.tolist()) & set(b.tolist())) == len(mine & other)


@given(WORDS)
def test_equal_documents_have_equal_bands_wherever_they_stand(documents: list[list[int]]) -> None:
    sketch = Sketch(bands=4, rows=3)
    twice = [*documents, *documents[::-1]]
    flat = np.array([word for one in twice for word in one], np.uint64)
    values = sketches(flat, table_of(twice), sketch).bands
    assert values.shape == (4, len(twice))
    assert (values == values[:, ::-1]).all()
    for one, other in combinations(range(len(documents)), 2):
        runs = [
            {tuple(some[at : at + 5]) for at in range(max(1, len(some) - 4))}
            for some in (documents[one], documents[other])
        ]
        assert (values[:, one] == values[:, other]).all() == (runs[0] == runs[1]) or runs[0] & runs[1]


@given(universe=st.integers(1, 1 << 64), shards=st.integers(1, 9), per_shard=st.integers(1, 5))
def test_cells_cover_the_universe_once_in_order(universe: int, shards: int, per_shard: int) -> None:
    cells = Cells(universe=universe, shards=shards, per_shard=per_shard)
    edges = [cells.bounds(shard, cell) for shard in range(shards) for cell in range(per_shard)]
    assert edges[0][0] == 0
    assert edges[-1][1] == universe
    assert all(one[1] == other[0] for one, other in pairwise(edges))
    lengths = [stop - start for start, stop in edges]
    assert max(lengths) - min(lengths) <= 1


@given(
    st.lists(st.binary(max_size=4), min_size=1, max_size=5),
    st.lists(st.integers(0, 255), max_size=2),
    st.lists(st.integers(0, 255), max_size=2),
)
def test_marks_stand_before_and_after_every_document(documents, before, after) -> None:
    marks = Marks(before=tuple(before), after=tuple(after))
    joined = marks.joined([memoryview(one) for one in documents], np.dtype(np.uint8))
    assert joined == b"".join(bytes(before) + one + bytes(after) for one in documents)
    assert marks.count == len(before) + len(after)


@settings(max_examples=25)
@given(total=st.integers(1, 1 << 38), shard=st.integers(1 << 20, 1 << 32), straight=st.booleans())
def test_splits_are_as_large_as_two_shards_or_fewer_where_all_can_share_them(
    total: int, shard: int, straight: bool
) -> None:
    source = Source(url="/a", kind="jsonl", bytes=total, units=total)
    options = Options(sources=("a",), out="/o", shard_bytes=shard, shuffle=not straight, dedup=not straight)
    plan = make_plan(options, [source], RECORD, "huggingface")
    mib = 1 << 20
    most = (
        max(32 * mib, min(2 * shard, total // 8)) if straight else max(4 * mib, min(256 * mib, total // 64))
    )
    sizes = [sum(piece.stop - piece.start for piece in split) for split in plan.splits]
    assert sum(sizes) == total
    assert len(sizes) == max(1, round(total / most))
