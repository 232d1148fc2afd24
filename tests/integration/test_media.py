"""Media shards: the same bytes from one and two workers, after kill -9, out of a store and into it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

import stoker
from stoker.prepare.check import verify_dataset

if TYPE_CHECKING:
    from collections.abc import Callable

    from s3_server import S3Server

pytestmark = pytest.mark.integration

MOMENTS = 3
OPTIONS = ["--shard-size", "1MiB", "--near-dedup", "0.9", "--longest-side", "400", "--workers", "2"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 8 MB in two classes: several map and several write tasks."""
    root = tmp_path_factory.mktemp("media") / "photos"
    for number in range(120):
        folder = root / ("cat" if number % 3 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 255, (160, 160, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((300 + number, 280)).save(folder / f"{number}.jpg", quality=92)
    return root


@pytest.fixture(scope="module")
def start(photos: Path, stoker_environ: Any) -> Callable[[Path], Any]:
    def run(out: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "stoker.cli", "prepare", str(photos), "--out", str(out), *OPTIONS],
            env=stoker_environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return run


@pytest.fixture(scope="module")
def undisturbed(start: Any, snapshot: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, float]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    began = time.monotonic()
    with start(out) as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert verify_dataset(str(out)) == []
    return snapshot(out), time.monotonic() - began


def test_one_worker_makes_the_bytes_of_two(
    photos: Path, undisturbed: Any, run_stoker: Any, snapshot: Any, tmp_path: Path
) -> None:
    ran = run_stoker("prepare", photos, "--out", tmp_path / "out", *OPTIONS[:-1], 1)
    assert ran.rc == 0, ran.stderr
    assert "2 tasks" in ran.stderr or "3 tasks" in ran.stderr
    assert snapshot(tmp_path / "out") == undisturbed[0]
    assert len([name for name in undisturbed[0] if name.endswith(".tar")]) > 2


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_run_that_was_killed_goes_on_to_the_same_bytes(
    moment: int, start: Any, undisturbed: Any, snapshot: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = start(out)
    try:
        process.wait(undisturbed[1] * (moment + 0.7) / MOMENTS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    with start(out) as again:
        _, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    assert snapshot(out) == undisturbed[0]


def test_a_bucket_gives_and_takes_the_same_samples(
    s3: S3Server, bucket: Path, photos: Path, run_stoker: Any, snapshot: Any, undisturbed: Any, tmp_path: Path
) -> None:
    (bucket / "photos").mkdir()
    for path in photos.rglob("*.jpg"):
        (bucket / "photos" / path.parent.name).mkdir(exist_ok=True)
        (bucket / "photos" / path.parent.name / path.name).write_bytes(path.read_bytes())
    ran = run_stoker(
        *("prepare", "s3://bucket/photos", "--out", "s3://bucket/set", "--work", tmp_path / "work"),
        *OPTIONS,
        env=s3.environ(),
    )
    assert ran.rc == 0, ran.stderr
    assert "120 image files in 2 class folders" in ran.stderr
    tars = {name: data for name, data in undisturbed[0].items() if name.endswith((".tar", ".npz"))}
    assert {path.name: path.read_bytes() for path in (bucket / "set").iterdir() if path.name in tars} == tars


@pytest.mark.usefixtures("credentials")
def test_images_and_tokens_of_captions_come_out_of_a_bucket_as_from_here(
    bucket: Path, tmp_path: Path, run_stoker: Any, tokenizer_path: Path
) -> None:
    folder = tmp_path / "captioned"
    folder.mkdir()
    for number in range(24):
        noise = np.random.default_rng(number).integers(0, 255, (40, 48, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.jpg")
        (folder / f"{number}.txt").write_text(f"picture number {number}")
    out = tmp_path / "out"
    ran = run_stoker("prepare", folder, "--tokenizer", tokenizer_path, "--workers", 1, "--zstd", "--out", out)
    assert ran.rc == 0, ran.stderr
    assert list(out.glob("*.tar.zst"))
    shutil.copytree(out, bucket / "set")

    def fed(where: object, *, rank: int = 0, size: int = 1) -> Any:
        world = stoker.World(rank=rank, size=size)
        image = stoker.Image(size=16)
        return stoker.feed(
            where, batch_size=2, image=image, lanes=6, device="cpu", world=world, cache=tmp_path / "near"
        )

    near = _seen(fed(out))
    assert len(near) == 24
    assert all(json.loads(ids) for _, ids in near.values())
    with fed("s3://bucket/set") as first:
        batches = iter(first)
        begun = {text for _ in range(3) for text in next(batches)["txt"]}
        state = first.state_dict()
    rest = [fed("s3://bucket/set", rank=rank, size=3) for rank in range(3)]
    for one in rest:
        one.load_state_dict(state)
    found = _seen(*rest)
    assert found == {text: one for text, one in near.items() if text not in begun}


def _seen(*feeds: Any) -> dict[bytes, tuple[bytes, bytes]]:
    """The pixels and the tokens of each caption."""
    found = {}
    for feed in feeds:
        with feed:
            for batch in feed:
                rows = zip(batch["txt"], batch["image"], batch["token_ids.json"], strict=True)
                found.update({text: (image.numpy().tobytes(), ids) for text, image, ids in rows})
    return found
