"""Crops are drawn from the order: the same whoever reads, and wherever the job went on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from pictures import make_pictures, small_pictures

import stoker

if TYPE_CHECKING:
    from pathlib import Path

RANDOM = stoker.Image(size=16, crop="random", flip=True)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_pictures(tmp_path_factory.mktemp("pictures"))


def loader(folder: object, *, rank: int = 0, size: int = 1, **options) -> stoker.Loader:
    options = {"batch_size": 2, "image": RANDOM, "output": "numpy", "seed": 7, "lanes": 6, **options}
    return stoker.Loader(folder, world=stoker.World(rank=rank, size=size), **options)


def seen(*loaders: stoker.Loader, epoch: int = 0) -> dict[int, bytes]:
    """The pixels of each class, in one epoch of all ranks."""
    found = {}
    for one in loaders:
        with one:
            for batch in one:
                for label, pixels in zip(batch["cls"], batch["image"], strict=True):
                    found[int(label)] = pixels.tobytes()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_number_of_ranks_sees_the_same_pixels(pictures: Path, ranks: int) -> None:
    alone = seen(loader(pictures))
    together = seen(*(loader(pictures, rank=rank, size=ranks) for rank in range(ranks)))
    assert len(alone) == 24
    assert together == alone


@pytest.mark.parametrize("options", [{"threads": 1}, {"threads": 5}, {"workers": "inline"}], ids=str)
def test_every_way_to_read_gives_the_same_pixels(pictures: Path, options: dict) -> None:
    assert seen(loader(pictures, **options)) == seen(loader(pictures))


@pytest.mark.integration
def test_worker_processes_give_the_same_pixels(pictures: Path) -> None:
    assert seen(loader(pictures, workers="process")) == seen(loader(pictures))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_after_a_resume_in_mid_epoch_every_number_of_ranks_sees_the_same_pixels(
    pictures: Path, ranks: int
) -> None:
    whole = seen(loader(pictures))
    with loader(pictures) as first:
        batches = iter(first)
        begun = [next(batches) for _ in range(3)]
        state = first.state_dict()
        batches.close()
    rest = [loader(pictures, rank=rank, size=ranks) for rank in range(ranks)]
    for one in rest:
        one.load_state_dict(state)
    found = seen(*rest)
    found |= {int(b["cls"][n]): b["image"][n].tobytes() for b in begun for n in range(2)}
    assert found == {label: whole[label] for label in found}
    assert len(found) == 24 or ranks > 1  # what fills no batch of all ranks is left out


def test_another_epoch_and_another_seed_crop_anew(pictures: Path) -> None:
    with loader(pictures) as one:
        first, second = (
            {int(b["cls"][n]): b["image"][n].tobytes() for b in one for n in range(2)} for _ in range(2)
        )
    other = seen(loader(pictures, seed=8))
    for anew in (second, other):
        assert sum(anew[label] == first[label] for label in first) < 3


def test_a_sample_that_a_blend_repeats_is_cropped_anew(tmp_path: Path) -> None:
    few, many = small_pictures(tmp_path / "few", 2), small_pictures(tmp_path / "many", 22)
    with stoker.Loader(
        [few, many], weights=(1, 1), batch_size=2, image=RANDOM, output="numpy", world=stoker.World()
    ) as blend:
        crops = [b["image"][n].tobytes() for b in blend for n in range(2) if b["cls"][n] == 1]
    assert len(crops) > 4
    assert len(set(crops)) >= len(crops) - 2


def test_a_center_crop_is_the_same_each_time(pictures: Path) -> None:
    image = stoker.Image(size=16, crop="center")
    with loader(pictures, image=image, shuffle="off") as one:
        assert [b["image"].tobytes() for b in one] == [b["image"].tobytes() for b in one]


def test_several_crops_of_an_image_are_drawn_apart(pictures: Path) -> None:
    images = {"one": RANDOM, "other": RANDOM, "small": stoker.Image(size=8)}
    with loader(pictures, image=images) as several:
        batch = next(iter(several))
    assert batch["small"].shape == (2, 8, 8, 3)
    assert (batch["one"] != batch["other"]).any()


def test_members_beside_the_image_stay_as_they_are(tmp_path: Path, pictures: Path) -> None:
    image = (pictures / "t0000.tar").read_bytes()
    start = 512
    size = int(image[124:135], 8)
    jpeg = image[start : start + size]
    folder = make_pictures(
        tmp_path, [[("jpg", jpeg), ("json", b'{"n": 1}'), ("txt", b"words"), ("cls", b" 3\n")]] * 2
    )
    with loader(folder, batch_size=2) as one:
        batch = next(iter(one))
    assert batch["json"] == [b'{"n": 1}'] * 2
    assert batch["txt"] == [b"words"] * 2
    assert batch["cls"].dtype == np.int64
    assert batch["cls"].tolist() == [3, 3]
    assert "jpg" not in batch
    assert batch["image"].shape == (2, 16, 16, 3)
