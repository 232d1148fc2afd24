"""Perceptual duplicates: candidates by their hashes, confirmed by their pixels, the largest stays."""

from __future__ import annotations

import io
import json
import math
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from made_photos import encoded, photo
from PIL import Image

from stoker.errors import UsageError
from stoker.prepare.media.looks import bit_count, near_pairs
from stoker.prepare.media.phash import hashes

if TYPE_CHECKING:
    from pathlib import Path


def test_a_scaled_and_encoded_copy_goes_and_the_largest_stays(take: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "raw" / name).mkdir(parents=True)
    for number in range(20):
        photo(number, size=(200, 150)).save(tmp_path / "raw" / "a" / f"{number}.png")
    for number in range(0, 20, 2):
        copy = photo(number, size=(200, 150)).resize((400, 300), Image.Resampling.BICUBIC)
        copy.save(tmp_path / "raw" / "b" / f"{number}.jpg", quality=60)
    assert len(take(tmp_path / "raw", out=tmp_path / "all")) == 30
    samples = take(tmp_path / "raw", near_dedup=0.9)
    assert len(samples) == 20
    sizes = sorted(Image.open(io.BytesIO(one.get("jpg") or one["png"])).size for one in samples)
    assert sizes == [(200, 150)] * 10 + [(400, 300)] * 10
    statistics = json.loads((tmp_path / "out" / "statistics.json").read_text())
    assert statistics["dropped"] == {"near_duplicate": 10}
    assert statistics["media"]["copies"] == {"near copies in other classes": 10}


def test_plain_images_of_other_colours_are_no_copies(take: Any, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    for level in range(0, 250, 25):
        Image.new("RGB", (64, 64), (level, level, level)).save(tmp_path / "raw" / f"{level}.png")
    assert len(take(tmp_path / "raw", near_dedup=0.9)) == 10


def test_every_pair_that_is_near_is_found() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 1 << 63, 60).astype(np.uint64)
    flips = [np.uint64(sum(1 << int(bit) for bit in rng.choice(64, 6, replace=False))) for _ in values]
    values = np.concatenate([values, values ^ np.array(flips), values[:20]])
    wanted = {
        (a, b) for a, b in combinations(range(len(values)), 2) if int(values[a] ^ values[b]).bit_count() <= 6
    }
    found = {tuple(pair) for part in range(7) for pair in near_pairs(values, part=part, bits=6).tolist()}
    assert found == wanted
    assert bit_count(values).tolist() == [int(value).bit_count() for value in values]


def test_hashes_are_those_of_the_transform_by_its_definition() -> None:
    """The phash of imagehash: 8 by 8 of the DCT of 32 by 32 pixels, above their median."""
    thumbs = np.stack([np.asarray(photo(n).convert("L").resize((32, 32))) for n in range(3)])
    waves = [[math.cos(math.pi * f * (x + 0.5) / 32) for x in range(32)] for f in range(8)]
    for thumb, found in zip(thumbs.tolist(), hashes(thumbs).tolist(), strict=True):
        rows = [[sum(p * w for p, w in zip(row, wave, strict=True)) for wave in waves] for row in thumb]
        low = [sum(rows[y][x] * wave[y] for y in range(32)) for wave in waves for x in range(8)]
        assert "".join("1" if value > median(low) else "0" for value in low) == f"{found:064b}"


def test_a_similarity_that_finds_everything_is_refused(take: Any, classes: Path) -> None:
    with pytest.raises(UsageError, match="no similarity of images"):
        take(classes, near_dedup=0.5)


def test_copies_are_found_without_a_shuffle_too(take: Any, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    for number in range(3):
        (tmp_path / "raw" / f"{number}.jpg").write_bytes(encoded(photo(number // 2)))
    assert len(take(tmp_path / "raw", shuffle=False)) == 2
    assert len(take(tmp_path / "raw", shuffle=False, near_dedup=0.95, out=tmp_path / "near")) == 2
