"""What images made by a card must be: run on a card, and here with a decoder that stands in for nvJPEG."""

from __future__ import annotations

import ctypes
import io

import numpy as np
import pytest
import torch
from pictures import SHAPES, encoded, make_pictures, photograph, reference
from PIL import Image as Pictures

import stoker
from stoker.errors import BadShardError
from stoker.load.media.boxes import uniforms
from stoker.load.media.image import Image

RANDOM = Image(size=16, crop="random", flip=True, engine="nvjpeg")
BROKEN = 5
_LEVELS = 2  # of 255, on average: nvJPEG's colours between those that are stored are not quite libjpeg's


class StandIn:
    """nvJPEG's part, by Pillow, in the memory of this machine."""

    is_hardware = False

    def __init__(self) -> None:
        self.refused_widths: set[int] = set()
        self.asked: list[int] = []

    def decode(self, addresses, sizes, planes, pitches, *, stream) -> bool:
        self.asked.append(len(addresses))
        if self.refused_widths & set(pitches.tolist()):
            return False
        for address, size, red, pitch in zip(addresses, sizes, planes, pitches, strict=True):
            data = ctypes.string_at(int(address), int(size))
            pixels = np.asarray(Pictures.open(io.BytesIO(data)).convert("RGB"))
            assert pixels.shape[1] == pitch
            for n in range(3):
                plane = np.ascontiguousarray(pixels[..., n])
                ctypes.memmove(int(red[n]), plane.ctypes.data, plane.nbytes)
        return True


def loader(folder, device, *, rank=0, size=1, **options) -> stoker.Loader:
    options = {"batch_size": 2, "image": RANDOM, "seed": 7, "lanes": 6, "device": device, **options}
    return stoker.Loader(folder, world=stoker.World(rank=rank, size=size), **options)


def seen(*loaders) -> dict[int, bytes]:
    """The pixels of each class, in one epoch of all ranks."""
    found = {}
    for one in loaders:
        with one:
            for batch in one:
                for label, pixels in zip(batch["cls"].tolist(), batch["image"], strict=True):
                    found[label] = pixels.cpu().numpy().tobytes()
    return found


def check_pixels(folder, device, shape) -> None:
    """Of one image of a shape: within two levels of what torchvision makes."""
    images = {
        "random": Image(size=97, crop="random", flip=True, engine="nvjpeg"),
        "small": Image(size=32, crop="random", engine="nvjpeg"),
        "center": Image(size=48, crop="center", engine="nvjpeg"),
    }
    if shape in ("a line", "a column"):  # the reference resizes all of it to a side of 100,000
        del images["center"]
    data = SHAPES[shape]()
    make_pictures(folder, [[("jpg", data), ("cls", b"%d" % n)] for n in range(4)], shards=1)
    with loader(folder, device, image=images, shuffle="off") as one:
        batches = list(one)
        report = one.report().images
    assert report is not None
    for which, (name, image) in enumerate(images.items()):
        wanted = _expected(folder, which, image, data)
        found = torch.cat([batch[name] for batch in batches]).permute(0, 2, 3, 1).cpu().numpy()
        for mine, reference_s in zip(found, wanted, strict=True):
            assert np.abs(mine.astype(int) - reference_s).mean() <= _LEVELS, (shape, name)


def _expected(folder, which, image, data):
    from stoker.load.media.boxes import keys_of
    from stoker.mixing import key_of

    samples = np.arange(4)
    zeros = np.zeros(4, np.int64)
    keys = keys_of(seed=key_of(7), epochs=zeros, datasets=zeros, samples=samples, what=which)
    return [reference(data, image, row) for row in uniforms(keys, 41).tolist()]


def check_ranks_and_resumes(folder, device) -> None:
    """The same pixels to the bit whoever reads, and wherever it went on."""
    alone = seen(loader(folder, device))
    assert len(alone) == 24
    for ranks in (2, 3):
        assert seen(*(loader(folder, device, rank=rank, size=ranks) for rank in range(ranks))) == alone
    for ranks in (1, 2, 3):
        with loader(folder, device) as first:
            batches = iter(first)
            begun = [next(batches) for _ in range(3)]
            state = first.state_dict()
            batches.close()
        rest = [loader(folder, device, rank=rank, size=ranks) for rank in range(ranks)]
        for one in rest:
            one.load_state_dict(state)
        found = seen(*rest)
        for batch in begun:
            labels = batch["cls"].tolist()
            found |= {label: batch["image"][n].cpu().numpy().tobytes() for n, label in enumerate(labels)}
        assert found == {label: alone[label] for label in found}
        assert len(found) == 24 or ranks > 1


