"""Folders that other libraries wrote, read with those: MosaicML's MDS, litdata's, Hugging Face's.

They become numbered samples, as any map-style dataset: the order is computed here, so nothing of those
libraries that shuffles, shares out among ranks or resumes is used.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

from stoker.errors import BadManifestError, UsageError, require
from stoker.manifest import NAME


def open_foreign(folder: Path) -> Any:
    """The samples of a folder that is one of theirs and has no manifest of ours; None of any other."""
    if (folder / NAME).exists():
        return None
    if (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file():
        return require("datasets").load_from_disk(str(folder))
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob("*/dataset_info.json"))
        raise UsageError(
            f"{folder} is several datasets: {', '.join(splits)}",
            hint=f"give the folder of one of them: {folder / (splits or ['train'])[0]}",
        )
    index = _index_of(folder)
    if "shards" in index:
        return MdsFolder(folder, index["shards"])
    if "chunks" in index:
        _check_litdata(folder, index.get("config") or {})
        return require("litdata").StreamingDataset(str(folder), shuffle=False)
    return None


def _check_litdata(folder: Path, config: dict[str, Any]) -> None:
    """What their reader would have to be told."""
    if (loader := config.get("item_loader") or "PyTreeLoader") != "PyTreeLoader":
        raise UsageError(
            f"{folder} was written for a {loader}, which has to be told how long a sample is",
            hint=f"give litdata.StreamingDataset({str(folder)!r}, item_loader={loader}(...)) in its place",
        )


def _index_of(folder: Path) -> dict[str, Any]:
    path = folder / "index.json"
    if not path.is_file():
        return {}
    try:
        index = json.loads(path.read_text())
    except ValueError as error:
        raise BadManifestError(f"{path} is no JSON: {error}", hint="restore it from another copy") from error
    return index if isinstance(index, dict) else {}


def samples_in(source: Any) -> int:
    """How many samples there are to number. The length of a StreamingDataset, litdata's or MosaicML's, is
    what one rank of a job would get of it, while its samples are numbered through all of them."""
    samples = len(source)
    libraries = {kind.__module__.partition(".")[0] for kind in type(source).__mro__}
    try:
        if "litdata" in libraries:
            return _samples_in_litdata(source.shuffler.cache)
        if "streaming" in libraries and not isinstance(source, MdsFolder):
            return int(source.size)
    except (AttributeError, TypeError) as error:
        raise UsageError(
            f"{type(source).__qualname__} says that this rank gets {samples:,} of its samples, and not how "
            f"many it holds: {error}",
            hint="give the folder of its shards instead, or another version of its library",
        ) from error
    return samples


def _samples_in_litdata(cache: Any) -> int:
    used = sum(int(stop) - int(start) for _, start, stop, _ in cache.get_chunk_intervals())
    if used != len(cache):
        raise UsageError(
            f"a litdata dataset that uses {used:,} samples of chunks of {len(cache):,} does not number them",
            hint="give all of it, or torch.utils.data.Subset(dataset, numbers) of all of it",
        )
    return used


class MdsFolder:
    """Samples of MosaicML's shards, which lie here and are not compressed. Their own StreamingDataset would
    meet other processes in shared memory, and have an order of its own."""

    def __init__(self, folder: Path, shards: list[dict[str, Any]]) -> None:
        formats = require("streaming.base.format")
        self._readers = [formats.reader_from_json(str(folder), None, shard) for shard in shards]
        self._ends = list(accumulate(reader.samples for reader in self._readers))
        _check_files(folder, self._readers)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> Any:
        shard = bisect_right(self._ends, number)
        return self._readers[shard][number - (self._ends[shard - 1] if shard else 0)]


def _check_files(folder: Path, readers: list[Any]) -> None:
    for reader in readers:
        for raw, _ in reader.file_pairs:
            path = folder / raw.basename
            if not path.is_file() or path.stat().st_size != raw.bytes:
                raise UsageError(
                    f"{path} does not lie here in its plain {raw.bytes:,} bytes",
                    hint="download all shards; compressed ones are to be written again without",
                )
