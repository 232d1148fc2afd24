"""Folders of sound and video, prepared and loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from clips import TO_MP4, as_wav, grey_frames, ramp, raw

import stoker
from stoker.cli import run
from stoker.manifest import read_manifest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KINDS = ("wav", "flac", "mp3", "ogg", "m4a")

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("codec")]


def prepared(folder: Path, out: Path) -> Path:
    assert run(["prepare", str(folder), "--out", str(out), "--workers", "1"]) == 0
    return out


def test_sounds_in_folders_of_their_classes(tmp_path: Path, encode: Callable[..., bytes]) -> None:
    wav = as_wav(ramp(1))
    for number, label in enumerate(("bark", "meow")):
        folder = tmp_path / "sounds" / label
        folder.mkdir(parents=True)
        for kind in KINDS:
            data = wav if kind == "wav" else encode(kind, given=as_wav(ramp(1, first=999 * number)))
            (folder / f"a.{kind}").write_bytes(data)
    out = prepared(tmp_path / "sounds", tmp_path / "out")
    assert json.loads((out / "classes.json").read_text()) == ["bark", "meow"]
    counted = json.loads((out / "statistics.json").read_text())["media"]["formats"]
    assert counted == dict.fromkeys(KINDS, 2)
    # of many kinds in one batch, each is found and none is left as bytes
    audio = stoker.Audio(seconds=0.5)
    with stoker.Loader(
        out, batch_size=5, audio=audio, output="numpy", world=stoker.World(), memory=64 << 20
    ) as one:
        batches = list(one)
    assert sorted(int(label) for batch in batches for label in batch["cls"]) == [0] * 5 + [1] * 5
    assert all((batch["audio_length"] == 8_000).all() for batch in batches)
    assert all(not batch.keys() & set(KINDS) for batch in batches)


def test_videos_with_captions_beside(tmp_path: Path, encode: Callable[..., bytes]) -> None:
    folder = tmp_path / "films"
    folder.mkdir()
    for number, kind in enumerate(("mp4", "webm", "mkv", "mov")):
        codec = ("-c:v", "libvpx", "-b:v", "1M") if kind == "webm" else TO_MP4
        data = encode(kind, *codec, given=grey_frames(12), before=raw())
        (folder / f"{number}.{kind}").write_bytes(data)
        (folder / f"{number}.txt").write_text(f"film {number}")
    out = prepared(folder, tmp_path / "out")
    assert read_manifest(out).samples == 4
    video = stoker.Video(frames=4, size=16)
    with stoker.Loader(out, batch_size=2, video=video, output="numpy", world=stoker.World()) as one:
        batches = list(one)
    assert sorted(bytes(text) for batch in batches for text in batch["txt"]) == [
        b"film %d" % number for number in range(4)
    ]
    assert all(np.ptp(batch["video"].astype(int)) > 0 for batch in batches)
