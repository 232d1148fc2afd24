"""WebDataset and compressed output."""

from __future__ import annotations

import io
import json
import tarfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from stoker.formats import megatron as pairs
from stoker.formats import tar
from stoker.formats.zstd import SeekableReader, zstd_module
from stoker.prepare.check import verify_dataset

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[..., Any]
    Encode = Callable[[str], list[int]]


def samples(tar: bytes) -> list[tuple[str, list[int], str]]:
    """(key, ids, text) of each sample."""
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        members = [(member.name, archive.extractfile(member).read()) for member in archive]  # type: ignore[union-attr]
    pairs = zip(members[::2], members[1::2], strict=True)
    return [(ids[0].partition(".")[0], json.loads(ids[1]), text[1].decode()) for ids, text in pairs]


@pytest.mark.parametrize("dedup", [False, True])
def test_webdataset_samples_hold_ids_and_text(
    dedup: bool, make: Make, corpus: Path, texts: list[str], encode: Encode, tmp_path: Path
) -> None:
    make(corpus, format="webdataset", shuffle=False, dedup=dedup)
    found = samples((tmp_path / "out" / "shard-00000.tar").read_bytes())
    assert [(ids, text) for _, ids, text in found] == [(encode(text), text) for text in texts]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it leaves its file open
def test_webdataset_decodes_our_samples(
    make: Make, corpus: Path, texts: list[str], encode: Encode, webdataset: Any, tmp_path: Path
) -> None:
    make(corpus, format="webdataset")
    dataset = webdataset.WebDataset(str(tmp_path / "out" / "shard-00000.tar"), shardshuffle=False).decode()
    found = {sample["text.txt"]: sample["token_ids.json"] for sample in dataset}
    assert found == {text: encode(text) for text in texts}


@pytest.mark.integration
def test_webdataset_keys_are_unique_over_all_shards(make: Make, large_corpus: Path, tmp_path: Path) -> None:
    done = make(large_corpus / "a.jsonl", format="webdataset", shard_bytes=4 << 20, epochs=2)
    keys = [
        key
        for shard in done.manifest.shards
        for key, _, _ in samples((tmp_path / "out" / f"{shard.name}.tar").read_bytes())
    ]
    assert len(done.manifest.shards) >= 4
    assert len(set(keys)) == len(keys)


def test_the_side_index_finds_every_sample(make: Make, corpus: Path, tmp_path: Path) -> None:
    make(corpus, format="webdataset")
    data = (tmp_path / "out" / "shard-00000.tar").read_bytes()
    with (tmp_path / "out" / "shard-00000.index.npz").open("rb") as file:
        index = tar.read_index(file, name="shard-00000")
    first = [index.offset[index.starts[n]] for n in range(len(index))]
    sizes = [index.size[index.starts[n]] for n in range(len(index))]
    found = [json.loads(data[start : start + size]) for start, size in zip(first, sizes, strict=True)]
    assert found == [ids for _, ids, _ in samples(data)]


def test_a_webdataset_is_counted_in_the_manifest(
    make: Make, corpus: Path, texts: list[str], encode: Encode
) -> None:
    found = make(corpus, format="webdataset").manifest
    assert (found.samples, found.tokens) == (len(texts), sum(len(encode(text)) for text in texts))


@pytest.mark.parametrize("options", [{}, {"shuffle": False, "dedup": False}], ids=["default", "bare"])
def test_compressed_tokens_are_the_plain_ones(
    options: dict[str, Any], make: Make, corpus: Path, tmp_path: Path
) -> None:
    make(corpus, out=tmp_path / "plain", **options)
    make(corpus, out=tmp_path / "packed", zstd=True, **options)
    packed = (tmp_path / "packed" / "shard-00000.bin.zst").read_bytes()
    assert zstd_module().decompress(packed) == (tmp_path / "plain" / "shard-00000.bin").read_bytes()


def test_a_document_of_a_compressed_shard_is_read_alone(
    make: Make, corpus: Path, texts: list[str], encode: Encode, tmp_path: Path
) -> None:
    make(corpus, zstd=True, shuffle=False)
    with (tmp_path / "out" / "shard-00000.idx").open("rb") as file:
        index = pairs.read_index(file, name="shard-00000")
    with SeekableReader((tmp_path / "out" / "shard-00000.bin.zst").open("rb"), name="x") as file:
        file.seek(int(index.offsets[40]))
        found = np.frombuffer(file.read(int(index.lengths[40]) * 2), "<u2").tolist()
    assert found == encode(texts[40])


def test_a_compressed_tar_is_the_plain_one(make: Make, corpus: Path, tmp_path: Path) -> None:
    make(corpus, out=tmp_path / "plain", format="webdataset")
    make(corpus, out=tmp_path / "packed", format="webdataset", zstd=True)
    packed = (tmp_path / "packed" / "shard-00000.tar.zst").read_bytes()
    assert zstd_module().decompress(packed) == (tmp_path / "plain" / "shard-00000.tar").read_bytes()


@pytest.mark.parametrize("format_", ["megatron", "webdataset"])
@pytest.mark.parametrize("zstd", [False, True])
@pytest.mark.parametrize("options", [{}, {"shuffle": False, "dedup": False}], ids=["default", "bare"])
def test_every_kind_of_dataset_passes_its_own_check(
    format_: str, zstd: bool, options: dict[str, Any], make: Make, corpus: Path, tmp_path: Path
) -> None:
    make(corpus, format=format_, zstd=zstd, **options)
    assert verify_dataset(str(tmp_path / "out")) == []


def test_a_large_vocabulary_is_written_as_int32(
    make: Make,
    corpus: Path,
    tokenizer_path: Path,
    texts: list[str],
    read_tokens: Any,
    encode: Encode,
    tmp_path: Path,
) -> None:
    definition = json.loads(tokenizer_path.read_text())
    definition["model"]["vocab"]["a token of its own"] = 65_500
    (tmp_path / "large.json").write_text(json.dumps(definition))
    done = make(corpus, tokenizer=str(tmp_path / "large.json"), shuffle=False)
    assert done.manifest.dtype == "int32"
    assert read_tokens(tmp_path / "out") == [encode(text) for text in texts]
