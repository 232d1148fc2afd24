"""A small network trained on JPEGs, fed by stoker or by a DataLoader with Pillow; on a CPU, under a minute.

    python examples/train_images/train.py IMAGES --steps 60 --checkpoint run/
    stoker watch --out fed     -- python examples/train_images/train.py IMAGES
    stoker watch --out starved -- python examples/train_images/train.py IMAGES --loader pil

IMAGES is made where it is not there: WebDataset tars of ten classes of noise, each of its own hue,
adopted by `stoker prepare index`. With stoker it goes on where the newest checkpoint was, to the sample and
its crop.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import stoker

CLASSES, SIDE, BATCH = 10, 64, 32


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--loader", choices=("stoker", "pil"), default="stoker")
    parser.add_argument("--checkpoint", type=Path, help="folder of checkpoints; with the loader of stoker")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    given = parser.parse_args()
    if not given.images.exists():
        make_images(given.images)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # what is left of a small machine is for decoding
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if given.loader == "pil":
        for step, (pixels, labels) in zip(range(1, given.steps + 1), with_pillow(given.images), strict=False):
            learn(step, model, optimizer, pixels, labels)
        return
    image = stoker.Image(size=SIDE, crop="random", flip=True, normalize="imagenet")
    with stoker.feed(given.images, batch_size=BATCH, image=image, device="cpu") as feeder:
        if given.checkpoint is None:
            steps(feeder, model, optimizer, given.steps)
            return
        with stoker.Checkpointer(given.checkpoint, every=given.every, keep=2) as saver:
            state = {"model": model, "optimizer": optimizer, "loader": feeder}
            steps(feeder, model, optimizer, given.steps, saver, state)
            saver.save(given.steps, final=True, **state)


def steps(
    feeder: stoker.Feeder,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    last: int,
    saver: stoker.Checkpointer | None = None,
    state: dict[str, object] | None = None,
) -> None:
    step = saver.restore(**state).step if saver and state else 0
    while step < last:
        for batch in feeder:  # an epoch, or the rest of one
            step += 1
            learn(step, model, optimizer, batch["image"], batch["cls"])
            if saver and state:
                saver.step(step, **state)
            if step == last:
                break


def learn(
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    pixels: torch.Tensor,
    labels: torch.Tensor,
) -> None:
    loss = torch.nn.functional.cross_entropy(model(pixels), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}, loss {loss.item()!r}", flush=True)


def make_model(width: int = 48) -> torch.nn.Module:
    layers: list[torch.nn.Module] = []
    for before, after in ((3, width), (width, width), (width, width)):
        layers += [torch.nn.Conv2d(before, after, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
    pooled = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(width, CLASSES)]
    return torch.nn.Sequential(*layers, *pooled)


def with_pillow(folder: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """As most scripts begin: a dataset that decodes with Pillow, in a DataLoader as it is."""
    loader = torch.utils.data.DataLoader(Pictures(folder), BATCH, shuffle=True, drop_last=True)
    while True:
        yield from loader


class Pictures(torch.utils.data.Dataset):
    def __init__(self, folder: Path) -> None:
        self._files: list[tuple[bytes, int]] = []
        for path in sorted(folder.glob("*.tar")):
            with tarfile.open(path) as tar:
                contents = [tar.extractfile(entry).read() for entry in tar]  # type: ignore[union-attr]
            self._files += [(contents[n], int(contents[n + 1])) for n in range(0, len(contents), 2)]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        jpeg, label = self._files[number]
        image = Image.open(io.BytesIO(jpeg)).convert("RGB")
        wide, high = (int(side * (0.3 + 0.7 * float(torch.rand(())))) for side in image.size)
        left, top = (
            int((side - part) * float(torch.rand(())))
            for side, part in zip(image.size, (wide, high), strict=True)
        )
        image = image.crop((left, top, left + wide, top + high)).resize(
            (SIDE, SIDE), Image.Resampling.BILINEAR
        )
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        return (pixels - 0.45) / 0.225, label


def make_images(folder: Path, *, count: int = 320, shards: int = 4) -> None:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    hues = rng.uniform(40, 215, (CLASSES, 3))
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:04d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(shard * count // shards, (shard + 1) * count // shards):
                for suffix, content in (
                    ("jpg", make_jpeg(rng, hues[number % CLASSES])),
                    ("cls", b"%d" % (number % CLASSES)),
                ):
                    entry = tarfile.TarInfo(f"{number:05d}.{suffix}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
    stoker_command = Path(sys.executable).with_name("stoker")
    subprocess.run([stoker_command, "prepare", "index", folder], check=True, stdout=subprocess.DEVNULL)


def make_jpeg(rng: np.random.Generator, hue: np.ndarray, *, width: int = 500, height: int = 375) -> bytes:
    coarse = Image.fromarray(rng.integers(0, 255, (height // 4, width // 4), np.uint8)).resize(
        (width, height)
    )
    pixels = np.asarray(coarse)[..., None] * 0.4 + hue * 0.6 + rng.normal(0, 8, (height, width, 1))
    sink = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(sink, "JPEG", quality=92)
    return sink.getvalue()


if __name__ == "__main__":
    main()
