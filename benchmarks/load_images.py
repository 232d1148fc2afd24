"""How many images a second become 224-pixel crops on the cores of this machine?

Method: JPEGs of 500 x 375 and some 101 KB (noise with the spectrum of photographs, quality chosen for the
size) in WebDataset tars out of the page cache; each becomes a random crop of 224 x 224, mirrored half of
the time, as bytes in batches of 64 with its label. stoker with its defaults and with the library in the
place of the C engine; DALI's CPU operators (image_random_crop, resize) behind its webdataset reader and
behind stoker's source; torch's DataLoader over files with Pillow and two workers; webdataset with Pillow in
two workers. They take turns, each turn in a fresh process that begins to count at its fifth batch. Medians
over the turns.

    python benchmarks/load_images.py                     # DALI: `pip install nvidia-dali-cuda130`
    python benchmarks/load_images.py --seconds 1 --turns 1 --out /tmp/images.json     # does it work?
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np

from kept_runs import keep

RESULTS = Path(__file__).parent / "results"
BATCH, SIZE, WORKERS, WARM = 64, 224, 2, 4
LOADERS = (
    "stoker",
    "stoker, Pillow",
    "DALI CPU",
    "DALI fed by stoker",
    "DataLoader + PIL",
    "webdataset + PIL",
)


def make_photographs(folder: Path, count: int, *, shards: int = 4) -> None:
    """Tars that stoker adopts, and the same JPEGs as files."""
    import tarfile

    (folder / "tars").mkdir(parents=True)
    (folder / "files").mkdir()
    for shard in range(shards):
        with tarfile.open(folder / "tars" / f"{shard:04d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(shard * count // shards, (shard + 1) * count // shards):
                jpeg = _jpeg(number)
                (folder / "files" / f"{number:05d}.jpg").write_bytes(jpeg)
                for suffix, content in (("jpg", jpeg), ("cls", str(number % 1000).encode())):
                    entry = tarfile.TarInfo(f"{number:05d}.{suffix}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
    subprocess.run(
        [Path(sys.executable).with_name("stoker"), "prepare", "index", folder / "tars"], check=True
    )


def photograph(seed: int, *, width: int = 500, height: int = 375) -> np.ndarray:
    """Noise with the spectrum of photographs."""
    rng = np.random.default_rng(seed)
    down, across = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    fall = 1 / np.maximum(np.hypot(down, across), 1 / width)
    shape = (height, width // 2 + 1)
    planes = [
        np.fft.irfft2(fall * (rng.normal(size=shape) + 1j * rng.normal(size=shape)), s=(height, width))
        for _ in range(3)
    ]
    grey, red, blue = (plane / plane.std() for plane in planes)
    pixels = np.stack([grey * 45 + red * 12, grey * 45, grey * 45 + blue * 12], -1) + 120
    return np.clip(pixels, 0, 255).astype(np.uint8)


def _jpeg(seed: int, *, size: int = 101_000) -> bytes:
    from PIL import Image

    image, best = Image.fromarray(photograph(seed)), b""
    for quality in range(84, 97, 2):
        sink = io.BytesIO()
        image.save(sink, "JPEG", quality=quality)
        if not best or abs(len(sink.getvalue()) - size) < abs(len(best) - size):
            best = sink.getvalue()
    return best


def batches(name: str, folder: Path) -> Iterator[object]:
    if name.startswith("stoker"):
        return _stoker(folder, engine="pillow" if "Pillow" in name else "auto")
    peers = {"DALI CPU": _dali, "DALI fed by stoker": _fed_dali, "DataLoader + PIL": _torch}
    return peers.get(name, _webdataset)(folder)


def _stoker(folder: Path, *, engine: str) -> Iterator[object]:
    import stoker

    image = stoker.Image(size=SIZE, crop="random", flip=True, engine=engine)
    with stoker.Loader(folder / "tars", batch_size=BATCH, image=image) as loader:
        while True:
            yield from loader


def _dali(folder: Path) -> Iterator[object]:
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(batch_size=BATCH, num_threads=WORKERS, device_id=None, prefetch_queue_depth=2)
    def crops() -> object:
        jpegs, labels = fn.readers.webdataset(
            paths=sorted(map(str, (folder / "tars").glob("*.tar"))), ext=["jpg", "cls"], random_shuffle=True
        )
        return _dali_crops(jpegs), labels

    return _runs(crops())


def _fed_dali(folder: Path) -> Iterator[object]:
    """The same pipeline, with bytes from stoker's source."""
    from nvidia.dali import fn, pipeline_def

    from stoker.integrations import dali

    source = dali.source(folder / "tars", batch_size=BATCH)

    @pipeline_def(batch_size=BATCH, num_threads=WORKERS, device_id=None, prefetch_queue_depth=2)
    def crops() -> object:
        jpegs, labels = fn.external_source(source, num_outputs=2)
        return _dali_crops(jpegs), labels

    return _runs(crops())


