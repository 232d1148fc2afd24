"""Images decoded by a card."""

from __future__ import annotations

import numpy as np
import on_card
import pytest
import torch
from pictures import SHAPES, encoded, photograph, small_pictures

import stoker
from stoker.load.device import crops, pictures
from stoker.load.device.streams import Device
from stoker.load.media.boxes import Crop, crop_of
from stoker.load.media.decode import Decoder, choose_engine
from stoker.load.media.image import Image
from stoker.load.ordering.draw import Draw


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.mark.parametrize("shape", SHAPES)
def test_pixels_are_torchvisions_within_two_levels(tmp_path, shape):
    on_card.check_pixels(tmp_path, "cuda", shape)


def test_ranks_and_resumes_see_the_same_pixels(folder):
    on_card.check_ranks_and_resumes(folder, "cuda")


def test_the_processor_would_have_cropped_the_same(folder):
    on_card.check_the_processor_crops_the_same(folder, "cuda")


def test_numbers_are_those_of_the_bytes(folder):
    on_card.check_numbers(folder, "cuda")


def test_policies_for_broken_images_hold(tmp_path):
    on_card.check_policies(on_card.broken(tmp_path), "cuda")


def test_images_are_mixed(folder):
    on_card.check_mixes(folder, "cuda")


def test_the_kernel_makes_what_its_twin_makes(monkeypatch):
    """Any box, any turn, mirrored or not; as bytes, within a level where sums are near a half."""
    rng = np.random.default_rng(0)
    device, image = Device("cuda"), Image(size=37)
    height, width, count = 211, 173, 64
    arena = torch.from_numpy(photograph(height, width).copy()).permute(2, 0, 1).contiguous().view(-1).cuda()
    some = []
    for n in range(count):
        left, top = rng.uniform(0, 60, 2)
        box = left, top, left + rng.uniform(1, 110), top + rng.uniform(1, 150)
        clip = int(box[0]), int(box[1]), int(np.ceil(box[2])), int(np.ceil(box[3]))
        some.append(Crop(box=box, clip=clip, width=37, height=37, mirrored=n % 2 == 0, turn=1 + n % 8))
    cuts = crops.cuts_of([crops.Place(at=0, width=width, height=height)] * count, some, range(count))
    made = [torch.zeros((count, 37, 37, 3), dtype=torch.uint8, device="cuda") for _ in range(2)]
    crops.put_crops(device, arena, cuts, made[0], image)
    assert "Triton" in crops.cropped_by()
    monkeypatch.setattr(crops, "_kernel", lambda: None)
    crops.put_crops(device, arena, cuts, made[1], image)
    apart = (made[0].int() - made[1].int()).abs()
    assert apart.max() <= 1
    assert apart.float().mean() < 0.01


def test_batches_hold_while_slow_kernels_still_read_them(folder):
    image = Image(size=64, normalize="imagenet", dtype="bf16", engine="nvjpeg")
    options = {"batch_size": 4, "image": image, "seed": 3}
    sums = []
    with stoker.feed(folder, device="cuda", **options) as feeder:
        for _ in range(4):
            for batch in feeder:
                torch.cuda._sleep(2_000_000)
                sums.append(batch["image"].float().sum())
                del batch
        found = [float(one) for one in sums]
    again = []
    with stoker.feed(folder, device="cuda", **options) as feeder:
        for _ in range(4):
            for batch in feeder:
                torch.cuda.synchronize()
                again.append(float(batch["image"].float().sum()))
    assert found == again


def test_the_first_batch_decides_and_the_report_says_so(folder):
    with stoker.feed(folder, batch_size=24, image=Image(size=64), device="cuda") as feeder:
        batch = next(iter(feeder))
        report = feeder.report().images
    assert batch["image"].is_cuda
    assert batch["cls"].is_cuda
    assert "images/s at the start" in report.why
    print(report.why)


def test_what_a_transform_wants_goes_on_as_before(folder):
    image = Image(size=32, normalize="imagenet")
    with stoker.feed(folder, batch_size=4, image=image, device="cuda", transform=lambda s: s) as feeder:
        batch = next(iter(feeder))
        assert feeder.report().images.by_card == 0
    assert batch["image"].is_cuda
    assert batch["image"].dtype == torch.float32
    assert batch["image"].shape == (4, 3, 32, 32)


def test_mutated_images_come_as_the_processor_makes_them():
    """No crash, and nothing is whole that the processor refuses. Where numbers are larger than any picture's,
    what is made of them is each decoder's own."""
    rng, device, image = np.random.default_rng(1), Device("cuda"), Image(size=32, crop="center")
    card = pictures.open_card(device, max_pixels=10**6, is_chosen=True, threads=4)
    assert not isinstance(card, str), card
    host = Decoder(choose_engine("auto"), max_pixels=10**6)

    def by_processor(data):  # raises where it refuses
        return host.crops(data, [lambda *size: crop_of(image, *size[:2], [0.5] * 41, turn=size[2])], [None])[
            0
        ][0].astype(int)

    some = ({}, {"subsampling": 0}, {"subsampling": 1}, {"restart_marker_rows": 1})
    kinds = [encoded(photograph(97, 131), **more) for more in some] + [encoded(photograph(97, 131)[..., 0])]
    originals = [by_processor(data) for data in kinds]
    taken, differing = 0, []
    for number in range(40):
        of = rng.integers(len(kinds), size=256).tolist()
        mutated = {row: np.frombuffer(_mutated(rng, kinds[kind]), np.uint8) for row, kind in enumerate(of)}
        samples = 256 * number + np.arange(256)
        whole = card.whole(mutated, Draw(sample=samples, chunk=np.zeros(256, np.int64), keys=[(0, 0, 0)]))
        jpegs = {
            row: pictures.Jpeg(
                data=mutated[row],
                width=width,
                height=height,
                crops=[crop_of(image, width, height, [0.5] * 41, turn=turn)],
            )
            for row, (width, height, turn) in whole.items()
        }
        out = torch.zeros((256, 32, 32, 3), dtype=torch.uint8, device="cuda")
        with device.gathering():
            refused = card.decode(jpegs, {"image": out}, {"image": image})
        device.drain()
        made = out.cpu().numpy().astype(int)
        for row in jpegs.keys() - set(refused):
            taken += 1
            wanted = by_processor(mutated[row])
            if np.abs(made[row] - wanted).mean() > 2 and np.abs(wanted - originals[of[row]]).mean() < 1:
                differing.append((number, row))
    card.close()
    assert taken > 1000
    assert differing == []


def _mutated(rng, data):
    bytes_ = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        at, how = int(rng.integers(len(bytes_))), rng.integers(4)
        if how == 0:
            bytes_[at] = int(rng.integers(256))
        elif how == 1:
            bytes_[at] ^= 1 << int(rng.integers(8))
        elif how == 2:
            del bytes_[at : at + int(rng.integers(1, 30))]
        else:
            bytes_[at:at] = bytes(rng.integers(0, 256, int(rng.integers(1, 10)), dtype=np.uint8))
    return bytes(bytes_)
