"""Packing: whole documents in rows, nothing lost, labels masked where there is no next token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_datasets import make_tokens

from stoker.load.batch import ragged
from stoker.load.loader import Loader
from stoker.ordering.packing import pack_best_fit

LENGTHS = [[5, 60, 31, 2, 90], [33, 1, 1, 64, 12, 40], [100]]


@pytest.fixture
def folder(tmp_path):
    return make_tokens(tmp_path / "docs", LENGTHS)


def batches(folder, **options):
    with Loader(folder, batch_size=2, seq_len=32, output="numpy", chunk_bytes=256, **options) as loader:
        return list(loader)


@given(lengths=st.lists(st.integers(0, 70), max_size=60), room=st.integers(1, 40))
def test_best_fit_places_every_token_once_and_cuts_only_long_documents(lengths, room):
    packed = pack_best_fit(np.array(lengths, np.int64), room=room)
    cells = ragged(packed.row * room + packed.column, packed.length)
    assert len(cells) == len(set(cells.tolist())) == sum(lengths)
    assert ((packed.column + packed.length) <= room).all()
    parts = np.bincount(packed.item, minlength=len(lengths))
    assert all(parts[n] == -(-length // room) for n, length in enumerate(lengths))
    assert sorted(set(packed.row.tolist())) == list(range(packed.rows))


def test_best_fit_fills_rows_nearly_full():
    lengths = np.random.default_rng(0).integers(10, 900, 4096)
    packed = pack_best_fit(lengths, room=2048)
    assert lengths.sum() / (packed.rows * 2048) > 0.99


def test_one_document_a_row_is_padded_and_its_labels_masked(folder):
    for batch in batches(folder, packing="pad", pad_id=7):
        for ids, labels, mask in zip(
            batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True
        ):
            length = mask.sum()
            assert (ids[length:] == 7).all()
            assert (labels[:length][labels[:length] >= 0] == ids[:length][labels[:length] >= 0] + 1).all()
            assert (labels[length:] == -100).all()


def test_buckets_pad_less_than_one_document_a_row(tmp_path):
    lengths = np.random.default_rng(1).integers(2, 512, 3000).tolist()
    folder = make_tokens(tmp_path / "many", [lengths])

    def cells(packing):
        with Loader(folder, batch_size=8, seq_len=512, output="numpy", packing=packing) as loader:
            found = [(b["input_ids"].size, int((b["labels"] >= 0).sum())) for b in loader]
        return np.array(found).sum(axis=0)

    (padded, tokens), (bucketed, same) = cells("pad"), cells("buckets")
    assert tokens == same
    assert bucketed < 0.7 * padded


def test_best_fit_rows_hold_whole_documents_apart(folder):
    stream = {}
    for shard, documents in enumerate(LENGTHS):
        start = sum(map(sum, LENGTHS[:shard]))
        for length in documents:
            stream[start] = length
            start += length
    seen = {}
    for batch in batches(folder, packing="best-fit", pad_id=60001):
        ids, positions, docs = batch["input_ids"], batch["position_ids"], batch["document_ids"]
        for row in range(2):
            for number in np.unique(docs[row]):
                cells = ids[row][docs[row] == number]
                assert (positions[row][docs[row] == number] == np.arange(len(cells))).all()
                if cells[0] != 60001:
                    assert (np.diff(cells) == 1).all()
                    seen[int(cells[0])] = len(cells)
        labelled = batch["labels"] >= 0
        assert (batch["labels"][labelled] == ids[labelled] + 1).all()
        assert batch["cu_seqlens"][0] == 0
        assert batch["cu_seqlens"][-1] == ids.size
    for start, length in stream.items():
        if length <= 32 and start in seen:
            assert seen[start] == length


def test_concatenated_rows_can_say_which_document_each_token_is_of(folder):
    starts, at = set(), 0
    for shard in LENGTHS:
        for length in shard:
            starts.add(at)
            at += length
    for batch in batches(folder, documents=True):
        ids = batch["input_ids"]
        for row in range(2):
            new = [c for c in range(32) if c == 0 or int(ids[row, c]) in starts]
            assert np.flatnonzero(batch["position_ids"][row] == 0).tolist() == new
            assert batch["document_ids"][row].max() == len(new) - 1
        assert len(batch["cu_seqlens"]) == sum((batch["position_ids"] == 0).sum(axis=1)) + 1


def test_the_length_of_a_best_fit_epoch_is_not_known_before(folder):
    with Loader(folder, batch_size=2, seq_len=32, packing="best-fit", output="numpy") as loader:
        with pytest.raises(TypeError, match="best-fit"):
            len(loader)
        assert list(loader)
