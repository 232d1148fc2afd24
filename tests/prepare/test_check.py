"""Verifying a dataset, and adopting one that stoker did not make."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from stoker.errors import BadManifestError, BadShardError, UsageError
from stoker.formats.checksums import BLOCK_BYTES
from stoker.manifest import read_manifest
from stoker.prepare.check import adopt, verify_dataset

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[..., Any]


@pytest.fixture
def dataset(large_dataset: Path, tmp_path: Path) -> Path:
    """A copy of a dataset of several shards, to be damaged."""
    return shutil.copytree(large_dataset, tmp_path / "dataset")


def test_a_whole_dataset_has_no_faults(large_dataset: Path) -> None:
    assert verify_dataset(str(large_dataset)) == []


@pytest.mark.parametrize("name", ["shard-00001.bin", "shard-00001.idx"])
def test_a_flipped_bit_is_found(name: str, dataset: Path) -> None:
    data = bytearray((dataset / name).read_bytes())
    middle = len(data) // 2
    data[middle] ^= 1
    (dataset / name).write_bytes(data)
    block = middle // BLOCK_BYTES
    at = f"block {block} (bytes {block * BLOCK_BYTES:,} on)"
    assert verify_dataset(str(dataset)) == [f"{dataset}/{name}: {at} is damaged"]


@pytest.mark.parametrize("name", ["shard-00001.bin", "shard-00001.idx"])
def test_a_cut_file_is_found(name: str, dataset: Path) -> None:
    data = (dataset / name).read_bytes()
    (dataset / name).write_bytes(data[:-2])
    (fault,) = verify_dataset(str(dataset))
    assert fault == f"{dataset}/{name} is {len(data) - 2:,} bytes, its manifest says {len(data):,}"


def test_a_file_that_the_disk_cannot_read_is_found(dataset: Path) -> None:
    shard = dataset / "shard-00000.bin"
    shard.unlink()
    shard.symlink_to("/proc/self/mem")  # to read its first byte is an I/O error, for everyone
    (fault,) = verify_dataset(str(dataset))
    assert "cannot read" in fault
    assert "Input/output error" in fault


def test_a_missing_file_is_found(dataset: Path) -> None:
    (dataset / "shard-00001.bin").unlink()
    (fault,) = verify_dataset(str(dataset))
    assert f"{dataset}/shard-00001.bin" in fault


def test_swapped_files_are_found(dataset: Path) -> None:
    one, other = dataset / "shard-00000.bin", dataset / "shard-00001.bin"
    one.rename(dataset / "aside")
    other.rename(one)
    (dataset / "aside").rename(other)
    assert len(verify_dataset(str(dataset))) == 2


def test_every_damaged_shard_is_named(dataset: Path) -> None:
    for name in ("shard-00000.bin", "shard-00002.bin"):
        with (dataset / name).open("r+b") as file:
            file.write(b"\xff\xff")
    assert len(verify_dataset(str(dataset))) == 2


def test_changed_block_digests_are_found(dataset: Path) -> None:
    (dataset / "blocks.xxh3").write_bytes(b"\0" * 8)
    with pytest.raises(BadManifestError, match=r"blocks\.xxh3 does not match"):
        verify_dataset(str(dataset))


def test_a_manifest_that_miscounts_is_found(dataset: Path) -> None:
    manifest = json.loads((dataset / "manifest.json").read_text())
    manifest["shards"][0]["samples"] += 1
    manifest["counts"]["samples"] += 1
    (dataset / "manifest.json").write_text(json.dumps(manifest))
    (fault,) = verify_dataset(str(dataset))
    assert "shard-00000 holds" in fault


def test_the_command_says_that_a_dataset_is_whole(large_dataset: Path, run_stoker: Any) -> None:
    ran = run_stoker("prepare", "verify", large_dataset)
    assert (ran.rc, ran.stdout) == (0, f"{large_dataset} is whole\n")


def test_the_command_fails_for_a_damaged_dataset(dataset: Path, run_stoker: Any) -> None:
    (dataset / "shard-00001.bin").unlink()
    ran = run_stoker("prepare", "verify", dataset)
    assert (ran.rc, "shard-00001.bin" in ran.stdout, ran.stderr.startswith("error: 1 fault")) == (
        1,
        True,
        True,
    )


def test_the_command_reports_faults_as_json(dataset: Path, run_stoker: Any) -> None:
    (dataset / "shard-00001.bin").unlink()
    found = json.loads(run_stoker("prepare", "verify", dataset, "--json").stdout)
    assert len(found["faults"]) == 1


def test_the_command_fails_for_a_folder_without_a_manifest(tmp_path: Path, run_stoker: Any) -> None:
    ran = run_stoker("prepare", "verify", tmp_path)
    assert (ran.rc, ran.stderr.startswith("error: no manifest")) == (2, True)


# --- adopting -------------------------------------------------------------------------------------


@pytest.fixture
def foreign(megatron: Any, tmp_path: Path) -> Path:
    """Two pairs written by megatron-core itself."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    for name in "ab":
        builder = megatron.IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=np.int32)
        for size in (3, 5):
            builder.add_document(np.arange(size), [size])
        builder.finalize(str(folder / f"{name}.idx"))
    return folder


