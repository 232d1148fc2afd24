"""The training job of `gpu_bench.py`: a residual network on JPEGs, fed by a DataLoader as people leave it.

A plain program of PyTorch that knows nothing of stoker: 1,000 by 752 pixels are decoded, cropped, resized,
flipped and normalised for every sample, by two workers that are started anew each epoch, without pinned
memory. JPEGs are decoded by torchvision, or by Pillow; where neither is, blocks of 8 by 8 coefficients are
transformed back by NumPy, which takes longer.

    python benchmarks/gpu_imagenet.py [--device cpu] [--batch 32] [--side 224] [--width 64] [--epoch 200]
"""

from __future__ import annotations

import argparse
import io
import zlib

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

HIGH, WIDE, DRAWN = 752, 1000, 8
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


# --- samples ------------------------------------------------------------------------------------------


def picture(number: int) -> np.ndarray:
    """Smooth colours with some grain: about as large as a photograph is."""
    rng = np.random.default_rng(number)
    small = torch.from_numpy(rng.random((1, 3, 24, 32), np.float32))
    large = functional.interpolate(small, (HIGH, WIDE), mode="bicubic")[0].permute(1, 2, 0).numpy()
    grain = 8 * rng.standard_normal((HIGH, WIDE, 3), np.float32)
    return np.clip(large * 255 + grain, 0, 255).astype(np.uint8)


class Torchvision:
    name = "torchvision"

    def __init__(self) -> None:
        from torchvision import io as images

        self._images = images

    def encode(self, pixels: np.ndarray) -> bytes:
        tensor = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
        return self._images.encode_jpeg(tensor, quality=90).numpy().tobytes()

    def decode(self, data: bytes) -> torch.Tensor:
        return self._images.decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8))


class Pillow:
    name = "pillow"

    def __init__(self) -> None:
        from PIL import Image

        self._image = Image

    def encode(self, pixels: np.ndarray) -> bytes:
        held = io.BytesIO()
        self._image.fromarray(pixels).save(held, "JPEG", quality=90)
        return held.getvalue()

    def decode(self, data: bytes) -> torch.Tensor:
        with self._image.open(io.BytesIO(data)) as image:
            return torch.from_numpy(np.array(image)).permute(2, 0, 1)


class Blocks:
    """What a JPEG's decoder does, without its code: unpack, and transform blocks of 8 by 8 back."""

    name = "numpy"

    def __init__(self) -> None:
        at = np.arange(8)
        self._cosines = (np.cos((2 * at[None] + 1) * at[:, None] * np.pi / 16) / 2).astype(np.float32)
        self._cosines[0] /= np.sqrt(2)

    def encode(self, pixels: np.ndarray) -> bytes:
        blocks = pixels.reshape(HIGH // 8, 8, WIDE // 8, 8, 3).transpose(0, 2, 4, 1, 3).astype(np.float32)
        found = self._cosines @ blocks @ self._cosines.T
        return zlib.compress((found / 16).round().astype(np.int16).tobytes(), 1)

    def decode(self, data: bytes) -> torch.Tensor:
        found = np.frombuffer(zlib.decompress(data), np.int16).astype(np.float32) * 16
        blocks = self._cosines.T @ found.reshape(HIGH // 8, WIDE // 8, 3, 8, 8) @ self._cosines
        pixels = blocks.transpose(2, 0, 3, 1, 4).reshape(3, HIGH, WIDE)
        return torch.from_numpy(np.clip(pixels, 0, 255).astype(np.uint8))


def codec():
    for kind in (Torchvision, Pillow):
        try:
            return kind()
        except (ImportError, RuntimeError, OSError):
            continue
    return Blocks()


class Images(Dataset):
    """So many samples of the drawn pictures, each cropped in its own way."""

    def __init__(self, count: int, side: int) -> None:
        self.count, self.side, self.codec = count, side, codec()
        self.files = [self.codec.encode(picture(number)) for number in range(DRAWN)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int):
        pixels = self.codec.decode(self.files[number % DRAWN])
        drawn = np.random.default_rng(number)
        high, wide = drawn.integers(HIGH // 2, HIGH), drawn.integers(WIDE // 2, WIDE)
        top, left = drawn.integers(0, HIGH - high), drawn.integers(0, WIDE - wide)
        crop = pixels[None, :, top : top + high, left : left + wide].float()
        image = functional.interpolate(crop, (self.side, self.side), mode="bilinear", antialias=True)[0]
        image = image.flip(2) if drawn.random() < 0.5 else image
        return (image / 255 - MEAN) / DEVIATION, number % 100


# --- the network --------------------------------------------------------------------------------------


class Residual(torch.nn.Module):
    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        self.one = torch.nn.Conv2d(given, made, 3, stride, 1, bias=False)
        self.two = torch.nn.Conv2d(made, made, 3, 1, 1, bias=False)
        self.norms = torch.nn.ModuleList([torch.nn.BatchNorm2d(made) for _ in range(2)])
        self.past = torch.nn.Identity() if given == made else torch.nn.Conv2d(given, made, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norms[0](self.one(x)))
        return functional.relu(self.norms[1](self.two(y)) + self.past(x))


def network(width: int) -> torch.nn.Module:
    """ResNet-18 at a width of 64."""
    widths = [width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
    blocks, given = [], width
    for number, made in enumerate(widths):
        blocks.append(Residual(given, made, 2 if made != given and number else 1))
        given = made
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, width, 7, 2, 3, bias=False),
        torch.nn.BatchNorm2d(width),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(3, 2, 1),
        *blocks,
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * width, 100),
    )


def step(model, optimizer, images, labels) -> torch.Tensor:
    loss = functional.cross_entropy(model(images), labels)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--epoch", type=int, default=200, help="steps of an epoch")
    return parser.parse_args(given)


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    model = network(args.width).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    train_set = Images(args.epoch * args.batch, args.side)
    train_loader = DataLoader(
        train_set,
        batch_size=args.batch,
        shuffle=True,
        num_workers=2,
        drop_last=True,
    )
    while True:
        for number, (images, labels) in enumerate(train_loader):
            loss = step(model, optimizer, images.to(args.device), labels.to(args.device))
            if number % 20 == 0:
                print(f"step {number}: {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
