"""Does a net learn the same from stoker's images as from torchvision's?

Method: JPEGs of ten classes, gratings of an angle each under noise that hides most of them, made here. A
small convolutional net is trained from the same start by both, with random crops of 64, flips left out (a
mirrored grating is another class) and the same schedule, and judged on centre crops of images it has not
seen. Several seeds each, in turns; on a card stoker decodes there, torchvision in a DataLoader's workers.

    python benchmarks/gpu_images_accuracy.py                      # on a card
    python benchmarks/gpu_images_accuracy.py --device cpu --images 256 --epochs 1 --seeds 1     # try it
"""

from __future__ import annotations

import argparse
import io
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from gpu_images import MEAN, STD, environment
from kept_runs import keep

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import stoker

RESULTS = Path(__file__).parent / "results"
CLASSES, SIDE, CROP, BATCH = 10, 96, 64, 128


def picture(seed: int) -> bytes:
    from PIL import Image

    rng = np.random.default_rng(seed)
    angle = (seed % CLASSES) * np.pi / CLASSES + rng.normal(0, 0.05)
    down, across = np.mgrid[:SIDE, :SIDE]
    wave = np.sin((across * np.cos(angle) + down * np.sin(angle)) / 3 + rng.uniform(0, 6.28))
    pixels = 128 + 22 * wave[..., None] * rng.uniform(0.3, 1, 3) + rng.normal(0, 45, (SIDE, SIDE, 3))
    sink = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(sink, "JPEG", quality=90)
    return sink.getvalue()


def make_images(folder: Path, first: int, count: int) -> list[tuple[bytes, int]]:
    """A tar that stoker adopts, and the same in memory."""
    folder.mkdir(parents=True)
    with ProcessPoolExecutor() as processes:
        made = list(processes.map(picture, range(first, first + count), chunksize=32))
    with tarfile.open(folder / "0000.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, content in enumerate(made):
            for suffix, data in (("jpg", content), ("cls", str((first + number) % CLASSES).encode())):
                entry = tarfile.TarInfo(f"{number:06d}.{suffix}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    command = [sys.executable, "-m", "stoker.cli", "prepare", "index", str(folder)]
    subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL)
    return [(content, (first + number) % CLASSES) for number, content in enumerate(made)]


class Pictures:
    def __init__(self, made: list[tuple[bytes, int]], transform) -> None:
        self._made, self._transform = made, transform

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        from torchvision.io import ImageReadMode, decode_jpeg

        content, label = self._made[number]
        pixels = decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), mode=ImageReadMode.RGB)
        return self._transform(pixels), label


def of_torchvision(made, device: str, *, is_training: bool, seed: int) -> Iterator[tuple]:
    from torch.utils.data import DataLoader
    from torchvision.transforms import v2

    crop = v2.RandomResizedCrop(CROP, scale=(0.3, 1.0), antialias=True)
    chosen = [crop] if is_training else [v2.Resize(73, antialias=True), v2.CenterCrop(CROP)]
    transform = v2.Compose([*chosen, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    torch.manual_seed(seed)
    loader = DataLoader(
        Pictures(made, transform), BATCH, shuffle=is_training, num_workers=8, drop_last=is_training,
        persistent_workers=True,
    )  # fmt: skip
    while True:
        for images, labels in loader:
            yield images.to(device), labels.to(device)
        yield None


def of_stoker(folder: Path, device: str, *, is_training: bool, seed: int) -> Iterator[tuple]:
    more = {"crop": "random", "scale": (0.3, 1.0)} if is_training else {"crop": "center", "resize": 73}
    engine = "auto" if device == "cpu" else "nvjpeg"
    image = stoker.Image(size=CROP, normalize="imagenet", engine=engine, **more)
    options = {} if is_training else {"shuffle": "off", "tail": "pad"}
    with stoker.feed(folder, batch_size=BATCH, image=image, device=device, seed=seed, **options) as feeder:
        while True:
            for batch in feeder:
                keep_rows = batch.get("real", torch.ones(len(batch["cls"]), dtype=torch.bool, device=device))
                yield batch["image"][keep_rows], batch["cls"][keep_rows]
            yield None


def net() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 5, stride=2, padding=2), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


def accuracy(train: Iterator, test: Iterator, device: str, *, seed: int, epochs: int) -> float:
    torch.manual_seed(seed)
    model = net().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        while (batch := next(train)) is not None:
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    right = seen = 0
    with torch.no_grad():
        while (batch := next(test)) is not None:
            right += int((model(batch[0]).argmax(1) == batch[1]).sum())
            seen += len(batch[1])
    return right / seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_images_accuracy.json")
    asked = parser.parse_args()
    found: dict[str, list[float]] = {"stoker": [], "torchvision": []}
    with tempfile.TemporaryDirectory() as scratch:
        train = make_images(Path(scratch) / "train", 0, asked.images)
        test = make_images(Path(scratch) / "test", 10**6, asked.images // 2)
        ways = {
            "stoker": lambda part: partial(of_stoker, Path(scratch) / part, asked.device),
            "torchvision": lambda part: partial(
                of_torchvision, {"train": train, "test": test}[part], asked.device
            ),
        }
        for seed in range(asked.seeds):
            for name, way in ways.items():
                try:
                    batches = [
                        way(part)(is_training=part == "train", seed=seed) for part in ("train", "test")
                    ]
                    found[name].append(accuracy(*batches, asked.device, seed=seed, epochs=asked.epochs))
                except ImportError as error:
                    print(f"{name}: {error}")
                    continue
                print(f"{name:12} seed {seed}: {found[name][-1]:.4f}", flush=True)
    spread = {name: statistics.stdev(some) if len(some) > 1 else 0.0 for name, some in found.items()}
    report = {
        "device": asked.device,
        "images": asked.images,
        "epochs": asked.epochs,
        "accuracy": found,
        "mean": {name: statistics.mean(some) for name, some in found.items() if some},
        "spread": spread,
    }
    keep(asked.out, report)
    print(report["mean"], spread)


if __name__ == "__main__":
    main()