def test_a_megatron_folder_is_adopted(foreign: Path) -> None:
    adopt(str(foreign))
    found = read_manifest(foreign)
    assert (found.format, found.samples, found.tokens, found.dtype) == ("megatron", 4, 16, "int32")


def test_an_adopted_megatron_folder_is_whole(foreign: Path) -> None:
    adopt(str(foreign))
    assert verify_dataset(str(foreign)) == []


def test_documents_of_several_sequences_are_counted_as_documents(megatron: Any, tmp_path: Path) -> None:
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=np.uint16)
    builder.add_document(np.arange(9), [4, 5])
    builder.finalize(str(tmp_path / "x.idx"))
    adopt(str(tmp_path))
    assert (read_manifest(tmp_path).samples, verify_dataset(str(tmp_path))) == (1, [])


@pytest.fixture
def foreign_tars(webdataset: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "tars"
    folder.mkdir()
    for number in range(2):
        with webdataset.TarWriter(str(folder / f"{number}.tar")) as writer:
            for key in range(3):
                writer.write({"__key__": f"{key:04d}", "txt": f"text {key}"})
    return folder


def test_a_webdataset_folder_is_adopted(foreign_tars: Path) -> None:
    adopt(str(foreign_tars))
    found = read_manifest(foreign_tars)
    assert (found.format, found.samples, len(found.shards)) == ("webdataset", 6, 2)


def test_an_adopted_webdataset_folder_is_whole(foreign_tars: Path) -> None:
    adopt(str(foreign_tars))
    assert verify_dataset(str(foreign_tars)) == []


def test_a_dataset_whose_manifest_was_lost_is_adopted(dataset: Path) -> None:
    before = read_manifest(dataset)
    (dataset / "manifest.json").unlink()
    adopt(str(dataset))
    found = read_manifest(dataset)
    assert (found.samples, found.tokens, found.bytes) == (before.samples, before.tokens, before.bytes)


def test_the_tokenizer_of_an_adopted_folder_can_be_named(foreign: Path, tokenizer_path: Path) -> None:
    assert adopt(str(foreign), tokenizer=str(tokenizer_path)).tokenizer.vocabulary == 2000  # type: ignore[union-attr]


def test_tokens_outside_the_named_vocabulary_are_found(
    megatron: Any, tokenizer_path: Path, tmp_path: Path
) -> None:
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=np.uint16)
    builder.add_document(np.array([1, 60_000]), [2])
    builder.finalize(str(tmp_path / "x.idx"))
    adopt(str(tmp_path), tokenizer=str(tokenizer_path))
    (fault,) = verify_dataset(str(tmp_path))
    assert "x.bin holds token 60,000" in fault


def test_a_folder_with_a_manifest_is_not_adopted_again(large_dataset: Path) -> None:
    with pytest.raises(UsageError, match="has a manifest already"):
        adopt(str(large_dataset))


def test_a_folder_without_shards_is_not_adopted(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds 0 Megatron pairs and 0 tars"):
        adopt(str(tmp_path))


@pytest.mark.parametrize("lost", ["a.bin", "a.idx"])
def test_a_folder_with_half_a_pair_is_not_adopted(lost: str, foreign: Path) -> None:
    (foreign / lost).unlink()
    with pytest.raises(BadShardError, match=rf"{lost} is missing"):
        adopt(str(foreign))


@pytest.mark.parametrize("form", ["megatron", "webdataset"])
def test_a_compressed_dataset_whose_manifest_was_lost_is_adopted(
    form: str, make: Any, corpus: Path, tmp_path: Path
) -> None:
    before, out = make(corpus, zstd=True, format=form).manifest, tmp_path / "out"
    (out / "manifest.json").unlink()
    adopt(str(out))
    found = read_manifest(out)
    assert (found.samples, found.bytes, found.compression) == (before.samples, before.bytes, "zstd")
    assert verify_dataset(str(out)) == []


def test_plain_and_compressed_shards_are_not_adopted_together(
    make: Any, corpus: Path, tmp_path: Path
) -> None:
    make(corpus, format="webdataset")
    make(corpus, format="webdataset", zstd=True, out=tmp_path / "packed")
    (tmp_path / "packed" / "shard-00000.tar.zst").rename(tmp_path / "out" / "shard-00001.tar.zst")
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(BadShardError, match="mixes plain and compressed"):
        adopt(str(tmp_path / "out"))


def test_a_cut_pair_is_not_adopted(foreign: Path) -> None:
    (foreign / "a.bin").write_bytes(b"\0" * 8)
    with pytest.raises(BadShardError, match=r"a\.idx describes"):
        adopt(str(foreign))


def test_a_cut_tar_is_not_adopted(foreign_tars: Path) -> None:
    (foreign_tars / "0.tar").write_bytes((foreign_tars / "0.tar").read_bytes()[:1500])
    with pytest.raises(BadShardError, match=r"0\.tar"):
        adopt(str(foreign_tars))


def test_the_command_adopts_a_folder(foreign: Path, run_stoker: Any) -> None:
    found = json.loads(run_stoker("prepare", "index", foreign, "--json").stdout)
    assert (found["format"], found["samples"], found["tokens"]) == ("megatron", 4, 16)
