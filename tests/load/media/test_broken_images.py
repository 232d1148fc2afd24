"""An image that cannot be decoded: named and counted, and then what the user wanted."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
import pytest
from pictures import encoded, make_pictures, photograph
from PIL import Image as Pictures

import stoker
from stoker.errors import BadShardError, UsageError
from stoker.load.media import library
from stoker.load.media.boxes import Crop, crop_of, uniforms
from stoker.load.media.decode import Decoder, Undecodable, choose_engine
from stoker.load.media.image import Image

if TYPE_CHECKING:
    from pathlib import Path

BROKEN = 5


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    good = [encoded(photograph(40, 40, seed=n)) for n in range(16)]
    good[BROKEN] = good[BROKEN][:300]
    samples = [[("jpg", data), ("cls", b"%d" % n)] for n, data in enumerate(good)]
    return make_pictures(tmp_path_factory.mktemp("broken"), samples)


def loader(folder: Path, **options) -> stoker.Loader:
    options = {
        "batch_size": 4,
        "image": Image(size=16),
        "output": "numpy",
        "world": stoker.World(),
        **options,
    }
    return stoker.Loader(folder, **options)


def test_an_error_names_the_sample_and_its_shard(pictures: Path) -> None:
    with loader(pictures) as one, pytest.raises(BadShardError, match=r"'s000005' in t0000\.tar") as raised:
        list(one)
    assert 'on_corrupt="skip"' in raised.value.hint


@pytest.mark.parametrize("where", [{"on_corrupt": "skip"}, {"image": Image(size=16, on_corrupt="skip")}])
def test_skipped_another_stands_in_and_the_report_says_so(pictures: Path, where: dict) -> None:
    with loader(pictures, **where) as one:
        batches = list(one)
        report = one.report()
    labels = [int(label) for batch in batches for label in batch["cls"]]
    assert len(labels) == 16
    assert set(labels) == set(range(16)) - {BROKEN}
    assert report.skipped_samples == 1
    assert report.images is not None
    assert report.images.corrupt == 1
    assert "s000005" in report.images.named[0]
    stands_in = next(label for label in labels if labels.count(label) == 2)
    pixels = [b["image"][n] for b in batches for n in range(4) if b["cls"][n] == stands_in]
    assert (pixels[0] == pixels[1]).all()  # with its own label


def test_replaced_it_comes_black_and_says_so(pictures: Path) -> None:
    with loader(pictures, image=Image(size=16, on_corrupt="replace")) as one:
        batches = list(one)
    is_ok = {int(b["cls"][n]): bool(b["image_ok"][n]) for b in batches for n in range(4)}
    black = {int(b["cls"][n]) for b in batches for n in range(4) if not b["image"][n].any()}
    assert is_ok == {n: n != BROKEN for n in range(16)}
    assert black == {BROKEN}


def test_a_transform_gets_decoded_pixels_and_no_broken_ones(pictures: Path) -> None:
    def darker(sample: dict) -> dict:
        assert sample["image"].shape == (16, 16, 3)
        return {"dark": sample["image"] // 2, "cls": sample["cls"]}

    with (
        loader(pictures, transform=darker, on_corrupt="skip") as one,
        loader(pictures, on_corrupt="skip") as raw,
    ):
        for mine, theirs in zip(one, raw, strict=True):
            assert (mine["dark"] == theirs["image"] // 2).all()
            assert (mine["cls"] == theirs["cls"]).all()


def test_a_label_that_is_no_number_says_which(tmp_path: Path) -> None:
    jpeg = encoded(photograph(20, 20))
    folder = make_pictures(tmp_path, [[("jpg", jpeg), ("cls", b"cat")]] * 4)
    with loader(folder) as one, pytest.raises(BadShardError, match="'cat', no whole number"):
        list(one)


@pytest.mark.parametrize(
    ("members", "said"),
    [([("txt", b"a")], "none is an image"), ([("jpg", b"a"), ("png", b"b")], "all are an image")],
)
def test_samples_without_one_image_say_so(tmp_path: Path, members: list, said: str) -> None:
    with loader(make_pictures(tmp_path, [members] * 4)) as one, pytest.raises(BadShardError, match=said):
        list(one)


def test_one_of_several_images_is_named(tmp_path: Path) -> None:
    members = [("jpg", encoded(photograph(20, 20))), ("mask.png", encoded(photograph(20, 20), "PNG"))]
    with loader(make_pictures(tmp_path, [members] * 4), image=Image(size=16, member="mask.png")) as one:
        batch = next(iter(one))
    assert batch["jpg"][0] == members[0][1]


def test_a_column_does_not_hide_a_member(pictures: Path) -> None:
    with (
        loader(pictures, image={"cls": Image(size=16)}) as one,
        pytest.raises(UsageError, match="a member cls"),
    ):
        list(one)


def test_a_dataset_without_one_whole_image_says_so(tmp_path: Path) -> None:
    folder = make_pictures(tmp_path, [[("jpg", b"nothing")]] * 8)
    with loader(folder, on_corrupt="skip") as one, pytest.raises(BadShardError, match="are damaged"):
        list(one)


def _mutated(rng: np.random.Generator, data: bytes) -> bytes:
    """Bytes changed, cut out, put in, swapped, cut off, as disks, networks and enemies do it."""
    found = bytearray(data)
    for _ in range(int(rng.integers(1, 6))):
        at = int(rng.integers(0, max(1, len(found))))
        length = int(rng.integers(1, 64))
        kind = rng.integers(0, 6)
        if kind == 0 and found:
            found[at % len(found)] ^= 1 << int(rng.integers(0, 8))
        elif kind == 1:
            found[at : at + length] = rng.bytes(length)
        elif kind == 2:
            del found[at : at + length]
        elif kind == 3:
            found[at:at] = found[at // 2 : at // 2 + length]
        elif kind == 4:  # headers more often than pixels
            found[2 + at % 600 : 3 + at % 600] = rng.bytes(1)
        elif rng.integers(0, 8) == 0:
            del found[at:]
    return bytes(found)


def _seeds() -> list[bytes]:
    pixels = photograph(90, 120, seed=1)
    exif = Pictures.Exif()
    exif[0x0112] = 6
    cmyk = io.BytesIO()
    Pictures.fromarray(pixels).convert("CMYK").save(cmyk, "JPEG")
    return [
        encoded(pixels),
        encoded(pixels, progressive=True),
        encoded(pixels, subsampling=2, restart_marker_blocks=3),
        encoded(pixels, exif=exif, subsampling=0),
        encoded(pixels[..., 0]),
        cmyk.getvalue(),
        encoded(pixels, "PNG"),
        encoded(pixels, "WEBP"),
    ]


def check_mutated(count: int, seed: int) -> tuple[int, int]:
    """Mutated images: what is decoded is what the library makes of the same bytes, everything else is said to
    be broken; nothing else happens."""
    rng, seeds = np.random.default_rng(seed), _seeds()
    image = Image(size=24, max_pixels=4_000_000)
    ours, theirs = (Decoder(choose_engine(one), max_pixels=4_000_000) for one in ("auto", "pillow"))
    decoded = refused = 0
    for number in range(count):
        data = _mutated(rng, seeds[number % len(seeds)])
        numbers = uniforms(np.array([number], np.uint64), 41)[0].tolist()

        turns = []

        def draw(width: int, height: int, turn: int, numbers: list = numbers, turns: list = turns) -> Crop:
            turns.append(turn)
            return crop_of(image, width, height, numbers, turn=turn)

        try:
            (mine,), by_library = ours.crops(data, [draw], [np.empty((24, 24, 3), np.uint8)])
        except Undecodable:
            refused += 1
            continue
        decoded += 1
        if by_library:
            continue
        try:
            (other,), _ = theirs.crops(data, [draw], [np.empty((24, 24, 3), np.uint8)])
        except Undecodable:
            continue  # broken behind the box, which the library reads too
        assert turns[0] == turns[1]
        assert np.abs(mine.astype(int) - other).mean() <= 2, f"image {number} of seed {seed}"
    return decoded, refused


def test_mutated_images_are_refused_or_decoded_as_the_library_does() -> None:
    decoded, refused = check_mutated(400, seed=0)
    assert decoded > 20
    assert refused > 20


@pytest.mark.slow
def test_ten_thousand_mutated_images_end_well_in_bounded_memory() -> None:
    import resource

    check_mutated(500, seed=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    decoded, refused = check_mutated(10_000, seed=2)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert decoded + refused == 10_000
    assert after - before < 200 << 10  # KiB: one of 4 million pixels and what libraries keep


@pytest.mark.usefixtures("in_c")
def test_a_progressive_jpeg_of_a_thousand_scans_is_refused() -> None:
    data = encoded(photograph(64, 64), progressive=True)
    last = data.rindex(b"\xff\xda")
    scan = data[last:-2]
    with pytest.raises(Undecodable, match=r"scans|progression"):
        Decoder(choose_engine("libjpeg"), max_pixels=10**6).crops(
            data[:-2] + scan * 1000 + b"\xff\xd9",
            [lambda w, h, t: crop_of(Image(size=8), w, h, [0.5] * 41, turn=t)],
            [np.empty((8, 8, 3), np.uint8)],
        )


def test_the_library_reads_no_format_that_starts_programs() -> None:
    assert not {"EPS", "PDF", "WMF"} & set(library.FORMATS)


def test_a_sample_without_an_image_is_replaced_with_its_other_members_as_they_are(tmp_path: Path) -> None:
    jpeg, png = encoded(photograph(20, 20)), encoded(photograph(20, 20), "PNG")
    samples = [
        [("jpg", jpeg), ("txt", b"whole"), ("cls", b"0")],
        [("txt", b"none"), ("cls", b"1")],
        [("jpg", jpeg), ("png", png), ("txt", b"two"), ("cls", b"2")],
        [("jpg", jpeg[:200]), ("txt", b"cut"), ("cls", b"3")],
    ]
    folder = make_pictures(tmp_path, samples)
    with loader(folder, image=Image(size=16, on_corrupt="replace"), shuffle="off") as one:
        (batch,) = one
    assert batch["txt"] == [b"whole", b"none", b"two", b"cut"]
    assert batch["cls"].tolist() == [0, 1, 2, 3]
    assert batch["image_ok"].tolist() == [True, False, False, False]
    assert set(batch) == {"__key__", "txt", "cls", "image", "image_ok"}


@pytest.mark.usefixtures("in_c")
def test_a_baseline_jpeg_whose_scan_names_odd_coefficients_is_whole(tmp_path: Path) -> None:
    data = bytearray(encoded(photograph(40, 40)))
    scan = bytes(data).index(b"\xff\xda")
    data[scan + 11 : scan + 14] = b"\0\0\0"  # as some cameras have it, instead of 0, 63, 0
    decoder = Decoder(choose_engine("libjpeg"), max_pixels=10**6)
    crops = [lambda w, h, t: crop_of(Image(crop="whole"), w, h, [], turn=t)]
    (found,), by_library = decoder.crops(bytes(data), crops, [None])
    assert not by_library
    assert (found == np.asarray(Pictures.open(io.BytesIO(data)))).all()
