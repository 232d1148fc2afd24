"""Pixels are what torchvision makes: everything decoded, the same box resized with antialiasing by torch."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from pictures import SHAPES, encoded, photograph, reference, resized, whole
from PIL import Image as Pictures

from stoker.load.media.boxes import Crop, crop_of, uniforms
from stoker.load.media.decode import Decoder, Undecodable, choose_engine
from stoker.load.media.image import Image

ENGINES = ["libjpeg", "pillow"]


def decoded(engine: str, data: bytes, image: Image, numbers: list[float]) -> np.ndarray:
    decoder = Decoder(choose_engine(engine), max_pixels=image.max_pixels)

    def draw(width: int, height: int, turn: int) -> Crop:
        return crop_of(image, width, height, numbers, turn=turn)

    out = None if image.crop == "whole" else np.empty((image.size, image.size, 3), np.uint8)
    (found,), _ = decoder.crops(data, [draw], [out])
    return found


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize("shape", SHAPES)
def test_pixels_are_those_of_torchvision_within_one_level(engine: str, shape: str) -> None:
    data = SHAPES[shape]()
    images = [Image(size=side, crop="random", flip=True) for side in (32, 97)]
    if shape not in ("a line", "a column"):  # the reference resizes all of it to a side of 100,000
        images.append(Image(size=48, crop="center"))
    images.append(Image(crop="whole"))
    for image in images:
        for numbers in uniforms(np.arange(3, dtype=np.uint64), 41).tolist():
            wanted, found = reference(data, image, numbers), decoded(engine, data, image, numbers)
            assert found.shape == wanted.shape
            assert np.abs(found.astype(int) - wanted).mean() <= 1


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_a_line_is_cropped_in_the_middle_without_resizing_all_of_it(engine: str) -> None:
    data = encoded(np.full((10, 10_000, 3), 200, np.uint8))
    found = decoded(engine, data, Image(size=64, crop="center"), [])
    assert (found == 200).all()


def test_both_engines_agree_on_any_box() -> None:
    data = encoded(photograph(230, 310, seed=3), subsampling=2)
    image = Image(size=40, crop="random", scale=(0.01, 1.0), ratio=(0.2, 5.0))
    for numbers in uniforms(np.arange(60, dtype=np.uint64), 41).tolist():
        one, other = (decoded(engine, data, image, numbers) for engine in ("auto", "pillow"))
        assert np.abs(one.astype(int) - other).mean() <= 1


def test_a_box_of_its_own_size_is_exact() -> None:
    data = encoded(photograph(120, 160, seed=5), subsampling=2)
    image = Image(size=33, crop="random")
    pixels = whole(data)
    decoder = Decoder(choose_engine("auto"), max_pixels=10**6)
    for left, top in [(0, 0), (1, 1), (17, 40), (127, 87), (64, 33)]:
        box = (left, top, left + image.size, top + image.size)
        crop = Crop(box=box, clip=box, width=33, height=33, mirrored=False)
        (found,), _ = decoder.crops(data, [lambda *_, crop=crop: crop], [np.empty((33, 33, 3), np.uint8)])
        assert (found == pixels[top : top + 33, left : left + 33]).all()


@pytest.mark.parametrize("level", [0, 255, None])
@pytest.mark.parametrize("sides", [(9000, 16), (16, 9000), (2000, 2000)])
def test_thousands_of_pixels_become_one_without_drifting(sides: tuple[int, int], level: int | None) -> None:
    noise = np.random.default_rng(4).integers(0, 256, (*sides, 3), np.uint8)
    data = encoded(noise if level is None else np.full_like(noise, level), quality=90)
    box = (0, 0, sides[1], sides[0])
    crop = Crop(box=box, clip=box, width=3, height=3, mirrored=True)
    decoder = Decoder(choose_engine("auto"), max_pixels=10**7)
    (found,), _ = decoder.crops(data, [lambda *_: crop], [np.empty((3, 3, 3), np.uint8)])
    tensor = torch.from_numpy(whole(data).copy()).permute(2, 0, 1)[None]
    wanted = resized(tensor.float(), (3, 3))[0].permute(1, 2, 0).numpy()[:, ::-1]
    assert np.abs(found - wanted).max() <= 1


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_bomb_is_refused_before_memory_is_taken(engine: str, kind: str) -> None:
    data = encoded(np.zeros((400, 300, 3), np.uint8), kind)
    with pytest.raises(Undecodable, match=r"300 x 400 pixels are more than max_pixels=100,000"):
        decoded(engine, data, Image(size=8, max_pixels=100_000), [0.5] * 41)


def test_a_jpeg_whose_headers_say_two_sizes_is_refused() -> None:
    data = bytearray(encoded(photograph(40, 40)))
    frame = bytes(data).index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = b"\xff\xff\xff\xff"
    with pytest.raises(Undecodable, match="max_pixels"):
        decoded("auto", bytes(data), Image(size=8), [0.5] * 41)


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize("data", [b"", b"\xff\xd8", b"\xff\xd8\xff\xda\0", b"GIF89a", b"words", bytes(9000)])
def test_what_is_no_image_is_undecodable(engine: str, data: bytes) -> None:
    with pytest.raises(Undecodable):
        decoded(engine, data, Image(size=8), [0.5] * 41)


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_a_file_cut_short_is_undecodable(engine: str) -> None:
    data = encoded(photograph(100, 100))
    with pytest.raises(Undecodable):
        decoded(engine, data[: len(data) // 2], Image(crop="whole"), [])


@pytest.mark.parametrize("kind", ["float32", "int32"])
def test_numbers_of_32_bits_are_refused_not_black(kind: str) -> None:
    ramp = np.linspace(0, 1 if kind == "float32" else 255, 32 * 32).reshape(32, 32).astype(kind)
    sink = io.BytesIO()
    Pictures.fromarray(ramp).save(sink, "TIFF")
    with pytest.raises(Undecodable, match="nothing says which of them is white"):
        decoded("pillow", sink.getvalue(), Image(size=8), [0.5] * 41)


def test_what_begins_as_no_image_is_quoted() -> None:
    with pytest.raises(Undecodable, match="no known image begins with b'<!doctype ht'"):
        decoded("pillow", b"<!doctype html><title>404</title>", Image(size=8), [0.5] * 41)


def _animation(kind: str) -> bytes:
    first, second = (Pictures.fromarray(np.full((24, 24, 3), grey, np.uint8)) for grey in (10, 200))
    sink = io.BytesIO()
    options = {"lossless": True} if kind == "WEBP" else {}
    first.save(sink, kind, save_all=True, append_images=[second], **options)
    return sink.getvalue()


@pytest.mark.parametrize("kind", ["WEBP", "GIF", "PNG"])
def test_of_an_animation_the_first_picture_is_taken(kind: str) -> None:
    found = decoded("pillow", _animation(kind), Image(size=8), [0.5] * 41)
    assert (found == 10).all()


def test_transparency_is_left_out_without_a_warning() -> None:
    palette = Pictures.fromarray(photograph(32, 32)).quantize(16)
    whole = decoded("pillow", _saved(palette), Image(crop="whole"), [0.5] * 41)
    for transparency in (3, bytes(range(0, 256, 16))):
        data = _saved(palette, transparency=transparency)
        assert (decoded("pillow", data, Image(crop="whole"), [0.5] * 41) == whole).all()


def _saved(picture: Pictures.Image, **options: object) -> bytes:
    sink = io.BytesIO()
    picture.save(sink, "PNG", **options)
    return sink.getvalue()


@pytest.mark.parametrize("colour", [2, 4, 6], ids=["rgb", "grey and alpha", "rgba"])
def test_pngs_of_16_bits_in_all_colours(colour: int) -> None:
    ramp = np.tile(np.linspace(0, 65535, 32), (32, 1))
    rgb, opaque = [ramp, ramp / 2, ramp / 4], ramp * 0 + 65535
    channels = {2: rgb, 4: [ramp, opaque], 6: [*rgb, opaque]}
    planes = np.stack(channels[colour], -1).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in planes)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 32, 32, 16, colour, 0, 0, 0))
    data = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    found = decoded("pillow", data, Image(crop="whole"), [0.5] * 41).astype(int)
    shown = [planes[..., 0]] * 3 if colour == 4 else [planes[..., n] for n in range(3)]
    assert np.abs(found - np.stack(shown, -1).astype(int) / 257).max() <= 1


def test_cmyk_is_read_as_adobe_writes_it_with_its_marker_and_without() -> None:
    rgb = Pictures.fromarray(photograph(48, 48))
    sink = io.BytesIO()
    rgb.convert("CMYK").save(sink, "JPEG", quality=98, subsampling=0)
    data = sink.getvalue()
    at = data.index(b"\xff\xee")
    unmarked = data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4], "big") :]
    for some in (data, unmarked):
        found = decoded("pillow", some, Image(crop="whole"), [0.5] * 41)
        assert np.abs(found.astype(int) - np.asarray(rgb).astype(int)).mean() < 3
