"""Made photographs, and samples read back from shards."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from stoker.manifest import read_manifest


def photo(seed: int, *, size: tuple[int, int] = (96, 64)) -> Image.Image:
    """Smooth shapes, different for each seed: as compressible as a photograph."""
    coarse = np.random.default_rng(seed).integers(0, 255, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, format: str = "JPEG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def samples_of(folder: Path, *, epoch: int = 0) -> list[dict[str, Any]]:
    """Members of each sample, in the order of the dataset."""
    samples: list[dict[str, Any]] = []
    for shard in read_manifest(folder).shards:
        if shard.epoch != epoch:
            continue
        last = ""
        with tarfile.open(folder / f"{shard.name}.tar") as archive:
            for member in archive:
                key, _, suffix = member.name.partition(".")
                if key != last:
                    samples.append({"__key__": key})
                    last = key
                content = archive.extractfile(member)
                assert content
                samples[-1][suffix] = content.read()
    return samples
