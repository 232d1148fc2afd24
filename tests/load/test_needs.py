"""Which files a node needs first: those its ranks will read, and no others."""

from __future__ import annotations

import pytest
from small_datasets import make_tokens

from stoker.load.loader import Loader
from stoker.load.needs import share_of
from stoker.load.reading.files import Folder
from stoker.manifest import read_manifest
from stoker.world import World


class Watched:
    """A folder that notes which files are asked for, in order."""

    def __init__(self, folder):
        self._folder, self.asked = Folder(folder), {}

    def local_path(self, name):
        self.asked.setdefault(name)
        return self._folder.local_path(name)


@pytest.fixture
def corpus(tmp_path):
    return make_tokens(tmp_path / "corpus", [[300 + 7 * shard] * 20 for shard in range(48)])


def loader_of(folder, rank, *, ranks, nodes, watched=None, **more):
    each = ranks // nodes
    world = World(
        rank=rank, size=ranks, local_rank=rank % each, local_size=each, node=rank // each, nodes=nodes
    )
    options = {
        "batch_size": 1,
        "seq_len": 32,
        "chunk_bytes": 256,
        "world": world,
        "workers": "inline",
        **more,
    }
    return Loader(folder, files=watched, **options)


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (4, 2), (8, 4), (6, 3), (24, 12)])
def test_a_node_is_told_all_files_its_ranks_read_and_its_share_holds_them(corpus, ranks, nodes):
    manifest = read_manifest(corpus)
    for rank in range(ranks):
        watched = Watched(corpus)
        with loader_of(corpus, rank, ranks=ranks, nodes=nodes, watched=watched) as loader:
            told = loader.files_in_order()
            watched.asked.clear()
            for _ in loader:
                pass
            assert set(watched.asked) <= set(told)
            share = share_of(manifest, node=rank * nodes // ranks, nodes=nodes)
            assert len(set(told) - set(share)) <= 2 * 2, "but for a few samples at either end"
            assert len(share) <= 2 * (1.5 * len(manifest.shards) / nodes + 3)


def test_shares_of_all_nodes_hold_every_file(corpus):
    manifest = read_manifest(corpus)
    shares = [share_of(manifest, node=node, nodes=5) for node in range(5)]
    assert set().union(*shares) == {file.name for file in manifest.files()}


@pytest.mark.parametrize(("shards", "nodes"), [(3, 3), (4, 2), (12, 4), (2, 2), (5, 5)])
def test_a_share_of_shards_that_it_ends_with_brings_no_neighbours(shards, nodes, tmp_path):
    manifest = read_manifest(make_tokens(tmp_path / "corpus", [[4000]] * shards))
    shares = [share_of(manifest, node=node, nodes=nodes) for node in range(nodes)]
    assert [len(share) for share in shares] == [2 * shards // nodes] * nodes
    assert len(set().union(*shares)) == 2 * shards


def test_files_come_in_the_order_in_which_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("stoker.load.parts.STRETCH_BYTES", 512)
    corpus = make_tokens(tmp_path / "corpus", [[300] * 20] * 12)
    watched = Watched(corpus)
    with loader_of(corpus, 0, ranks=1, nodes=1, watched=watched, lanes=1) as loader:
        told = [name for name in loader.files_in_order() if name.endswith(".bin")]
        watched.asked.clear()
        for _ in loader:
            pass
    assert list(watched.asked)[:6] == list(dict.fromkeys(told))[:6]  # it is told chunk by chunk


def test_after_half_an_epoch_what_is_still_to_come_is_first(tmp_path, monkeypatch):
    monkeypatch.setattr("stoker.load.parts.STRETCH_BYTES", 512)
    corpus = make_tokens(tmp_path / "corpus", [[300] * 20] * 12)
    with loader_of(corpus, 0, ranks=1, nodes=1, lanes=1) as loader:
        at_first = loader.files_in_order()
        batches = iter(loader)
        for _ in range(len(loader) // 2):
            next(batches)
        later = loader.files_in_order()
        assert set(later) == set(at_first)
        assert later[0] != at_first[0]


def test_in_disk_order_files_come_in_disk_order(corpus):
    with loader_of(corpus, 0, ranks=1, nodes=1, shuffle="off") as loader:
        names = [name for name in loader.files_in_order() if name.endswith(".bin")]
    assert list(dict.fromkeys(names)) == sorted(set(names))


@pytest.mark.parametrize(("ranks", "nodes", "batch_size"), [(4, 2, 5), (2, 1, 2)])
def test_ranks_of_a_node_are_told_the_same_files_of_a_blend(small_corpus, tmp_path, ranks, nodes, batch_size):
    """Each rank asks for all of its node: what its fellows get lies elsewhere in the global batches."""
    other = make_tokens(tmp_path / "other", [[40] * 3 for _ in range(5)])
    each = ranks // nodes
    told = []
    for rank in range(ranks):
        world = World(
            rank=rank, size=ranks, local_rank=rank % each, local_size=each, node=rank // each, nodes=nodes
        )
        options = {"seq_len": 32, "chunk_bytes": 256, "workers": "inline", "weights": (1.0, 2.0)}
        with Loader([small_corpus, other], world=world, batch_size=batch_size, **options) as loader:
            told.append([tuple(loader.files_in_order(number)) for number in (0, 1)])
    for rank in range(ranks):
        assert told[rank] == told[rank // each * each], "ranks of one node are told the same"