def check_the_processor_crops_the_same(folder, device) -> None:
    """The same boxes, flips and labels as without a card."""
    with (
        loader(folder, device, batch_size=4) as card,
        loader(folder, "", batch_size=4, image=Image(size=16, flip=True, engine="auto")) as host,
    ):
        for mine, theirs in zip(card, host, strict=True):
            assert mine["cls"].tolist() == theirs["cls"].tolist()
            assert mine["__key__"] == theirs["__key__"]
            assert mine["image"].shape == theirs["image"].shape
            apart = (mine["image"].cpu().int() - theirs["image"].int()).abs().float().mean((1, 2, 3))
            assert (apart <= _LEVELS).all()


def check_numbers(folder, device) -> None:
    """Normalised floats are those of the bytes, to the bit; in channels-last memory."""
    made = {}
    for dtype in ("uint8", "f32", "bf16"):
        normalize = "" if dtype == "uint8" else "imagenet"
        image = Image(size=24, flip=True, normalize=normalize, dtype=dtype, engine="nvjpeg")
        with loader(folder, device, image=image, batch_size=8) as one:
            made[dtype] = next(iter(one))["image"]
    whole = made["uint8"].float() / 255
    mean, std = (whole.new_tensor(three).view(3, 1, 1) for three in Image(normalize="imagenet").mean_and_std)
    wanted = (whole - mean) / std
    assert torch.equal(made["f32"], wanted)
    assert torch.equal(made["bf16"], wanted.bfloat16())
    assert made["bf16"].is_contiguous(memory_format=torch.channels_last)


def broken(folder):
    """Pictures of which one is cut short, and one is a PNG."""
    good = [encoded(photograph(40, 44, seed=n)) for n in range(16)]
    good[BROKEN] = good[BROKEN][:300]
    good[9] = encoded(photograph(40, 44, seed=9), "PNG")
    return make_pictures(folder, [[("jpg", data), ("cls", b"%d" % n)] for n, data in enumerate(good)])


def check_policies(folder, device) -> None:
    with loader(folder, device) as one, pytest.raises(BadShardError, match=r"'s000005' in t0000\.tar"):
        list(one)
    with loader(folder, device, on_corrupt="skip", batch_size=4, workers="inline") as one:
        batches = list(one)
        report = one.report()
    labels = [label for batch in batches for label in batch["cls"].tolist()]
    assert set(labels) == set(range(16)) - {BROKEN}
    assert report.skipped_samples == 1
    assert (report.images.corrupt, report.images.by_card, report.images.by_library) == (1, 14, 1)
    assert report.images.decoded == 15
    twice = next(label for label in labels if labels.count(label) == 2)
    pixels = [b["image"][n] for b in batches for n, label in enumerate(b["cls"].tolist()) if label == twice]
    assert torch.equal(pixels[0], pixels[1])
    image = Image(size=16, on_corrupt="replace", engine="nvjpeg", normalize="imagenet")
    with loader(folder, device, image=image, batch_size=4) as one:
        for batch in one:
            for label, is_ok, pixels in zip(
                batch["cls"].tolist(), batch["image_ok"].tolist(), batch["image"], strict=True
            ):
                assert is_ok == (label != BROKEN)
                assert (pixels[0].unique().numel() == 1) == (label == BROKEN)  # black, normalised


def check_mixes(folder, device) -> None:
    image = Image(size=16, cutmix=1.0, mixup=0.4, normalize="imagenet", dtype="f32", engine="nvjpeg")
    plain = Image(size=16, normalize="imagenet", dtype="f32", engine="nvjpeg")
    with (
        loader(folder, device, image=image, batch_size=8) as one,
        loader(folder, device, image=plain, batch_size=8) as other,
    ):
        for mixed, pure in zip(one, other, strict=True):
            assert mixed["cls_mixed"].tolist() == np.roll(mixed["cls"].tolist(), 1).tolist()
            is_whole = mixed["lam"] == 1
            assert torch.equal(mixed["image"][is_whole], pure["image"][is_whole])
            assert not torch.equal(mixed["image"], pure["image"])
