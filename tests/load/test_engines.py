"""The table in stoker/load/build.py: which engine a set of options yields."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from small_datasets import make_tars

from stoker.load.assembly.batch import WindowAssembler
from stoker.load.assembly.documents import DocumentAssembler
from stoker.load.assembly.samples import SampleAssembler
from stoker.load.build import limits_of
from stoker.load.device.card import DeviceStore, DeviceWindows
from stoker.load.loader import Loader
from stoker.load.options import LoaderOptions
from stoker.load.parts import MOST_READERS
from stoker.load.prefetch.pipeline import Background, Inline
from stoker.load.prefetch.workers import Processes
from stoker.load.store import Store
from stoker.native import native


@pytest.mark.parametrize(
    ("options", "store", "assembler"),
    [
        ({}, Store, WindowAssembler),
        ({"device": "cpu"}, DeviceStore, DeviceWindows),
        ({"device": "cpu", "workers": "process"}, Store, WindowAssembler),
        ({"device": "cpu", "packing": "pad"}, Store, DocumentAssembler),
        ({"packing": "best-fit"}, Store, DocumentAssembler),
        ({"packing": "buckets"}, Store, DocumentAssembler),
    ],
)
def test_where_chunks_lie_and_who_makes_batches_of_tokens(corpus, options, store, assembler):
    with Loader(corpus, batch_size=2, seq_len=32, **options) as loader:
        assert (type(loader._engine.store), type(loader._engine.assembler)) == (store, assembler)


def test_tars_are_collated_on_the_host(tmp_path):
    with Loader(make_tars(tmp_path, [4]), batch_size=2, device="cpu") as loader:
        assert (type(loader._engine.store), type(loader._engine.assembler)) == (Store, SampleAssembler)


@pytest.mark.parametrize(
    ("options", "in_c"),
    [({}, True), ({"workers": "inline"}, False), ({"reader": "mmap"}, False), ({"packing": "pad"}, False)],
)
def test_who_reads_on_the_host(corpus, options, in_c):
    if native("load._pump") is None:
        pytest.skip("the extension load._pump was not built: python setup.py build_ext --inplace")
    with Loader(corpus, batch_size=2, seq_len=32, **options) as loader:
        next(iter(loader))
        assert (loader._engine.store._pool is not None) == in_c


@pytest.mark.parametrize(
    ("workers", "pipeline"), [("thread", Background), ("inline", Inline), ("process", Processes)]
)
def test_who_stays_ahead(corpus, workers, pipeline):
    with Loader(corpus, batch_size=2, seq_len=32, workers=workers, processes=1) as loader:
        next(iter(loader))
        assert type(loader._pipeline) is pipeline


def test_worker_processes_make_batches_on_the_host_whatever_the_device(corpus):
    with Loader(
        corpus, batch_size=2, seq_len=32, workers="process", processes=1, device="cpu", output="numpy"
    ) as loader:
        assert type(next(iter(loader))["input_ids"]) is np.ndarray


@pytest.mark.parametrize(
    ("asked", "in_flight", "readers", "why"),
    [
        (3, 9, 3, "readers=3 was asked for"),
        (0, 9, 9, "memory=64 MiB has room for 9 chunks on their way"),
        (0, MOST_READERS, MOST_READERS, f"{MOST_READERS} at once are the most"),
    ],
)
def test_what_keeps_readers_from_being_more_is_said(asked, in_flight, readers, why):
    options = LoaderOptions("d", batch_size=1, memory=64 << 20, readers=asked)
    parts = SimpleNamespace(batch_bytes=1 << 20, group=4, in_flight=in_flight, datasets=[])
    limits = limits_of(parts, options)
    assert (limits.readers, limits.why, limits.depth) == (readers, why, 4)
