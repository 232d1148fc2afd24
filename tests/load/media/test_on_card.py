"""Images made by a card, with a decoder that stands in for nvJPEG: what is done around it, without a card."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import on_card
import pytest
import torch
from pictures import SHAPES, encoded, make_pictures, photograph, small_pictures

import stoker
from stoker.errors import UsageError
from stoker.load.device import crops, nvjpeg, pictures
from stoker.load.media.image import Image
from stoker.native import native

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DEVICE = "cpu"


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch, skip_or_fail: Callable[[str], None]) -> on_card.StandIn:
    survey = native("load.media._survey")
    if not survey:
        skip_or_fail("the C modules were not built")
    one = on_card.StandIn()

    def opened(device, **options):
        return pictures.Card(device, one, survey, **options)

    monkeypatch.setattr(pictures, "open_card", opened)
    return one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.mark.parametrize("shape", SHAPES)
def test_pixels_are_torchvisions_within_two_levels(tmp_path, decoder, shape) -> None:
    on_card.check_pixels(tmp_path, DEVICE, shape)


def test_ranks_and_resumes_see_the_same_pixels(folder, decoder) -> None:
    on_card.check_ranks_and_resumes(folder, DEVICE)
    assert decoder.asked


def test_the_processor_would_have_cropped_the_same(folder, decoder) -> None:
    on_card.check_the_processor_crops_the_same(folder, DEVICE)


def test_numbers_are_those_of_the_bytes(folder, decoder) -> None:
    on_card.check_numbers(folder, DEVICE)


def test_policies_for_broken_images_hold(tmp_path, decoder) -> None:
    on_card.check_policies(on_card.broken(tmp_path), DEVICE)


def test_images_are_mixed(folder, decoder) -> None:
    on_card.check_mixes(folder, DEVICE)


@pytest.mark.parametrize("on_corrupt", ["raise", "skip"])
def test_what_the_decoder_refuses_is_found_and_left_to_the_processor(tmp_path, decoder, on_corrupt) -> None:
    decoder.refused_widths = {51, 53}
    samples = [[("jpg", encoded(photograph(40, 48 + n))), ("cls", b"%d" % n)] for n in range(8)]
    folder = make_pictures(tmp_path, samples, shards=1)
    with (
        on_card.loader(folder, DEVICE, batch_size=8, on_corrupt=on_corrupt, workers="inline") as card,
        on_card.loader(folder, "", batch_size=8, image=Image(size=16, flip=True)) as host,
    ):
        (mine,), (theirs,) = list(card), list(host)
        report = card.report().images
    assert (report.by_card, report.decoded, report.corrupt) == (6, 8, 0)
    assert decoder.asked[0] == 8
    assert decoder.asked.count(1) >= 2
    apart = (mine["image"].int() - theirs["image"].int()).abs().float().mean((1, 2, 3))
    assert (apart <= 1).all()


class _Clock:
    """Each look at it takes a second, and so does what else is added."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.parametrize("card_s", [9.0, -0.5], ids=["slow", "fast"])
def test_the_faster_of_card_and_processor_goes_on(monkeypatch, folder, decoder, card_s) -> None:
    clock, taken = _Clock(), decoder.decode
    monkeypatch.setattr(pictures, "time", clock)

    def decode(*args, **options):
        clock.now += card_s
        return taken(*args, **options)

    monkeypatch.setattr(decoder, "decode", decode)
    image, is_slow = Image(size=16, flip=True), card_s > 0
    with (
        on_card.loader(folder, DEVICE, image=image, batch_size=24, workers="inline") as one,
        on_card.loader(folder, "", image=image, batch_size=24) as host,
    ):
        mine, theirs = [next(iter(one)) for _ in range(3)], [next(iter(host)) for _ in range(3)]
        report = one.report().images
    assert report.engine == ("libjpeg" if is_slow else "nvjpeg")
    assert "images/s at the start" in report.why
    assert (report.by_card, report.decoded) == (0 if is_slow else 72, 72)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a["image"], b["image"]) or not is_slow
        apart = (a["image"].int() - b["image"].int()).abs().float().mean((1, 2, 3))
        assert (apart <= 1).all()


def test_a_card_that_takes_none_is_not_the_faster_one(folder, decoder, monkeypatch) -> None:
    """To refuse takes no time."""
    monkeypatch.setattr(decoder, "decode", lambda *args, **options: False)
    image = Image(size=16, flip=True)
    with on_card.loader(folder, DEVICE, image=image, batch_size=24, workers="inline") as one:
        list(one)
        report = one.report().images
    assert (report.engine, report.by_card, report.decoded) == ("libjpeg", 0, 24)
    assert ", 0 images/s at the start" in report.why


def test_what_comes_in_the_place_of_broken_ones_is_there_after_the_measuring(tmp_path, decoder) -> None:
    samples = [[("jpg", encoded(photograph(40, 44, seed=n))), ("cls", b"%d" % n)] for n in range(24)]
    samples[5][0] = ("jpg", b"")  # seen before anything is measured
    folder = make_pictures(tmp_path, samples)
    image = Image(size=16, on_corrupt="replace")
    with on_card.loader(folder, DEVICE, image=image, batch_size=24, workers="inline") as one:
        for _ in range(2):
            (batch,) = list(one)
            black = {
                label
                for label, pixels in zip(batch["cls"].tolist(), batch["image"], strict=True)
                if not pixels.any()
            }
            assert black == {5}
        assert "images/s at the start" in one.report().images.why


