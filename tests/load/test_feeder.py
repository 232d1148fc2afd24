"""Feeding a CPU: the code that feeds a GPU, without streams."""

from __future__ import annotations

import gc
import itertools
import pickle
from collections import namedtuple
from functools import partial
from types import SimpleNamespace

import feeding
import pytest
import torch
from small_datasets import make_tars, make_tokens

import stoker
from stoker.errors import UsageError
from stoker.load.device.streams import Arrivals, Copier, Device, tensors_of, with_tensors

MODES = [{}, {"packing": "pad"}, {"packing": "best-fit"}, {"documents": True}, {"shuffle": "off"}]


@pytest.mark.parametrize("more", MODES)
def test_a_fed_batch_is_the_loaders_batch(corpus, more):
    feeding.check_same_batches_as_the_loader(corpus, "cpu", **more)


@pytest.mark.parametrize("more", [{}, {"documents": True}, {"tail": "pad"}, {"workers": "inline"}])
def test_batches_gathered_by_the_code_for_devices_are_the_loaders(corpus, more):
    with (
        stoker.Loader(corpus, device="cpu", **feeding.options(**more)) as device,
        stoker.Loader(corpus, **feeding.options(**more)) as host,
    ):
        assert device.makes_on_device
        for mine, other in zip(device, host, strict=True):
            assert {name: mine[name].tolist() for name in other} == {n: other[n].tolist() for n in other}


def test_the_code_for_devices_skips_damage_too(corpus):
    path = corpus / "e0-0003.bin"
    data = bytearray(path.read_bytes())
    data[5000] ^= 0xFF
    path.write_bytes(bytes(data))
    with (
        stoker.Loader(corpus, device="cpu", on_corrupt="skip", **feeding.options()) as device,
        stoker.Loader(corpus, on_corrupt="skip", **feeding.options()) as host,
    ):
        assert feeding.as_lists(device) == feeding.as_lists(host)
        assert device.report().skipped_samples == host.report().skipped_samples > 0


def test_host_batches_pass_through_the_copier_in_order(corpus):
    with (
        stoker.Loader(corpus, **feeding.options()) as loader,
        stoker.Loader(corpus, **feeding.options()) as other,
    ):
        copier = Copier(Device("cpu"))
        found = list(copier.copied(iter(loader), given=loader.state_dict))
        assert feeding.as_lists([batch for batch, _ in found]) == feeding.as_lists(other)
        assert [state["position"] for _, state in found[:3]] == [4, 8, 12]


def test_whoever_makes_groups_waits_for_the_one_two_before():
    """Else a loop that never waits for its device has groups made without end."""
    finished = []

    class Card(Device):
        def mark(self, *, awaited=False):
            assert awaited
            return SimpleNamespace(synchronize=partial(finished.append, next(numbers)))

    numbers, arrivals = itertools.count(), Arrivals(Card("cpu"))
    for made in range(6):
        arrivals.made()
        assert finished == list(range(made - 1))


@pytest.mark.parametrize("more", MODES[:2])
def test_a_feeder_resumes_exactly(corpus, more):
    feeding.check_resume(corpus, "cpu", **more)


@pytest.mark.parametrize("more", MODES[:2])
def test_a_loop_left_early_goes_on_where_it_was(corpus, more):
    feeding.check_a_loop_left_early_goes_on(corpus, "cpu", **more)


def test_large_ids_stay_positive(tmp_path):
    feeding.check_wide_ids(make_tokens(tmp_path / "wide", [[500] * 100]), "cpu")


def test_samples_of_tars_arrive(tmp_path):
    feeding.check_samples_arrive(make_tars(tmp_path / "tars", [20, 20]), "cpu")


def test_pairs_arrive(tmp_path):
    feeding.check_pairs_arrive(make_tars(tmp_path / "tars", [20, 20]), "cpu")


def test_tensors_are_changed_wherever_a_collate_put_them():
    Pair = namedtuple("Pair", "left right")
    batch = {"a": torch.ones(1), "b": [Pair(torch.ones(2), "text"), (torch.ones(3),)], "c": 5}
    changed = with_tensors(batch, torch.zeros_like)
    assert [len(one) for one in tensors_of(changed)] == [1, 2, 3]
    assert not any(one.any() for one in tensors_of(changed))
    assert changed["b"][0].right == "text"


def test_a_pickled_feeder_goes_on_where_it_was(corpus, tmp_path):
    with stoker.feed(corpus, cache=tmp_path / "cache", **feeding.options()) as feeder:
        it = iter(feeder)
        next(it)
        with pickle.loads(pickle.dumps(feeder)) as other:
            assert feeding.as_lists(other) == feeding.as_lists(it)


def test_who_wants_to_skip_batches_is_told_of_load_state_dict(corpus):
    with stoker.feed(corpus, **feeding.options()) as feeder:
        assert not hasattr(feeder, "dataset")
        with pytest.raises(AttributeError, match="ignore_data_skip"):
            _ = feeder.dataset


def test_a_device_may_be_torchs_own(corpus):
    with stoker.feed(corpus, device=torch.device("cpu"), **feeding.options()) as feeder:
        assert next(iter(feeder))["input_ids"].device == torch.device("cpu")


@pytest.mark.long
def test_a_dropped_feeder_lets_go_of_its_cache(corpus, tmp_path):
    feeder = stoker.feed(corpus, cache=tmp_path / "cache", **feeding.options())
    next(iter(feeder))
    del feeder
    gc.collect()
    # the fixture waits for the threads to end


def test_a_blend_of_two_token_types_arrives_whole(tmp_path):
    one = make_tokens(tmp_path / "one", [[3000]])
    other = make_tokens(tmp_path / "other", [[3000]], dtype="int32")
    options = feeding.options(weights=[1, 2])
    with (
        stoker.feed([one, other], device="cpu", **options) as feeder,
        stoker.Loader([one, other], **options) as loader,
    ):
        assert feeding.as_lists(feeder) == feeding.as_lists(loader)


def test_an_unknown_device_is_said(corpus):
    with pytest.raises(UsageError, match="device"):
        stoker.feed(corpus, device="abacus", **feeding.options())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_said(corpus):
    with pytest.raises(UsageError, match="no CUDA"):
        stoker.feed(corpus, device="cuda", **feeding.options())


def test_cufile_without_a_gpu_falls_back_and_says_why(corpus):
    with stoker.feed(corpus, device="cpu", reader="cufile", **feeding.options()) as feeder:
        assert list(feeder)
        assert "pread" in feeder.report().reader


def test_a_loader_alone_does_not_stage():
    with pytest.raises(UsageError, match="not on this machine"):
        stoker.Loader("s3://bucket/corpus", **feeding.options())
