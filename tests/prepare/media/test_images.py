"""Every image is checked, turned upright, made smaller, or refused with its reason."""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_photos import encoded, photo
from PIL import Image

from stoker.errors import UsageError
from stoker.prepare.media.images import BadImageError, Darkroom, UnwantedImageError, target_size
from stoker.prepare.media.recipe import MediaOptions

PLAIN = MediaOptions()


def made(data: bytes, options: MediaOptions = PLAIN, *, thumbs: bool = False, among: int = 1) -> Any:
    return Darkroom(options, thumbs=thumbs).make(data, among=among)


def pixels(data: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), np.int16)


SOUND = {
    "rgb": encoded(photo(1)),
    "progressive": encoded(photo(2), progressive=True),
    "grey": encoded(photo(3).convert("L")),
    "cmyk": encoded(photo(4).convert("CMYK")),
    "1x1": encoded(photo(5, size=(1, 1))),
    "10000x10": encoded(photo(6, size=(10_000, 10))),
    "odd": encoded(photo(7, size=(37, 211)), quality=40, subsampling=2),
    "png": encoded(photo(8), "PNG"),
    "png alpha": encoded(photo(8).convert("RGBA"), "PNG"),
    "png palette": encoded(photo(9).convert("P"), "PNG"),
    "png 16 bit": encoded(Image.fromarray(np.arange(6400, dtype=np.uint16).reshape(80, 80)), "PNG"),
    "png 1 bit": encoded(photo(9).convert("1"), "PNG"),
    "webp": encoded(photo(10), "WEBP"),
    "gif": encoded(photo(11), "GIF"),
    "bmp": encoded(photo(12), "BMP"),
    "tiff": encoded(photo(13), "TIFF"),
}


@pytest.mark.parametrize("data", SOUND.values(), ids=SOUND)
def test_a_sound_image_is_left_as_it_is(data: bytes) -> None:
    one = made(data, thumbs=True)
    assert (one.data, one.changes, one.thumb.shape) == (data, (), (32, 32))


@pytest.mark.parametrize("data", SOUND.values(), ids=SOUND)
def test_a_larger_image_gets_the_asked_longest_side(data: bytes) -> None:
    before = Image.open(io.BytesIO(data))
    one = made(data, MediaOptions(longest_side=32))
    after = Image.open(io.BytesIO(one.data))
    assert after.size == (one.width, one.height) == target_size(*before.size, MediaOptions(longest_side=32))
    assert max(after.size) == min(32, max(before.size))
    small = before.convert("RGB").resize(after.size, Image.Resampling.LANCZOS).convert("L")
    if min(after.size) > 1 and before.mode != "I;16":  # by brightness: colours are stored at half the size
        found = np.asarray(after.convert("RGB").convert("L"), np.int16)
        assert np.abs(found - np.asarray(small, np.int16)).mean() < 8


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pixels_are_turned_once_and_the_tag_is_gone(orientation: int) -> None:
    image = photo(orientation, size=(64, 48))
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = orientation, "a maker"
    data = encoded(image, exif=exif.tobytes(), quality=95)
    one = made(data)
    wanted = np.asarray(_upright(data), np.int16)
    after = Image.open(io.BytesIO(one.data))
    assert after.getexif().get(0x0112, 1) == 1
    assert after.getexif()[0x010F] == "a maker"
    assert np.abs(pixels(one.data) - wanted).mean() < 2
    assert (one.data == data) is (orientation == 1)
    assert one.changes == (() if orientation == 1 else ("turned",))


def _upright(data: bytes) -> Image.Image:
    from PIL import ImageOps

    return ImageOps.exif_transpose(Image.open(io.BytesIO(data)))


def test_a_jpeg_is_encoded_anew_only_where_that_shrinks_it() -> None:
    large, small = (
        encoded(photo(1, size=(300, 200)), quality=99),
        encoded(photo(1, size=(300, 200)), quality=30),
    )
    options = MediaOptions(jpeg_quality=80)
    assert len(made(large, options).data) < len(large)
    assert made(small, options).data == small


def test_nothing_is_made_larger() -> None:
    assert target_size(10, 20, MediaOptions(longest_side=100)) == (10, 20)
    assert target_size(100, 300, MediaOptions(shortest_side=50)) == (50, 150)
    assert target_size(10_000, 10, MediaOptions(longest_side=100)) == (100, 1)


