"""Indexes, manifests and states whose bytes are whole and whose meaning is not: refused, and where."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict

import numpy as np
import pytest
from small_datasets import compressed, make_tars, make_tokens, write_dataset, write_files

from stoker.errors import BadManifestError, BadShardError, StorageError, UsageError
from stoker.formats import megatron
from stoker.load.loader import Loader
from stoker.load.ordering.cut import Recut
from stoker.load.reading.files import Folder
from stoker.load.state import load
from stoker.manifest import is_inside
from stoker.prepare.check import adopt

LENGTHS = np.array([100, 120, 80])


def index_with(lengths=LENGTHS, offsets=None, documents=None) -> bytes:
    ends = np.cumsum(lengths) * 2
    offsets = np.concatenate([[0], ends[:-1]]) if offsets is None else offsets
    documents = np.arange(len(lengths) + 1) if documents is None else documents
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(documents))
    arrays = (np.array(lengths, "<i4"), np.array(offsets, "<i8"), np.array(documents, "<i8"))
    return header + b"".join(array.tobytes() for array in arrays)


BAD = {
    "documents that leave sequences out": index_with(documents=[0, 1, 2]),
    "documents that begin late": index_with(documents=[1, 2, 3]),
    "documents in disorder": index_with(documents=[0, 2, 1, 3]),
    "no documents at all": index_with(documents=[]),
    "a first offset that is not the first byte": index_with(offsets=[8, 200, 440]),
    "a negative length": index_with(lengths=[100, -120, 320]),
    "offsets that overlap": index_with(offsets=[0, 200, 200]),
    "a type that is no token's": index_with()[:17] + b"\x07" + index_with()[18:],
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_an_index_that_does_not_tile_its_file_is_not_adopted(fault, tmp_path):
    (tmp_path / "a.bin").write_bytes(np.arange(300, dtype=np.uint16).tobytes())
    (tmp_path / "a.idx").write_bytes(BAD[fault])
    with pytest.raises(BadShardError, match=r"a\.idx"):
        adopt(str(tmp_path))


@pytest.mark.parametrize("fault", BAD)
def test_nor_is_it_read_because_its_digest_is_right(fault, tmp_path):
    files = {".bin": np.arange(300, dtype=np.uint16).tobytes(), ".idx": BAD[fault]}
    write_dataset(tmp_path, [write_files(tmp_path, "a", files, 3, 300)], format="megatron", dtype="uint16")
    with (
        pytest.raises((BadShardError, BadManifestError), match=r"a\.idx"),
        Loader(tmp_path, batch_size=1, seq_len=8, packing="pad", workers="inline") as loader,
    ):
        list(loader)


def test_counts_that_disagree_are_both_said(tmp_path):
    files = {".bin": np.arange(300, dtype=np.uint16).tobytes(), ".idx": index_with()}
    write_dataset(tmp_path, [write_files(tmp_path, "a", files, 4, 300)], format="megatron", dtype="uint16")
    with (
        pytest.raises(BadShardError, match=r"3 documents of 300 tokens.*says 4 documents"),
        Loader(tmp_path, batch_size=1, seq_len=8, packing="pad") as loader,
    ):
        list(loader)


def test_a_type_that_the_index_does_not_know_is_refused_where_no_index_is_needed(tmp_path):
    folder = make_tokens(tmp_path, [[300]])
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"uint16"', '"int16"'))
    with pytest.raises(BadManifestError, match=r"int16.*uint16"):
        Loader(folder, batch_size=1, seq_len=8)


def test_a_compressed_shard_that_ends_early_is_not_read_on(tmp_path):
    ids = np.arange(200, dtype=np.uint16).tobytes()
    files = {".bin.zst": compressed(ids), ".idx": index_with()}
    write_dataset(tmp_path, [write_files(tmp_path, "a", files, 3, 300)], format="megatron", dtype="uint16")
    with (
        pytest.raises(BadShardError, match="ends at byte 400"),
        Loader(tmp_path, batch_size=1, seq_len=8) as loader,
    ):
        list(loader)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../../b", "", ".", "a//b", "a\0b"])
def test_a_name_that_leads_out_of_the_folder_is_refused(name, tmp_path):
    assert not is_inside(name)
    with pytest.raises(UsageError, match="no file inside"):
        Folder(tmp_path).local_path(name)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"name": "e0-0000.bin"', '"name": "../e0-0000.bin"', "leads out of the folder"),
        ('"bytes": 600', '"bytes": -600', "impossible"),
        ('"tokens": 300', '"tokens": 3000', "600 bytes, 3,000 tokens take 6,000"),
        ('"epochs": 1', '"epochs": 1099511627776', "fewer than"),
        ('"block_bytes": 4096', '"block_bytes": 0', "blocks of 0 bytes"),
        ('"block_bytes": 4096', '"block_bytes": 64', "digests, the manifest's files have"),
        ('"dtype": "uint16"', '"dtype": "object"', "none of token ids"),
        ('"shards": [', '"shards": [[],', "cannot be read"),
    ],
)
def test_a_manifest_that_cannot_be_true_is_refused(old, new, said, tmp_path):
    folder = make_tokens(tmp_path, [[300]])
    text = (folder / "manifest.json").read_text()
    assert old in text
    (folder / "manifest.json").write_text(text.replace(old, new, 1))
    with pytest.raises(BadManifestError, match=said):
        Loader(folder, batch_size=1, seq_len=8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"position": -4}, "position -4"),
        ({"position": 5}, "was changed"),
        ({"epoch": None}, "epoch None"),
        ({"row": "x"}, "row 'x'"),
        ({"order": None}, "order None"),
        ({"version": 1}, "version 1"),
    ],
)
def test_a_state_that_no_loader_saves_is_refused(change, said, tmp_path):
    folder = make_tokens(tmp_path, [[300]])
    with Loader(folder, batch_size=1, seq_len=8, workers="inline") as loader:
        state = {**loader.state_dict(), **change}
        with pytest.raises(UsageError, match=said):
            loader.load_state_dict(state)
        for name in loader.state_dict():
            with pytest.raises(UsageError):
                loader.load_state_dict(
                    {key: value for key, value in loader.state_dict().items() if key != name}
                )


@pytest.mark.parametrize("positions", [(8, 2), (2, 2), (40,)])
def test_cuts_that_no_job_comes_to_are_refused(positions, tmp_path):
    with Loader(make_tokens(tmp_path / "corpus", [[99] * 20]), batch_size=2, seq_len=16) as loader:
        state = loader.state_dict()
    past = json.loads(state["past"])
    past["cut"]["then"] = [
        asdict(Recut(epoch=0, position=position, lanes=24, ranks=1, nodes=1)) for position in positions
    ]
    with pytest.raises(UsageError, match="cut"):
        load({**state, "position": 10, "past": json.dumps(past)}, order=state["order"])


@pytest.mark.parametrize("packing", ["pad", "buckets", "best-fit"])
def test_a_missing_index_can_be_skipped_and_is_counted(packing, tmp_path):
    folder = make_tokens(tmp_path, [[20, 30], [40, 10, 5], [25, 15]])
    (folder / "e0-0001.idx").unlink()
    options = {"batch_size": 1, "seq_len": 64, "packing": packing, "output": "numpy", "workers": "inline"}
    with Loader(folder, on_corrupt="skip", **options) as loader:
        seen = {int(token) for batch in loader for token in batch["input_ids"].ravel()} - {0}
        report = loader.report()
    lost = set(range(50, 105))
    assert seen == set(range(1, 145)) - lost
    assert report.skipped_samples == 3
    assert any("e0-0001.idx" in one and "3 samples" in one for one in report.damage)
    with (
        pytest.raises(StorageError, match=r"e0-0001\.idx"),
        Loader(folder, **options) as loader,
    ):
        list(loader)


def test_a_missing_index_of_a_tar_can_be_skipped_too(tmp_path):
    folder = make_tars(tmp_path, [3, 4, 2])
    (folder / "t0001.index.npz").unlink()
    with Loader(folder, batch_size=1, on_corrupt="skip", output="numpy", workers="inline") as loader:
        keys = {batch["__key__"][0] for batch in loader}
        assert loader.report().skipped_samples == 4
    assert keys == {f"s{n:06d}" for n in (0, 1, 2, 7, 8)}


def test_an_index_of_ours_is_what_it_was():
    assert megatron.index_bytes(LENGTHS, dtype=np.dtype("<u2")) == index_with()
