"""Documents in windows: the same ids, positions and bounds as counting cell by cell gives."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_datasets import make_tokens

from stoker.load.assembly.boundaries import boundaries
from stoker.load.loader import Loader


@st.composite
def scenes(draw):
    rows, cells = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    every = [(row, column) for row in range(rows) for column in range(cells + 1)]
    begins = draw(st.lists(st.sampled_from(every), unique=True))
    return rows, cells, begins, draw(st.integers(1, 4))


def made(scene):
    rows, cells, begins, _ = scene
    some, others = begins[::2], begins[1::2]  # of two shards
    found = [
        (np.array([row for row, _ in part], np.int64), np.array([column for _, column in part], np.int64))
        for part in (some, others)
    ]
    return boundaries(found, rows=rows, cells=cells)


@given(scenes())
def test_ids_and_positions_are_those_of_counting_cell_by_cell(scene):
    rows, cells, begins, _ = scene
    ids = made(scene).ids({})
    for row in range(rows):
        document = position = 0
        for column in range(cells):
            if column and (row, column) in begins:
                document, position = document + 1, 0
            assert (ids["document_ids"][row, column], ids["position_ids"][row, column]) == (
                document,
                position,
            )
            position += 1


@given(scenes(), st.sampled_from([0, 1]))
def test_the_first_token_of_a_document_is_nobodys_label(scene, ahead):
    rows, cells, begins, _ = scene
    ignored = np.zeros((rows, cells), bool)
    ignored[made(scene).first_labels(ahead=ahead)] = True
    expected = [[(row, column + ahead) in begins for column in range(cells)] for row in range(rows)]
    assert ignored.tolist() == expected


@given(scenes())
def test_bounds_of_a_batch_lie_where_positions_begin_anew(scene):
    size = scene[-1]
    seams = made(scene)
    positions = seams.ids({})["position_ids"]
    for number, bounds in enumerate(seams.cu_seqlens(size)):
        flat = positions[number * size : (number + 1) * size].reshape(-1)
        assert bounds.dtype == np.int32
        assert bounds.tolist() == [*np.flatnonzero(flat == 0).tolist(), flat.size]


def test_memory_that_nobody_holds_is_used_again():
    buffers, scene = {}, (4, 8, [(1, 3)], 1)
    first = made(scene).ids(buffers)["position_ids"].ctypes.data
    assert made(scene).ids(buffers)["position_ids"].ctypes.data == first


@pytest.mark.parametrize("rows", [1, 3])
def test_windows_inside_of_one_document_have_one(rows):
    ids = boundaries([], rows=rows, cells=4).ids({})
    assert ids["document_ids"].max() == 0
    assert ids["position_ids"].tolist() == [[0, 1, 2, 3]] * rows


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return map(str, (tmp_path_factory.mktemp("documents") / str(number) for number in count()))


SHARDS = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=3)
CORPUS = st.tuples(SHARDS.filter(lambda shards: max(map(sum, shards)) > 40), st.integers(1, 2))


@settings(max_examples=10)
@given(st.lists(CORPUS, min_size=1, max_size=3))
def test_a_row_knows_the_documents_of_its_own_dataset_and_epoch(folders, corpora):
    """They are those that the ledger names."""
    sources = [
        make_tokens(Path(next(folders)), shards, epochs=epochs, turned=True) for shards, epochs in corpora
    ]
    options = {"batch_size": 1, "seq_len": 16, "output": "numpy", "workers": "inline"}
    with Loader(sources if len(sources) > 1 else sources[0], documents=True, **options) as loader:
        for _ in range(2):
            for batch in loader:
                (row,) = loader.samples(loader.step - 1)
                told = [(n, at) for n, one in enumerate(row.documents) for at in range(one.tokens)]
                found = zip(batch["document_ids"][0].tolist(), batch["position_ids"][0].tolist(), strict=True)
                assert list(found) == told