def _dali_crops(jpegs: object) -> object:
    from nvidia.dali import fn, types

    pixels = fn.decoders.image_random_crop(
        jpegs, device="cpu", random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3]
    )
    pixels = fn.resize(pixels, resize_x=SIZE, resize_y=SIZE, interp_type=types.INTERP_TRIANGULAR)
    return fn.flip(pixels, horizontal=fn.random.coin_flip())


def _runs(pipeline: object) -> Iterator[object]:
    pipeline.build()
    while True:
        try:
            pixels, _ = pipeline.run()
        except StopIteration:  # an epoch ended
            pipeline.reset()
            continue
        yield pixels.as_array()


def _cropped(jpeg: bytes, rng: np.random.Generator) -> object:
    from PIL import Image

    image = Image.open(io.BytesIO(jpeg)).convert("RGB")
    width, height = image.size
    area, aspect = width * height * rng.uniform(0.08, 1), np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
    wide, high = min(width, round((area * aspect) ** 0.5)), min(height, round((area / aspect) ** 0.5))
    left, top = int(rng.integers(0, width - wide + 1)), int(rng.integers(0, height - high + 1))
    image = image.crop((left, top, left + wide, top + high)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    return np.asarray(image)[:, :: -1 if rng.random() < 0.5 else 1].copy()


class _Files:
    """What torchvision's ImageFolder and RandomResizedCrop do."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted((folder / "files").iterdir())

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> object:
        return _cropped(self._paths[number].read_bytes(), np.random.default_rng()), number


def _torch(folder: Path) -> Iterator[object]:
    from torch.utils.data import DataLoader

    loader = DataLoader(_Files(folder), BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True)
    while True:
        yield from loader


def _decoded(sample: dict) -> object:
    return _cropped(sample["jpg"], np.random.default_rng()), int(sample["cls"])


def _webdataset(folder: Path) -> Iterator[object]:
    import webdataset
    from torch.utils.data import DataLoader

    urls = sorted(map(str, (folder / "tars").glob("*.tar")))
    shards = webdataset.WebDataset(urls, shardshuffle=len(urls), resampled=False).shuffle(200)
    loader = DataLoader(shards.map(_decoded), BATCH, num_workers=WORKERS, persistent_workers=True)
    while True:
        yield from loader


def one_turn(name: str, folder: Path, seconds: float) -> dict:
    made = batches(name, folder)
    for _ in range(WARM):
        next(made)
    begin, count = time.monotonic(), 0
    while time.monotonic() - begin < seconds:
        next(made)
        count += 1
    return {"images_per_s": count * BATCH / (time.monotonic() - begin)}


def measure(folder: Path, seconds: float, turns: int) -> dict:
    found: dict[str, list[float]] = {name: [] for name in LOADERS}
    failed: dict[str, str] = {}
    for _ in range(turns):
        for name in found:
            command = [sys.executable, __file__, "--turn", name, "--folder", str(folder)]
            done = subprocess.run([*command, "--seconds", str(seconds)], capture_output=True, text=True)
            if done.returncode:
                failed[name] = (done.stderr.strip().splitlines() or ["?"])[-1]
                continue
            found[name].append(json.loads(done.stdout.splitlines()[-1])["images_per_s"])
            print(f"{name:20} {found[name][-1]:8,.0f} images/s", flush=True)
    middle = {name: statistics.median(rates) for name, rates in found.items() if rates}
    return {
        "images_per_s": {name: {"median": middle[name], "all": found[name]} for name in middle},
        "stoker_over": {
            name: middle["stoker"] / rate for name, rate in middle.items() if not name.startswith("stoker")
        },
        "failed": failed,
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("numpy", "pillow", "torch", "webdataset", "nvidia-dali-cuda130"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--images", type=int, default=800)
    parser.add_argument("--out", type=Path, default=RESULTS / "load_images.json")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--turn", choices=LOADERS)
    asked = parser.parse_args()
    if asked.turn:
        print(json.dumps(one_turn(asked.turn, asked.folder, asked.seconds)), flush=True)
        os._exit(0)  # workers of an endless loader are not waited for
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.folder or Path(scratch) / "images"
        if not folder.exists():
            make_photographs(folder, asked.images)
        sizes = [path.stat().st_size for path in (folder / "files").iterdir()]
        found = measure(folder, asked.seconds, asked.turns)
    report = {
        "images": len(sizes),
        "mean_bytes": statistics.mean(sizes),
        "batch": BATCH,
        "cores": os.cpu_count(),
        "seconds": asked.seconds,
        "turns": asked.turns,
        "versions": versions(),
        **found,
    }
    keep(asked.out, report)
    print(json.dumps(found["stoker_over"]))


if __name__ == "__main__":
    main()
