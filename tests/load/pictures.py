"""Pictures with the spectrum of photographs, as bytes of files and in small datasets of tars."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image
from small_datasets import _Sink, write_dataset, write_files

from stoker.formats import tar


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
    Image.fromarray(pixels).save(sink, kind, **options)
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