def test_a_mask_beside_an_image_keeps_its_classes() -> None:
    mask = Image.fromarray(np.kron(np.array([[0, 7], [200, 3]], np.uint8), np.ones((40, 40), np.uint8)))
    one = made(encoded(mask, "PNG"), MediaOptions(longest_side=20), among=2)
    assert set(np.unique(np.asarray(Image.open(io.BytesIO(one.data))))) == {0, 3, 7, 200}


def test_an_animation_is_left_as_it_is() -> None:
    frames = [photo(number) for number in range(3)]
    out = io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    one = made(out.getvalue(), MediaOptions(longest_side=16))
    assert (one.data, one.changes) == (out.getvalue(), ("animated: left as it is",))


def bomb(width: int, height: int) -> bytes:
    """A PNG that says it has so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(bytes(1000)))
        + chunk(b"IEND", b"")
    )


WEBP_BOMB = (
    b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + b"\xff\xff\xff" * 2
)

BAD = {
    "empty": (b"", "not_an_image"),
    "text": (b"this is no picture at all", "not_an_image"),
    "a page": (b"<!DOCTYPE html><html>404</html>", "not_an_image"),
    "truncated jpeg": (SOUND["rgb"][: len(SOUND["rgb"]) // 2], "damaged"),
    "truncated png": (SOUND["png"][: len(SOUND["png"]) // 2], "damaged"),
    "truncated webp": (SOUND["webp"][: len(SOUND["webp"]) // 2], "damaged"),
    "only a start": (SOUND["rgb"][:20], "damaged"),
    "png bomb": (bomb(100_000, 100_000), "too_many_pixels"),
    "png over our limit alone": (bomb(13_000, 13_000), "too_many_pixels"),
    "webp bomb": (WEBP_BOMB, "too_many_pixels"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "not_an_image"),
}


@pytest.mark.parametrize(("data", "reason"), BAD.values(), ids=BAD)
def test_what_is_no_sound_image_is_refused_with_its_reason(data: bytes, reason: str) -> None:
    with pytest.raises(BadImageError) as raised:
        made(data, MediaOptions(max_pixels=150_000_000))
    assert raised.value.reason in (reason, "not_an_image" if reason == "damaged" else reason)


def test_thousands_of_damaged_images_raise_nothing_else() -> None:
    rng, darkroom = np.random.default_rng(0), Darkroom(MediaOptions(longest_side=24), thumbs=True)
    sound = list(SOUND.values())
    outcomes = {"made": 0, "refused": 0}
    for turn in range(600):
        data = bytearray(sound[turn % len(sound)])
        for place in rng.integers(0, len(data), rng.integers(1, 6)).tolist():
            data[place] = int(rng.integers(0, 256))
        try:
            one = darkroom.make(bytes(data[: len(data) - int(rng.integers(0, 2)) * int(rng.integers(0, 40))]))
            assert one.width * one.height <= 1 << 27
            outcomes["made"] += 1
        except BadImageError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 20


def test_filters_name_what_they_leave_out() -> None:
    with pytest.raises(UnwantedImageError, match="too_small"):
        made(SOUND["10000x10"], MediaOptions(min_side=11))
    with pytest.raises(UnwantedImageError, match="too_long_and_thin"):
        made(SOUND["10000x10"], MediaOptions(max_aspect=3))
    assert made(SOUND["rgb"], MediaOptions(min_side=64, max_aspect=1.5)).data == SOUND["rgb"]


@pytest.mark.parametrize(
    "given",
    [{"longest_side": 1, "shortest_side": 1}, {"min_side": -1}, {"jpeg_quality": 101}, {"max_aspect": 0.5}],
)
def test_options_that_make_no_sense_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        MediaOptions(**given)


def test_a_run_counts_what_it_left_out_and_names_it(take: Any, tmp_path: Path) -> None:
    folder = tmp_path / "raw"
    folder.mkdir()
    for name, data in {**SOUND, **{name: data for name, (data, _) in BAD.items()}}.items():
        (folder / f"{name}.jpg").write_bytes(data)
    options = MediaOptions(longest_side=64, min_side=2)
    samples = take(folder, on_error="skip", media=options)
    statistics = json.loads((tmp_path / "out" / "statistics.json").read_text())
    assert len(samples) == len(SOUND) - 1
    assert statistics["dropped"] == {"too_small": 1}
    assert statistics["media"]["changed"]["resized"] > 5
    assert sum(statistics["bad"].values()) == len(BAD)
    assert any("empty.jpg: not_an_image" in line for line in statistics["bad_examples"])
    kinds = {"jpg", "png", "webp"}
    assert {next(iter(set(one) - {"__key__"})) for one in samples} <= kinds | {"gif", "bmp", "tiff"}
