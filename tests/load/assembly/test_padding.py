"""Padded documents cell by cell: the ids, what the mask says of them, and the labels, for any lengths."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_datasets import make_tokens

from stoker.load.loader import Loader

LENGTH, PAD, IGNORED = 16, 63_000, -100
SHARDS = st.lists(st.lists(st.integers(2, 40), min_size=1, max_size=6), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return map(str, (tmp_path_factory.mktemp("padding") / str(number) for number in count()))


def rows(folder, *, in_c=True, **options):
    given_ = {"seq_len": LENGTH, **options}
    with (
        pytest.MonkeyPatch.context() as patched,
        Loader(folder, batch_size=1, output="numpy", pad_id=PAD, workers="inline", **given_) as loader,
    ):
        if not in_c:  # as where the extension was not built
            patched.setattr("stoker.load.assembly.cells._way", lambda *_: None)
        return [{key: batch[key][0].tolist() for key in batch} for batch in loader]


@settings(max_examples=15)
@given(shards=SHARDS, labels=st.sampled_from(["next", "same"]), in_c=st.booleans())
def test_a_row_is_the_document_the_mask_its_length_and_padding_the_rest(folders, shards, labels, in_c):
    folder, at, expected = make_tokens(Path(next(folders)), shards), 0, []
    for length in (one for shard in shards for one in shard):
        document = list(range(at, at + length))
        ids, rest = document[:LENGTH], max(0, LENGTH - length)
        told = (
            document[1 : LENGTH + 1] + [IGNORED] * (rest + 1)
            if labels == "next"
            else [*ids, *[IGNORED] * rest]
        )
        expected.append((ids + [PAD] * rest, [1] * len(ids) + [0] * rest, told[:LENGTH]))
        at += length
    seen = [
        (row["input_ids"], row["attention_mask"], row["labels"])
        for row in rows(folder, packing="pad", labels=labels, in_c=in_c)
    ]
    assert sorted(seen) == sorted(expected)


@settings(max_examples=15)
@given(shards=SHARDS, in_c=st.booleans())
def test_documents_packed_together_know_their_number_and_their_places(folders, shards, in_c):
    for row in rows(make_tokens(Path(next(folders)), shards), packing="best-fit", in_c=in_c):
        ids, places, numbers = (np.array(row[name]) for name in ("input_ids", "position_ids", "document_ids"))
        begins = np.flatnonzero(places == 0)
        assert begins[0] == 0
        for number, (start, stop) in enumerate(zip(begins, [*begins[1:], LENGTH], strict=True)):
            assert numbers[start:stop].tolist() == [number] * (stop - start)
            assert places[start:stop].tolist() == list(range(stop - start))
            tokens = ids[start:stop]
            assert (tokens == PAD).all() or tokens.tolist() == list(
                range(tokens[0], tokens[0] + stop - start)
            )


WIDE = 160
LONG = st.lists(
    st.one_of(st.integers(1, 3), st.integers(62, 67), st.integers(126, 131), st.integers(157, 164)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=15)
@given(lengths=LONG, labels=st.sampled_from(["next", "same"]), in_c=st.booleans())
def test_a_bucket_is_the_next_multiple_of_64_that_holds_what_is_predicted(folders, lengths, labels, in_c):
    """And never of no width, even where the only token of a document predicts nothing."""
    folder, at, expected = make_tokens(Path(next(folders)), [lengths]), 0, []
    for length in lengths:
        document = list(range(at, at + length))
        used = max(1, min(length, WIDE + 1) - 1) if labels == "next" else length
        width = min(WIDE, -(-used // 64) * 64)
        told = document[1 : width + 1] if labels == "next" else document[:width]
        ids = document[:width]
        expected.append((ids + [PAD] * (width - len(ids)), told + [IGNORED] * (width - len(told)), len(ids)))
        at += length
    seen = [
        (row["input_ids"], row["labels"], sum(row["attention_mask"]))
        for row in rows(folder, packing="buckets", labels=labels, seq_len=WIDE, in_c=in_c)
    ]
    assert sorted(seen) == sorted(expected)
