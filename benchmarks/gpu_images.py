"""Does training from JPEGs keep up with training from the card's own memory?

Method: JPEGs of some 120 KB (500 x 375, noise with the spectrum of photographs) in WebDataset tars and as
files, in the page cache. ResNet-50 and ViT-B/16, bf16 autocast, batches of 256 crops of 224 x 224, SGD; the
loop waits for the card every ten steps. Fed in turns, all in one run and each in a fresh process:
  resident          one batch that lies on the card, over and over: the ceiling
  stoker            `stoker.feed(tars, image=Image(...))`, defaults
  DataLoader + PIL  16 workers, pinned memory, bytes normalised on the card
  torchvision       reads in threads, `decode_jpeg(batch, device="cuda")`, `resized_crop` image by image, in a
                    thread with a stream of its own
Counted after a warm-up: images a second, how long the loop waited for a batch, and the cores that the whole
process tree kept busy (a training process alone keeps one busy, which waits for the card).

    python benchmarks/gpu_images.py                                     # needs a card
    python benchmarks/gpu_images.py --device cpu --model tiny --seconds 1 --images 64 --batch 8     # try it
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from kept_runs import keep
from load_images import photograph

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

RESULTS = Path(__file__).parent / "results"
SIZE, CLASSES = 224, 1000
WAYS = ("resident", "stoker", "DataLoader + PIL", "torchvision + nvJPEG")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


# --- images -------------------------------------------------------------------------------------------


def jpeg(seed: int) -> bytes:
    from PIL import Image

    sink = io.BytesIO()
    Image.fromarray(photograph(seed)).save(sink, "JPEG", quality=92)
    return sink.getvalue()


def make_images(folder: Path, count: int, *, distinct: int = 1024, shards: int = 8) -> None:
    """Tars that stoker adopts, and the same JPEGs as files; of more than `distinct` some come again."""
    import tarfile

    (folder / "tars").mkdir(parents=True)
    (folder / "files").mkdir()
    with ProcessPoolExecutor() as processes:
        made = list(processes.map(jpeg, range(min(count, distinct)), chunksize=8))
    for shard in range(shards):
        with tarfile.open(folder / "tars" / f"{shard:04d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(shard * count // shards, (shard + 1) * count // shards):
                content = made[number % len(made)]
                (folder / "files" / f"{number:06d}.jpg").write_bytes(content)
                for suffix, data in (("jpg", content), ("cls", str(number % CLASSES).encode())):
                    entry = tarfile.TarInfo(f"{number:06d}.{suffix}")
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
    command = [sys.executable, "-m", "stoker.cli", "prepare", "index", str(folder / "tars")]
    subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL)


def environment() -> dict[str, str]:
    source = str(Path(__file__).parent.parent / "src")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}


def a_box(width: int, height: int) -> tuple[int, int, int, int]:
    """As torchvision's RandomResizedCrop draws it: left, top, width, height."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        aspect = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
        wide, high = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
        if wide <= width and high <= height:
            return random.randint(0, width - wide), random.randint(0, height - high), wide, high
    return 0, 0, width, height


# --- ways to be fed -----------------------------------------------------------------------------------


def resident(folder: Path, batch: int, device: str) -> Iterator[tuple]:
    dtype = torch.bfloat16
    images = torch.randn(batch, 3, SIZE, SIZE, device=device, dtype=dtype)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, CLASSES, (batch,), device=device)
    while True:
        yield images, labels


def fed(folder: Path, batch: int, device: str) -> Iterator[tuple]:
    import stoker

    image = stoker.Image(size=SIZE, crop="random", flip=True, normalize="imagenet", dtype="bf16")
    with stoker.feed(folder / "tars", batch_size=batch, image=image, device=device) as feeder:
        said = False
        while True:
            for one in feeder:
                yield one["image"], one["cls"]
                if not said:
                    said = True
                    print(feeder.report().images.why, file=sys.stderr, flush=True)


class Files:
    def __init__(self, folder: Path) -> None:
        self._paths = sorted((folder / "files").iterdir())

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        image = Image.open(io.BytesIO(self._paths[number].read_bytes())).convert("RGB")
        left, top, wide, high = a_box(*image.size)
        box = (left, top, left + wide, top + high)
        pixels = np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box))
        pixels = pixels[:, :: -1 if random.random() < 0.5 else 1]
        return torch.from_numpy(pixels.copy()), number % CLASSES


def data_loader(folder: Path, batch: int, device: str) -> Iterator[tuple]:
    from torch.utils.data import DataLoader

    workers = min(16, os.cpu_count() or 1)
    loader = DataLoader(
        Files(folder),
        batch,
        shuffle=True,
        num_workers=workers,
        pin_memory=device != "cpu",
        persistent_workers=True,
        drop_last=True,
    )
    while True:
        for pixels, labels in loader:
            yield normalised(pixels.to(device, non_blocking=True)), labels.to(device, non_blocking=True)


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(three, device=pixels.device) for three in (MEAN, STD))
    return pixels.float().div_(255).sub_(mean).div_(std).to(torch.bfloat16).permute(0, 3, 1, 2)


