"""Pictures with the spectrum of photographs, as bytes of files and in small datasets of tars."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image as Pictures
from PIL import ImageOps
from small_datasets import _Sink, write_dataset, write_files

from stoker.formats import tar
from stoker.load.media.boxes import Crop, crop_of
from stoker.load.media.image import Image


def photograph(height: int, width: int, *, seed: int = 0) -> np.ndarray:
    """Noise whose amplitude falls with frequency, as that of photographs does; channels alike, not equal."""
    rng = np.random.default_rng(seed)
    down, across = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    amplitude = 1 / np.maximum(np.hypot(down, across), 1 / max(height, width))
    planes = []
    for _ in range(3):
        shape = (height, width // 2 + 1)
        plane = np.fft.irfft2(
            amplitude * (rng.normal(size=shape) + 1j * rng.normal(size=shape)), s=(height, width)
        )
        planes.append(plane / max(float(plane.std()), 1e-9))
    grey = planes[0] * 45 + 120
    rgb = np.stack([grey + planes[1] * 12, grey, grey + planes[2] * 12], -1)
    return np.clip(rgb, 0, 255).astype(np.uint8)


def encoded(pixels: np.ndarray, kind: str = "JPEG", **options) -> bytes:
    options.setdefault("quality", 90) if kind == "JPEG" else None
    sink = io.BytesIO()
    Pictures.fromarray(pixels).save(sink, kind, **options)
    return sink.getvalue()


def make_pictures(folder: Path, samples: list[list[tuple[str, bytes]]], *, shards: int = 2) -> Path:
    """Tars of samples with these members each."""
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for number in range(shards):
        sink = _Sink()
        writer = tar.TarWriter(sink)
        mine = range(number * len(samples) // shards, (number + 1) * len(samples) // shards)
        for n in mine:
            writer.add(f"s{n:06d}", samples[n])
        index = tar.index_bytes(writer.close())
        files = {".tar": bytes(sink), ".index.npz": index}
        records.append(write_files(folder, f"t{number:04d}", files, len(mine), 0))
    return write_dataset(folder, records, format="webdataset")


def small_pictures(folder: Path, count: int = 24, *, side: int = 48, **options) -> Path:
    """JPEGs of a class each: sample n is of class n."""
    return make_pictures(
        folder,
        [
            [("jpg", encoded(photograph(side, side + n % 5, seed=n))), ("cls", str(n).encode())]
            for n in range(count)
        ],
        **options,
    )


def _exif(turn: int) -> Pictures.Exif:
    found = Pictures.Exif()
    found[0x0112] = turn
    return found


def _sixteen_bits() -> bytes:
    sink = io.BytesIO()
    Pictures.fromarray(photograph(40, 50)[..., 0].astype(np.uint16) << 8).save(sink, "PNG")
    return sink.getvalue()


def _cmyk() -> bytes:
    sink = io.BytesIO()
    Pictures.fromarray(photograph(61, 77)).convert("CMYK").save(sink, "JPEG", quality=95)
    return sink.getvalue()


SHAPES = {
    "usual": lambda: encoded(photograph(375, 500)),
    "odd sides": lambda: encoded(photograph(301, 333), subsampling=2),
    "no subsampling": lambda: encoded(photograph(97, 131), subsampling=0),
    "half subsampling": lambda: encoded(photograph(97, 131), subsampling=1),
    "large": lambda: encoded(photograph(1500, 2001)),
    "progressive": lambda: encoded(photograph(203, 305), progressive=True),
    "restarts": lambda: encoded(photograph(203, 305), restart_marker_rows=1),
    "grey": lambda: encoded(photograph(133, 77)[..., 0]),
    "one pixel": lambda: encoded(photograph(1, 1)),
    "a line": lambda: encoded(photograph(10, 3000)),
    "a column": lambda: encoded(photograph(3000, 7)),
    "cmyk": _cmyk,
    "png": lambda: encoded(photograph(60, 90), "PNG"),
    "palette": lambda: encoded(np.asarray(Pictures.fromarray(photograph(60, 90)).quantize()), "PNG"),
    "webp": lambda: encoded(photograph(60, 90), "WEBP", quality=90),
    "16 bits": _sixteen_bits,
    **{f"turned {n}": lambda n=n: encoded(photograph(64, 90), exif=_exif(n)) for n in range(2, 9)},
}


def whole(data: bytes) -> np.ndarray:
    picture = Pictures.open(io.BytesIO(data))
    if picture.mode.startswith("I"):
        return np.repeat((np.asarray(picture) >> 8).astype(np.uint8)[..., None], 3, 2)
    return np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))


def reference(data: bytes, image: Image, numbers: list[float]) -> np.ndarray:
    pixels = whole(data)
    height, width = pixels.shape[:2]
    crop: Crop = crop_of(image, width, height, numbers)
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None]
    if image.crop == "center":  # Resize, then CenterCrop
        short = min(width, height)
        size = int(image.shorter * height / short), int(image.shorter * width / short)
        tensor = resized(tensor, size)
        top, left = round((size[0] - image.size) / 2), round((size[1] - image.size) / 2)
        tensor = tensor[..., top : top + image.size, left : left + image.size]
    else:
        left, top, right, bottom = crop.clip
        tensor = resized(tensor[..., top:bottom, left:right], (crop.height, crop.width))
    found = tensor[0].permute(1, 2, 0).numpy()
    return found[:, ::-1] if crop.mirrored else found


def resized(pixels: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    return torch.nn.functional.interpolate(pixels, size=size, mode="bilinear", antialias=True)