@pytest.mark.parametrize("workers", ["thread", "inline"])
def test_a_loop_after_close_goes_on(folder, decoder, workers) -> None:
    with on_card.loader(folder, DEVICE, workers=workers, threads=2) as one:
        batches = iter(one)
        begun = [next(batches)["cls"].tolist() for _ in range(2)]
        one.close()
        one.close()
        begun += [batch["cls"].tolist() for batch in one]
    assert sorted(label for labels in begun for label in labels) == list(range(24))


class Library:
    """libnvjpeg's calls, without engines of hardware; what is open."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.made = 0

    def _make(self, place) -> int:
        self.made += 1
        self.open.add(self.made)
        place._obj.value = self.made
        return 0

    def nvjpegCreateEx(self, backend, device, pinned, flags, handle) -> int:
        return self._make(handle) if backend == 0 else 7

    def nvjpegJpegStateCreate(self, handle, state) -> int:
        return self._make(state)

    def nvjpegJpegStateDestroy(self, state) -> None:
        self.open.remove(state.value)

    nvjpegDestroy = nvjpegJpegStateDestroy

    def nvjpegDecodeBatchedInitialize(self, handle, state, *rest) -> int:
        return int({handle.value, state.value} != self.open)

    nvjpegDecodeBatched = nvjpegDecodeBatchedInitialize


def test_a_closed_decoder_is_opened_again_when_it_is_to_decode(monkeypatch) -> None:
    library, nothing = Library(), np.zeros(2, np.int64)
    monkeypatch.setattr(nvjpeg, "_opened", lambda cuda: library)
    one = nvjpeg.NvJpeg("12")
    for opened in (2, 4):
        for _ in range(2):
            assert one.decode(nothing, nothing, np.zeros((2, 3)), nothing, stream=0)
        assert library.made == opened
        one.close()
        one.close()
        assert not library.open


def test_blends_do_not_mix_up_which_samples_are_whole(tmp_path, decoder) -> None:
    """Samples of one number in two datasets, of which one is broken."""
    folders = []
    for which in range(2):
        samples = []
        for n in range(12):
            data = encoded(photograph(40, 44, seed=n))
            data = data if n % 2 == which else data[:300]
            samples.append([("jpg", data), ("cls", b"%d" % (100 * which + n))])
        folders.append(make_pictures(tmp_path / str(which), samples))
    image = Image(size=16, on_corrupt="replace", engine="nvjpeg")
    with stoker.Loader(
        folders, world=stoker.World(), image=image, batch_size=4, device=DEVICE, workers="inline"
    ) as one:
        for _ in range(3):
            for batch in one:
                wanted = [label % 100 % 2 == label // 100 for label in batch["cls"].tolist()]
                assert batch["image_ok"].tolist() == wanted


def test_room_for_pixels_is_bounded(monkeypatch, folder, decoder) -> None:
    monkeypatch.setattr(pictures, "_ARENA_BYTES", 3 * 48 * 52 * 3)
    alone = on_card.seen(on_card.loader(folder, DEVICE, batch_size=12))
    assert max(decoder.asked) <= 3
    monkeypatch.undo()
    assert len(alone) == 24


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"transform": lambda sample: sample}, "a transform or a collate"),
        ({"workers": "process"}, "have no card"),
        ({"device": ""}, "do not go to a CUDA device"),
        ({"image": Image(crop="whole", engine="nvjpeg")}, "of their own sizes"),
        ({}, "cpu is no card"),
    ],
)
def test_who_asks_for_a_card_is_told_why_not(folder, options, why) -> None:
    with pytest.raises(UsageError, match=why) as raised:
        on_card.loader(folder, **{"device": DEVICE, **options})
    assert 'engine="auto"' in raised.value.hint


def test_who_does_not_ask_gets_what_there_is(folder) -> None:
    with on_card.loader(folder, DEVICE, image=Image(size=16)) as one:
        next(iter(one))
        assert one.report().images.by_card == 0
        assert not one.makes_on_device


def test_the_twin_of_the_kernel_takes_any_box() -> None:
    """Against torch's own antialiased resize, of boxes that lie between pixels."""
    rng = np.random.default_rng(0)
    pixels = torch.from_numpy(photograph(70, 90).copy())
    arena = pixels.permute(2, 0, 1).contiguous().view(-1)
    for _ in range(20):
        left, top = rng.integers(0, 40, 2).tolist()
        box = left, top, left + int(rng.integers(1, 50)), top + int(rng.integers(1, 30))
        crop = crops.Crop(box=box, clip=box, width=20, height=20, mirrored=bool(rng.integers(2)))
        out = torch.zeros((1, 20, 20, 3), dtype=torch.uint8)
        cuts = crops.cuts_of([crops.Place(at=0, width=90, height=70)], [crop], [0])
        crops.put_crops(stoker.load.device.streams.Device("cpu"), arena, cuts, out, Image(size=20))
        part = pixels[box[1] : box[3], box[0] : box[2]].permute(2, 0, 1)[None].float()
        wanted = torch.nn.functional.interpolate(part, size=(20, 20), mode="bilinear", antialias=True)[0]
        wanted = wanted.flip(2) if crop.mirrored else wanted
        assert (out[0].permute(2, 0, 1).float() - wanted).abs().max() <= 0.51