def with_torchvision(folder: Path, batch: int, device: str) -> Iterator[tuple]:
    """As somebody would write it: threads that read, one that decodes and crops on a stream of its own."""
    from torchvision.io import decode_jpeg
    from torchvision.transforms.v2 import functional

    paths = sorted((folder / "files").iterdir())
    ready: queue.Queue = queue.Queue(2)
    ends = threading.Event()
    stream = torch.cuda.Stream() if device != "cpu" else None

    def work() -> None:
        mean, std = (torch.tensor(three, device=device).view(3, 1, 1) for three in (MEAN, STD))
        with (
            ThreadPoolExecutor(4) as readers,
            torch.cuda.stream(stream) if stream else contextlib.nullcontext(),
        ):
            while not ends.is_set():
                numbers = random.sample(range(len(paths)), batch)
                raw = list(
                    readers.map(
                        lambda n: torch.frombuffer(bytearray(paths[n].read_bytes()), dtype=torch.uint8),
                        numbers,
                    )
                )
                crops = []
                for picture in decode_jpeg(raw, device=device):
                    left, top, wide, high = a_box(picture.shape[2], picture.shape[1])
                    crop = functional.resized_crop(
                        picture, top, left, high, wide, [SIZE, SIZE], antialias=True
                    )
                    crops.append(crop.flip(2) if random.random() < 0.5 else crop)
                images = torch.stack(crops).float().div_(255).sub_(mean).div_(std).to(torch.bfloat16)
                images = images.contiguous(memory_format=torch.channels_last)
                labels = torch.tensor([n % CLASSES for n in numbers]).to(device)
                if stream:
                    stream.synchronize()
                ready.put((images, labels))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while True:
        yield ready.get()


SOURCES = dict(zip(WAYS, (resident, fed, data_loader, with_torchvision), strict=True))


# --- training -----------------------------------------------------------------------------------------


def model_named(name: str) -> torch.nn.Module:
    if name == "tiny":
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 7, stride=8),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(8, CLASSES),
        )
    from torchvision import models

    made: torch.nn.Module = getattr(models, name)()
    return made


def tree_cpu_seconds() -> float:
    """Of this process and those it started, ended ones too."""
    import psutil

    me = psutil.Process()
    total = sum(me.cpu_times()[:4])
    for child in me.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += sum(child.cpu_times()[:2])
    return total


def one_turn(way: str, model_name: str, folder: Path, device: str, batch: int, seconds: float) -> dict:
    torch.backends.cudnn.benchmark = True
    model = model_named(model_name).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)
    source, kind = SOURCES[way](folder, batch, device), device.partition(":")[0]
    waits: list[float] = []

    def step() -> None:
        begin = time.perf_counter()
        images, labels = next(source)
        waits.append(time.perf_counter() - begin)
        with torch.autocast(kind, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def drain() -> None:
        if kind == "cuda":
            torch.cuda.synchronize()

    warm = time.perf_counter()
    for _ in range(12):
        step()
    drain()
    warm_s = time.perf_counter() - warm
    waits.clear()
    cpu, begin, steps = tree_cpu_seconds(), time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        for _ in range(10):
            step()
        steps += 10
        drain()  # as nanoGPT does where it logs its loss
    wall = time.perf_counter() - begin
    return {
        "images_per_s": steps * batch / wall,
        "waited_share": sum(waits) / wall,
        "cores": (tree_cpu_seconds() - cpu) / wall,
        "warm_s": warm_s,
    }


def measure(asked: argparse.Namespace, folder: Path) -> dict:
    found: dict[str, dict[str, list[dict]]] = {name: {way: [] for way in asked.ways} for name in asked.model}
    failed: dict[str, str] = {}
    for _ in range(asked.turns):
        for name in asked.model:
            for way in asked.ways:
                command = [sys.executable, __file__, "--turn", way, "--model", name, "--folder", str(folder)]
                command += [
                    "--device",
                    asked.device,
                    "--batch",
                    str(asked.batch),
                    "--seconds",
                    str(asked.seconds),
                ]
                done = subprocess.run(command, capture_output=True, text=True, env=environment())
                if done.returncode:
                    failed[f"{name}: {way}"] = (done.stderr.strip().splitlines() or ["?"])[-1]
                    print(f"{name}: {way} failed: {done.stderr[-1500:]}", flush=True)
                    continue
                found[name][way].append(turn := json.loads(done.stdout.splitlines()[-1]))
                said = "".join(f" | {line}" for line in done.stderr.splitlines() if "images/s" in line)
                print(
                    f"{name:12} {way:20} {turn['images_per_s']:8,.0f} images/s, "
                    f"waited {turn['waited_share']:.2%}, "
                    f"{turn['cores']:.1f} cores, warm after {turn['warm_s']:.1f} s{said}",
                    flush=True,
                )
    return {"models": {name: summary(ways) for name, ways in found.items()}, "failed": failed}


def summary(ways: dict[str, list[dict]]) -> dict:
    rows = {}
    for way, turns in ways.items():
        if turns:
            rows[way] = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
            rows[way]["all"] = [turn["images_per_s"] for turn in turns]
    ceiling = rows.get("resident", {}).get("images_per_s")
    for way in rows.values():
        way["of_resident"] = way["images_per_s"] / ceiling if ceiling else None
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", nargs="+", default=["resnet50", "vit_b_16"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=8.0, help="a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_images.json")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--turn", choices=WAYS)
    asked = parser.parse_args()
    if asked.turn:
        found = one_turn(asked.turn, asked.model[0], asked.folder, asked.device, asked.batch, asked.seconds)
        print(json.dumps(found), flush=True)
        os._exit(0)  # workers of an endless loader are not waited for
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.folder or Path(scratch) / "images"
        if not folder.exists():
            make_images(folder, asked.images)
        sizes = [path.stat().st_size for path in (folder / "files").iterdir()]
        found = measure(asked, folder)
    is_cuda = asked.device != "cpu"
    keep(
        asked.out,
        {
            "device": torch.cuda.get_device_name() if is_cuda else "cpu",
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "images": len(sizes),
            "mean_bytes": statistics.mean(sizes),
            "batch": asked.batch,
            "seconds": asked.seconds,
            "turns": asked.turns,
            **found,
        },
    )


if __name__ == "__main__":
    main()
