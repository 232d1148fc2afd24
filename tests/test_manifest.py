"""The manifest: written last, read back equal, refused when torn or foreign."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from stoker.errors import BadManifestError
from stoker.manifest import (
    FileRecord,
    Manifest,
    ShardRecord,
    TokenizerRecord,
    parse_manifest,
    read_blocks,
    read_manifest,
    write_manifest,
)
from stoker.storage import open_store


def shard(number: int, size: int) -> ShardRecord:
    files = (
        FileRecord(name=f"shard-{number}.bin", bytes=size, xxh3="0" * 16),
        FileRecord(name=f"shard-{number}.idx", bytes=10, xxh3="1" * 16),
    )
    return ShardRecord(name=f"shard-{number}", samples=3, tokens=size // 2, files=files)


def manifest(**changed: object) -> Manifest:
    tokenizer = TokenizerRecord(
        name="t", digest="d", vocabulary=9, eod=0, engine="huggingface", engine_version="1"
    )
    facts = {
        "format": "megatron",
        "shards": (shard(0, 100), shard(1, 50)),
        "dtype": "uint16",
        "block_bytes": 64,
    }
    return Manifest(**{**facts, "tokenizer": tokenizer, **changed})  # type: ignore[arg-type]


BLOCKS = np.arange(5, dtype=np.uint64)  # 2 + 1 for the first shard, 1 + 1 for the second


def test_a_manifest_is_read_back_equal(tmp_path: Path) -> None:
    written = write_manifest(open_store(tmp_path), manifest(), blocks=BLOCKS)
    found = read_manifest(tmp_path)
    assert (found.shards, found.tokenizer, found.blocks_xxh3) == (
        written.shards,
        written.tokenizer,
        written.blocks_xxh3,
    )


def test_totals_are_sums_over_the_shards() -> None:
    assert (manifest().samples, manifest().tokens, manifest().bytes) == (6, 75, 170)


def test_totals_stand_in_the_file_for_other_readers() -> None:
    assert json.loads(manifest().to_json())["counts"] == {"samples": 6, "tokens": 75, "bytes": 170}


def test_each_file_finds_its_own_block_digests(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    found = read_blocks(store, write_manifest(store, manifest(), blocks=BLOCKS))
    assert {name: digests.tolist() for name, digests in found.items()} == {
        "shard-0.bin": [0, 1],
        "shard-0.idx": [2],
        "shard-1.bin": [3],
        "shard-1.idx": [4],
    }


def test_changed_block_digests_are_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    written = write_manifest(store, manifest(), blocks=BLOCKS)
    store.write("blocks.xxh3", BLOCKS[::-1].tobytes())
    with pytest.raises(BadManifestError, match=r"blocks\.xxh3 does not match"):
        read_blocks(store, written)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", '{"version": 1}', '{"version": 1, "shards": 3}'])
def test_a_torn_or_foreign_manifest_is_refused(text: str) -> None:
    with pytest.raises(BadManifestError, match=r"some/manifest\.json cannot be read"):
        parse_manifest(text, name="some/manifest.json")


def test_a_newer_manifest_says_its_version() -> None:
    with pytest.raises(BadManifestError, match="is version 99, this stoker reads version 1"):
        parse_manifest(json.dumps({"version": 99}), name="m")


def test_a_folder_without_a_manifest_hints_at_index(tmp_path: Path) -> None:
    with pytest.raises(BadManifestError) as caught:
        read_manifest(tmp_path)
    assert "stoker prepare index" in caught.value.hint


def test_a_manifest_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadManifestError, match="is not text"):
        read_manifest(tmp_path)


def test_block_digests_on_this_machine_are_mapped_not_held_by_every_rank(tmp_path: Path) -> None:
    written = write_manifest(open_store(tmp_path), manifest(), blocks=BLOCKS)
    found = read_blocks(open_store(tmp_path), written)
    address = found["shard-0.bin"].ctypes.data
    lines = Path("/proc/self/maps").read_text().splitlines()
    (line,) = (line for line in lines if line.endswith(str(tmp_path / "blocks.xxh3")))
    start, stop = (int(one, 16) for one in line.split()[0].split("-"))
    assert start <= address < stop
    assert not [
        fd for fd in Path("/proc/self/fd").iterdir() if fd.exists() and fd.resolve().name == "blocks.xxh3"
    ]
    assert [int(one) for digests in found.values() for one in digests] == BLOCKS.tolist()
