"""Verification and adoption: a dataset checked against its manifest, or a manifest for one without."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from stoker import __version__
from stoker.errors import BadManifestError, BadShardError, StokerError, UsageError
from stoker.formats import megatron, tar
from stoker.formats.checksums import hash_file
from stoker.formats.sizes import counted
from stoker.formats.zstd import SeekableReader
from stoker.machine.allowed import usable_cores
from stoker.manifest import (
    NAME,
    FileRecord,
    Manifest,
    ShardRecord,
    TokenizerRecord,
    check_pairs,
    find_manifest,
    read_blocks,
    read_manifest,
    write_manifest,
)
from stoker.prepare.finish import STATISTICS_NAME, read_statistics
from stoker.prepare.job import TOKENIZER_NAME
from stoker.prepare.tokens import load_tokenizer
from stoker.storage import Store, join_url, named_errors, open_store


def verify_dataset(url: str) -> list[str]:
    """Every fault found, one sentence each; none for a dataset that is whole."""
    manifest, store = read_manifest(url), open_store(url)
    check_pairs(manifest, name=url)
    blocks = read_blocks(store, manifest)

    def check(shard: ShardRecord) -> list[str]:
        found = [
            fault for file in shard.files for fault in _file_faults(store, file, blocks[file.name], manifest)
        ]
        return found or _shard_faults(store, shard, manifest)

    with ThreadPoolExecutor(usable_cores()) as threads:  # reading and hashing release the GIL
        faults = [fault for faults in threads.map(check, manifest.shards) for fault in faults]
    return faults + _side_faults(url, store, manifest)


def _side_faults(url: str, store: Store, manifest: Manifest) -> list[str]:
    """The files beside the shards that `prepare` wrote: an adopted dataset has none of them."""
    if not manifest.plan:
        return []
    faults = []
    try:
        counted_out = read_statistics(url)
        if counted_out.tokens_out * manifest.epochs != manifest.tokens:
            faults.append(
                f"{join_url(store.url, STATISTICS_NAME)} counts {counted_out.tokens_out:,} tokens an epoch, "
                f"its manifest {manifest.tokens:,} in {counted(manifest.epochs, 'epoch')}"
            )
    except StokerError as error:
        faults.append(error.message)
    return faults + _tokenizer_faults(store, manifest)


def _tokenizer_faults(store: Store, manifest: Manifest) -> list[str]:
    """The definition must be the one that the manifest names by its digest."""
    record = manifest.tokenizer
    if record is None or record.engine == "tiktoken":
        return []
    name = join_url(store.url, TOKENIZER_NAME)
    try:
        with named_errors("read", name), store.open(TOKENIZER_NAME) as file:
            found = xxhash.xxh3_128_hexdigest(file.read())
    except StokerError as error:
        return [error.message]
    return [] if found == record.digest else [f"{name} is not the tokenizer that its manifest names"]


def _file_faults(
    store: Store, record: FileRecord, digests: npt.NDArray[np.uint64], manifest: Manifest
) -> list[str]:
    name = join_url(store.url, record.name)
    try:
        with named_errors("read", name), store.open(record.name) as file:
            hashed = hash_file(file, block_bytes=manifest.block_bytes)
    except StokerError as error:
        return [error.message]
    if hashed.bytes != record.bytes:
        return [f"{name} is {hashed.bytes:,} bytes, its manifest says {record.bytes:,}"]
    found = np.array(hashed.blocks(), np.uint64)
    bad = np.flatnonzero(found != digests).tolist()  # as many as the manifest's, since the size is right
    faults = [f"{name}: block {b} (bytes {b * manifest.block_bytes:,} on) is damaged" for b in bad]
    if not faults and hashed.digest() != record.xxh3:
        faults = [f"{name} has xxh3 {hashed.digest()}, its manifest says {record.xxh3}"]
    return faults


def _shard_faults(store: Store, shard: ShardRecord, manifest: Manifest) -> list[str]:
    """What the files say of themselves must agree with the manifest too."""
    try:
        with named_errors("read", join_url(store.url, shard.name)):
            samples, tokens = _counts(store, shard, manifest)
    except StokerError as error:
        return [error.message]
    if (samples, tokens) != (shard.samples, shard.tokens):
        return [
            f"{join_url(store.url, shard.name)} holds {counted(samples, 'sample')} and "
            f"{counted(tokens, 'token')}, "
            f"its manifest says {shard.samples:,} and {shard.tokens:,}"
        ]
    return []


def _counts(store: Store, shard: ShardRecord, manifest: Manifest) -> tuple[int, int]:
    data, side = shard.files
    name = join_url(store.url, side.name)
    with store.open(side.name) as file:
        if manifest.format == "webdataset":
            index = tar.read_index(io.BytesIO(file.read()), name=name)
            _check_tar(store, data.name, index)
            return len(index), shard.tokens
        pairs = megatron.read_index(file, name=name)
    megatron.check_pair(pairs, bin_bytes=_plain_bytes(store, data), name=name)
    if manifest.tokenizer and pairs.tokens:
        _check_ids(store, data, pairs, manifest.tokenizer.vocabulary)
    return len(pairs.documents) - 1, pairs.tokens


def _check_tar(store: Store, name: str, index: tar.TarIndex) -> None:
    with _open_plain(store, name) as file:
        found = tar.scan(file, name=join_url(store.url, name))
    if not (np.array_equal(found.offset, index.offset) and np.array_equal(found.keys, index.keys)):
        raise BadShardError(
            f"the index of {join_url(store.url, name)} does not describe it",
            hint="run `stoker prepare index`",
        )


def _check_ids(store: Store, record: FileRecord, index: megatron.MegatronIndex, vocabulary: int) -> None:
    with _open_plain(store, record.name) as file:
        while block := file.read(8 << 20):
            largest = int(np.frombuffer(block, index.dtype).max())
            if largest >= vocabulary:
                raise BadShardError(
                    f"{join_url(store.url, record.name)} holds token {largest:,}, "
                    f"its vocabulary has {vocabulary:,}",
                    hint="it was made with another tokenizer than its manifest says",
                )


def _plain_bytes(store: Store, record: FileRecord) -> int:
    if not record.name.endswith(".zst"):
        return record.bytes
    with store.open(record.name) as file:
        return SeekableReader(file, name=record.name).size


def _open_plain(store: Store, name: str) -> BinaryIO:
    file = store.open(name)
    if not name.endswith(".zst"):
        return file
    plain: Any = io.BufferedReader(SeekableReader(file, name=name), buffer_size=1 << 20)
    opened: BinaryIO = plain
    return opened


def adopt(url: str, *, tokenizer: str = "") -> Manifest:
    """Make a manifest for a folder of Megatron pairs or WebDataset tars."""
    store = open_store(url)
    if _has_manifest(url):
        raise UsageError(f"{url} has a manifest already", hint=f"delete {NAME} there to index it anew")
    names = [entry.path for entry in store.list() if not entry.path.startswith(".")]
    pairs = [name for name in names if name.endswith((".bin", ".bin.zst"))]
    tars = [name for name in names if name.endswith((".tar", ".tar.zst"))]
    _check_complete(url, pairs=pairs, indexes=[name for name in names if name.endswith(".idx")])
    _check_alike(url, [*pairs, *tars])
    if bool(pairs) == bool(tars):
        raise UsageError(
            f"{url} holds {counted(len(pairs), 'Megatron pair')} and {counted(len(tars), 'tar')}",
            hint="give a folder with one kind: NAME.bin beside NAME.idx, or NAME.tar",
        )
    found = [_adopt_pair(store, name) for name in pairs] or [_adopt_tar(store, name) for name in tars]
    manifest = Manifest(
        format="megatron" if pairs else "webdataset",
        shards=tuple(shard for shard, _, _ in found),
        dtype=_one_dtype(url, {dtype for _, _, dtype in found}),
        compression="zstd" if (pairs or tars)[0].endswith(".zst") else "",
        tokenizer=_tokenizer_record(tokenizer) if tokenizer else None,
        made_by=f"stoker {__version__} (adopted)",
    )
    blocks = np.array([digest for _, digests, _ in found for digest in digests], np.uint64)
    return write_manifest(store, manifest, blocks=blocks)


def _check_complete(url: str, *, pairs: list[str], indexes: list[str]) -> None:
    """Every pair has both of its files: tokens that are left out here would never be missed."""
    wanted = {f"{_stem(name)}.idx" for name in pairs}
    for name in sorted(wanted ^ set(indexes)):
        missing = name if name in wanted else f"{name.removesuffix('.idx')}.bin"
        raise BadShardError(
            f"{join_url(url, missing)} is missing: a shard is a .bin and an .idx",
            hint="bring it, or move what is left of that shard, or is none, out of the folder",
        )


def _check_alike(url: str, names: list[str]) -> None:
    if len({name.endswith(".zst") for name in names}) > 1:
        raise BadShardError(
            f"{url} mixes plain and compressed shards", hint="give each kind a folder of its own"
        )


def _stem(name: str) -> str:
    return name.removesuffix(".zst").removesuffix(".bin").removesuffix(".tar")


def _has_manifest(url: str) -> bool:
    """A torn one is none; one of another version of stoker is not ours to replace."""
    try:
        return find_manifest(url) is not None
    except BadManifestError as error:
        if error.__cause__ is None:
            raise
        return False


_Adopted = tuple[ShardRecord, tuple[int, ...], str]


def _adopt_pair(store: Store, name: str) -> _Adopted:
    stem = _stem(name)
    records, digests = _hash_files(store, [name, f"{stem}.idx"])
    with store.open(f"{stem}.idx") as file:
        index = megatron.read_index(file, name=join_url(store.url, f"{stem}.idx"))
    bin_bytes = _plain_bytes(store, records[0])
    megatron.check_pair(index, bin_bytes=bin_bytes, name=join_url(store.url, f"{stem}.idx"))
    shard = ShardRecord(name=stem, samples=len(index.documents) - 1, tokens=index.tokens, files=records)
    return shard, digests, index.dtype.name


def _adopt_tar(store: Store, name: str) -> _Adopted:
    stem = _stem(name)
    with _open_plain(store, name) as file:
        index = tar.scan(file, name=join_url(store.url, name))
    store.write(f"{stem}.index.npz", tar.index_bytes(index))
    records, digests = _hash_files(store, [name, f"{stem}.index.npz"])
    return ShardRecord(name=stem, samples=len(index), tokens=0, files=records), digests, ""


def _hash_files(store: Store, names: list[str]) -> tuple[tuple[FileRecord, ...], tuple[int, ...]]:
    records: list[FileRecord] = []
    digests: list[int] = []
    for name in names:
        with store.open(name) as file:
            hashed = hash_file(file)
        records.append(FileRecord(name=name, bytes=hashed.bytes, xxh3=hashed.digest()))
        digests += hashed.blocks()
    return tuple(records), tuple(digests)


def _one_dtype(url: str, dtypes: set[str]) -> str:
    if len(dtypes) > 1:
        raise BadShardError(
            f"{url} mixes token types {', '.join(sorted(dtypes))}", hint="give each type a folder of its own"
        )
    return dtypes.pop()


def _tokenizer_record(name: str) -> TokenizerRecord:
    tokenizer = load_tokenizer(name)
    return TokenizerRecord(
        name=name,
        digest=tokenizer.digest,
        vocabulary=tokenizer.vocabulary,
        eod=None,
        engine="unknown",
        engine_version="",
    )
