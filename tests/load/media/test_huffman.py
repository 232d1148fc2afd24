"""Huffman decoding of JPEGs in C: what libjpeg-turbo makes of a scan, and its words for a broken one."""

from __future__ import annotations

import io
import subprocess
import sysconfig
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import encoded, photograph
from PIL import Image as Pictures

from stoker.load.media import decode
from stoker.load.media.boxes import Crop
from stoker.load.media.decode import Decoder, Undecodable, choose_engine

pytestmark = pytest.mark.usefixtures("in_c")

SHAPES = [(1, 1), (1, 33), (33, 1), (16, 16), (17, 31), (65, 129), (3, 700)]
CODED: list[dict[str, Any]] = [
    {},
    {"optimize": True},
    {"restart_marker_blocks": 1},
    {"restart_marker_rows": 1, "optimize": True},
    {"progressive": True},
]
SCAN = b"\xff\xda"
FIELDS = (
    "    void (*start_pass)(j_decompress_ptr);\n",
    "    boolean (*decode_mcu)(j_decompress_ptr, JBLOCKROW *);\n",
)
ELSEWHERE = {
    "further behind": (FIELDS[0], f"    void *other;\n{FIELDS[0]}"),
    "before the other": ("".join(FIELDS), "".join(FIELDS[::-1])),
    "as here, for another picture": ("struct bits bits = {scan", "scan->dc[0]++; struct bits bits = {scan"),
    "as here": ("", ""),
}


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)


def boxed(data: bytes, box: tuple[int, int, int, int]) -> np.ndarray:
    """A box in its own size."""
    width, height = box[2] - box[0], box[3] - box[1]
    crop = Crop(box=box, clip=box, width=width, height=height, mirrored=False)
    decoder = Decoder(choose_engine("libjpeg"), max_pixels=10**6)
    (found,), by_library = decoder.crops(data, [lambda *_: crop], [np.empty((height, width, 3), np.uint8)])
    assert not by_library
    return found


def boxes(width: int, height: int) -> list[tuple[int, int, int, int]]:
    """All of it, and boxes at its edges and corners."""
    return [
        (0, 0, width, height),
        (0, 0, max(1, width // 2), max(1, height // 2)),
        (width // 2, height // 2, width, height),
        (width - 1, 0, width, height),
        (0, height - 1, width, height),
        (width // 3, height // 3, width // 3 + 1, height // 3 + 1),
    ]


@pytest.mark.parametrize("coded", CODED, ids=str)
@pytest.mark.parametrize("subsampling", [0, 1, 2, "4:1:1"])
@pytest.mark.parametrize("quality", [5, 90, 100])
def test_every_pixel_is_pillows(quality: int, subsampling: Any, coded: dict[str, Any]) -> None:
    for height, width in SHAPES:
        for pixels in (photograph(height, width), noise(height, width), photograph(height, width)[..., 0]):
            data = encoded(np.ascontiguousarray(pixels), quality=quality, subsampling=subsampling, **coded)
            whole = np.asarray(Pictures.open(io.BytesIO(data)).convert("RGB"))
            for left, top, right, bottom in boxes(width, height):
                found = boxed(data, (left, top, right, bottom))
                assert (found == whole[top:bottom, left:right]).all()


def test_the_report_says_whose_huffman_decoder_it_is() -> None:
    assert "with its own Huffman decoder, on" in choose_engine("libjpeg").why


def test_a_scan_that_is_cut_off_is_said_to_be_so() -> None:
    data = encoded(photograph(100, 100))
    begin = data.rindex(SCAN) + 14
    for at in range(begin, len(data) - 200, 97):
        with pytest.raises(Undecodable, match=r"[Pp]remature end"):
            boxed(data[:at], (0, 0, 100, 100))
        with pytest.raises(Undecodable, match=r"[Pp]remature end"):
            boxed(data[:at] + b"\xff\xd9", (0, 0, 100, 100))


def test_another_restart_marker_than_is_due_is_said_to_be_one() -> None:
    data = encoded(photograph(64, 64), restart_marker_rows=1)
    assert data.count(b"\xff\xd1") == 1
    with pytest.raises(Undecodable, match="found marker 0xd5 instead of RST1"):
        boxed(data.replace(b"\xff\xd1", b"\xff\xd5"), (0, 0, 64, 64))


def test_bytes_before_a_restart_marker_are_no_damage() -> None:
    data = encoded(photograph(64, 64), restart_marker_rows=1)
    longer = data.replace(b"\xff\xd1", b"\0\0\0\xff\xd1")
    assert (boxed(longer, (0, 0, 64, 64)) == boxed(data, (0, 0, 64, 64))).all()


def test_codes_that_are_none_are_said_to_be_so() -> None:
    data = bytearray(encoded(photograph(100, 100), restart_marker_rows=3))
    begin = bytes(data).rindex(SCAN) + 14
    data[begin + 100 : begin + 140] = b"\xff\0" * 20
    with pytest.raises(Undecodable, match="bad Huffman code"):
        boxed(bytes(data), (0, 0, 100, 100))


def test_damage_below_the_box_is_not_seen() -> None:
    data = encoded(photograph(300, 100))
    assert (boxed(data[: len(data) // 2], (0, 0, 100, 40)) == boxed(data, (0, 0, 100, 40))).all()


@pytest.mark.parametrize("where", ELSEWHERE)
def test_a_library_that_keeps_its_decoder_elsewhere_decodes_itself(
    where: str, tmp_path: Path, require_binary: Callable[[str], str]
) -> None:
    """What lies behind `cinfo->entropy` is no interface: other libraries may have it otherwise."""
    compiler, here = require_binary("cc"), Path(decode.__file__).parent
    for name in ("jpeg.c", "huffman.h", "resize.h", "segments.h"):
        (tmp_path / name).write_text((here / name).read_text().replace(*ELSEWHERE[where]))
    built = tmp_path / f"_jpeg{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = sysconfig.get_paths()["include"]
    call = [
        compiler,
        "-shared",
        "-fPIC",
        f"-I{include}",
        str(tmp_path / "jpeg.c"),
        "-o",
        str(built),
        "-ldl",
        "-lm",
    ]
    subprocess.run(call, check=True)
    spec = spec_from_file_location("_jpeg", built)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    opened = decode._opened()
    assert opened
    assert module.use(opened[1])
    assert module.has_own_huffman() == (where == "as here")
    data = encoded(photograph(60, 90), restart_marker_rows=1)
    crop = Crop(box=(0, 0, 90, 60), clip=(0, 0, 90, 60), width=90, height=60, mirrored=False)
    engine = decode.Engine(name="libjpeg", why="", jpeg=module)
    (found,), _ = Decoder(engine, max_pixels=10**6).crops(data, [lambda *_: crop], [None])
    assert (found == np.asarray(Pictures.open(io.BytesIO(data)))).all()
