"""Feeding a GPU: the same batches as on the CPU, safe against reuse of buffers, inside CUDA graphs."""

from __future__ import annotations

import feeding
import pytest
from small_datasets import make_tars, make_tokens

import stoker
from stoker.errors import BadShardError


@pytest.fixture
def corpus(tmp_path):
    return make_tokens(tmp_path / "corpus", [[37, 400, 5] * 60, [900] * 9, [33]])


@pytest.mark.parametrize("more", [{}, {"packing": "pad"}, {"packing": "best-fit"}, {"documents": True}])
def test_a_fed_batch_is_the_loaders_batch(corpus, more):
    feeding.check_same_batches_as_the_loader(corpus, "cuda", **more)


@pytest.mark.parametrize("more", [{}, {"packing": "pad"}])
def test_a_feeder_resumes_exactly(corpus, more):
    feeding.check_resume(corpus, "cuda", **more)
    feeding.check_a_loop_left_early_goes_on(corpus, "cuda", **more)


def test_large_ids_stay_positive(tmp_path):
    feeding.check_wide_ids(make_tokens(tmp_path / "wide", [[500] * 100]), "cuda")


def test_samples_of_tars_arrive(tmp_path):
    feeding.check_samples_arrive(make_tars(tmp_path / "tars", [20, 20]), "cuda")


def test_pairs_arrive(tmp_path):
    feeding.check_pairs_arrive(make_tars(tmp_path / "tars", [20, 20]), "cuda")


def test_batches_hold_while_slow_kernels_still_read_them(corpus):
    """Sums taken behind a long kernel must be those of the batch, though its loader has gone on."""
    import torch

    options = feeding.options(chunk_bytes=1024, readers=4)
    with stoker.feed(corpus, device="cuda", **options) as feeder:
        sums = []
        for batch in feeder:
            torch.cuda._sleep(2_000_000)
            sums.append(batch["input_ids"].sum())
            del batch
        found = [int(one) for one in sums]
    with stoker.Loader(corpus, **feeding.options(chunk_bytes=1024)) as loader:
        assert found == [int(batch["input_ids"].sum()) for batch in loader]


def test_a_cuda_graph_can_be_replayed_on_fed_batches(corpus):
    import torch

    static = torch.zeros((4, 32), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = static * 2
    with stoker.feed(corpus, device="cuda", **feeding.options()) as feeder:
        for batch in feeder:
            static.copy_(batch["input_ids"])
            graph.replay()
            assert torch.equal(doubled, batch["input_ids"] * 2)


def test_cufile_gives_the_same_batches_or_says_why_not(corpus):
    with stoker.feed(corpus, device="cuda", reader="cufile", **feeding.options()) as feeder:
        ours = [feeding.as_lists(feeder) for _ in range(2)]
        assert feeder.report().reader
    with stoker.Loader(corpus, **feeding.options()) as loader:
        assert ours == [feeding.as_lists(loader) for _ in range(2)]


def test_the_card_takes_what_was_verified_out_of_the_page_cache(corpus):
    with stoker.feed(corpus, device="cuda", reader="mmap", **feeding.options(chunk_bytes=1024)) as feeder:
        ours = [feeding.as_lists(feeder) for _ in range(3)]
        assert "by itself" in feeder.report().reader
        assert "copies 0 MiB" in feeder.report().reader  # the corpus is small
    with stoker.Loader(corpus, **feeding.options(chunk_bytes=1024)) as loader:
        assert ours == [feeding.as_lists(loader) for _ in range(3)]


@pytest.mark.parametrize("reader", ["pread", "mmap"])
def test_a_shard_cut_short_after_it_was_verified_is_named(tmp_path, reader):
    folder = make_tokens(tmp_path / "corpus", [[400] * 20_000])  # far more than the chunks held
    with stoker.feed(folder, device="cuda", reader=reader, **feeding.options(batch_size=64)) as feeder:
        list(feeder)
        shard = next(folder.glob("*.bin"))
        shard.write_bytes(shard.read_bytes()[:5000])
        with pytest.raises(BadShardError, match=shard.name):
            list(feeder)
