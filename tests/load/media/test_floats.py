"""What is made of pixels after the copy: plain operations of torch, the same on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from pictures import encoded, make_pictures, photograph, small_pictures

import stoker
from stoker.errors import UsageError
from stoker.load.media.mixing import mix_columns

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


def test_numpy_mixes_as_torch_does(pictures: Path) -> None:
    image = stoker.Image(size=16, mixup=0.5, cutmix=1.0, normalize="imagenet")
    options = {"batch_size": 16, "image": image}
    with stoker.Loader(pictures, output="numpy", **options) as one, stoker.Loader(pictures, **options) as two:
        mine, theirs = next(iter(one)), next(iter(two))
    assert mine.keys() == theirs.keys()
    assert np.abs(mine["image"] - theirs["image"].permute(0, 2, 3, 1).numpy()).max() < 1e-5
    assert (mine["cls_mixed"] == theirs["cls_mixed"].numpy()).all()


@pytest.mark.integration
@pytest.mark.parametrize("more", [{"dtype": "bf16"}, {"mixup": 0.5, "cutmix": 1.0, "dtype": "f16"}], ids=str)
def test_worker_processes_send_bytes_and_floats_are_made_here(pictures: Path, more: dict) -> None:
    options = {"batch_size": 8, "image": stoker.Image(size=16, normalize="imagenet", **more)}
    with (
        stoker.Loader(pictures, workers="process", **options) as one,
        stoker.Loader(pictures, **options) as two,
    ):
        for mine, theirs in zip(one, two, strict=True):
            assert mine.keys() == theirs.keys()
            assert torch.equal(mine["image"], theirs["image"])
            assert torch.equal(mine["cls"], theirs["cls"])


def test_a_loader_told_a_device_makes_of_images_what_was_asked_for_too(pictures: Path) -> None:
    image = stoker.Image(size=16, normalize="imagenet")
    with stoker.Loader(pictures, batch_size=4, image=image, device="cpu") as loader:
        found = next(iter(loader))["image"]
    assert found.shape == (4, 3, 16, 16)
    assert found.dtype == torch.float32


def test_images_of_their_own_sizes_are_made_alike_one_by_one(pictures: Path) -> None:
    image = stoker.Image(crop="whole", normalize="imagenet")
    options = {"batch_size": 4, "image": image, "shuffle": "off"}
    with stoker.Loader(pictures, output="numpy", **options) as one, stoker.Loader(pictures, **options) as two:
        mine, theirs = next(iter(one))["image"], next(iter(two))["image"]
    assert [tuple(one.shape) for one in theirs] == [(3, 48, 48 + n) for n in range(4)]
    for one, other in zip(mine, theirs, strict=True):
        assert np.abs(one - other.permute(1, 2, 0).numpy()).max() < 1e-5


def to_floats(sample: dict) -> dict:
    return {"image": sample["image"].astype(np.float32) / 255, "cls": sample["cls"]}


@pytest.mark.parametrize("output", ["numpy", "torch"])
def test_floats_of_a_transform_are_not_silently_left_as_they_are(pictures: Path, output: str) -> None:
    image = stoker.Image(size=16, normalize="imagenet")
    with (
        stoker.Loader(pictures, batch_size=4, image=image, transform=to_floats, output=output) as loader,
        pytest.raises(UsageError, match="nothing to work on"),
    ):
        next(iter(loader))


def test_an_image_that_is_mixed_with_a_black_one_is_not_whole(tmp_path: Path) -> None:
    jpeg = encoded(photograph(20, 20))
    samples = [[("jpg", jpeg[:200] if n == 1 else jpeg), ("cls", b"%d" % n)] for n in range(4)]
    image = stoker.Image(size=8, mixup=0.5, on_corrupt="replace")
    with stoker.Loader(make_pictures(tmp_path, samples), batch_size=4, image=image, shuffle="off") as loader:
        assert next(iter(loader))["image_ok"].tolist() == [True, False, False, True]


@pytest.mark.parametrize("alpha", [1e-9, 0.01, 0.2, 1.0])
def test_weights_are_drawn_from_beta(alpha: float) -> None:
    weights = mix_columns({"image": stoker.Image(mixup=alpha)}, np.arange(20_000, dtype=np.uint64))["lam"]
    assert abs(weights.mean() - 0.5) < 0.015
    assert abs(weights.var() - 1 / (4 * (2 * alpha + 1))) < 0.004


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
