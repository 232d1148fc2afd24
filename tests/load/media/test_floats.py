"""What is made of pixels after the copy: plain operations of torch, the same on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from pictures import small_pictures

import stoker
from stoker.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_pictures(tmp_path_factory.mktemp("floats"), 16)


def first(folder: Path, **image) -> dict:
    with stoker.feed(folder, batch_size=8, device="cpu", image=stoker.Image(size=16, **image)) as feeder:
        return next(iter(feeder))


def test_bytes_come_with_their_channels_last(pictures: Path) -> None:
    pixels = first(pictures)["image"]
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (8, 3, 16, 16)
    assert pixels.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("dtype", "limit"), [("bf16", 0.02), ("f16", 2e-3), ("f32", 1e-5), ("", 1e-5)])
def test_normalised_pixels_are_what_the_formula_says(pictures: Path, dtype: str, limit: float) -> None:
    plain = first(pictures)["image"].permute(0, 2, 3, 1).numpy()
    found = first(pictures, normalize="imagenet", dtype=dtype)["image"]
    wanted = (plain / 255 - MEAN) / STD
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert np.abs(found.float().permute(0, 2, 3, 1).numpy() - wanted).max() < limit


def test_numpy_gets_the_same_with_its_channels_last(pictures: Path) -> None:
    image = stoker.Image(size=16, normalize=((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)))
    with (
        stoker.Loader(pictures, batch_size=8, image=image, output="numpy") as one,
        stoker.Loader(pictures, batch_size=8, image=image) as other,
    ):
        mine, theirs = next(iter(one))["image"], next(iter(other))["image"]
    assert mine.shape == (8, 16, 16, 3)
    assert mine.dtype == np.float32
    assert np.abs(mine - theirs.permute(0, 2, 3, 1).numpy()).max() < 1e-5


def test_mixup_blends_each_image_with_the_one_before_it(pictures: Path) -> None:
    plain, found = first(pictures, dtype="f32"), first(pictures, mixup=0.4)
    weight = found["lam"].view(-1, 1, 1, 1)
    wanted = plain["image"] * weight + plain["image"].roll(1, 0) * (1 - weight)
    assert (found["image"] - wanted).abs().max() < 1e-6
    assert found["cls_mixed"].tolist() == plain["cls"].roll(1).tolist()
    assert ((found["lam"] >= 0) & (found["lam"] <= 1)).all()
    assert found["lam"].unique().numel() > 4
    assert "cut" not in found


def test_cutmix_takes_a_box_of_the_weight_it_says(pictures: Path) -> None:
    plain, found = first(pictures, dtype="f32")["image"], first(pictures, cutmix=1.0)
    other = plain.roll(1, 0)
    for row in range(8):
        from_other = (found["image"][row] == other[row]).all(0)
        own = (found["image"][row] == plain[row]).all(0)
        assert (from_other | own).all()
        assert abs(float(from_other.float().mean()) - (1 - float(found["lam"][row]))) < 0.05


def test_weights_of_mixing_do_not_depend_on_the_number_of_ranks(pictures: Path) -> None:
    def weights(ranks: int) -> dict[int, float]:
        found = {}
        for rank in range(ranks):
            world = stoker.World(rank=rank, size=ranks)
            image = stoker.Image(size=16, mixup=0.4, cutmix=1.0)
            with stoker.Loader(pictures, batch_size=4, image=image, world=world, lanes=2) as loader:
                for batch in loader:
                    found |= dict(zip(batch["cls"].tolist(), batch["lam"].tolist(), strict=True))
        return found

    assert weights(1) == weights(2)


@pytest.mark.parametrize(
    "image",
    [
        {"size": 0},
        {"size": 2.5},
        {"scale": (0.5, 0.1)},
        {"ratio": (0, 1)},
        {"crop": "centre"},
        {"crop": "center", "resize": 10},
        {"normalize": "coco"},
        {"normalize": ((0, 0, 0), (1, 0, 1))},
        {"normalize": (0.5, 0.5)},
        {"normalize": "imagenet", "dtype": "uint8"},
        {"mixup": 2},
        {"dtype": "int8"},
        {"crop": "whole", "mixup": 0.5},
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_when_it_is_said(image: dict) -> None:
    with pytest.raises(UsageError):
        stoker.Image(**image)


@pytest.mark.parametrize(
    "options",
    [
        {"image": {}},
        {"image": "image"},
        {"image": stoker.Image(dtype="bf16"), "output": "numpy"},
        {"image": {"a": stoker.Image(), "b": stoker.Image(engine="pillow")}},
    ],
    ids=str,
)
def test_what_a_loader_cannot_do_is_refused(pictures: Path, options: dict) -> None:
    with pytest.raises(UsageError):
        stoker.Loader(pictures, batch_size=4, **options)


def test_images_are_of_tars() -> None:
    with pytest.raises(UsageError, match="members of WebDataset tars"):
        stoker.Loader(np.zeros((40, 3)), batch_size=4, image=stoker.Image())
