"""Small sounds and videos, made by ffmpeg when they are first asked for."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from clips import TO_MP4, TONE, grey_frames, raw

Encode = Callable[..., bytes]


@pytest.fixture(scope="session")
def codec(skip_or_fail: Callable[[str], None], require_binary: Callable[[str], str]) -> str:
    """ffmpeg, where torchcodec is there too."""
    if not find_spec("torchcodec"):
        skip_or_fail("torchcodec is not installed: `make venv` brings it")
    return require_binary("ffmpeg")


@pytest.fixture(scope="session")
def encode(codec: str, tmp_path_factory: pytest.TempPathFactory) -> Encode:
    """A file of ffmpeg's, from what goes in by its standard input and these arguments."""
    folder = tmp_path_factory.mktemp("encoded")

    def run(kind: str, *arguments: str, given: bytes = b"", before: tuple[str, ...] = ()) -> bytes:
        out = Path(folder) / f"out.{kind}"
        command = [codec, "-v", "error", "-y", "-threads", "1", *before, *(("-i", "-") if given else ())]
        subprocess.run([*command, *arguments, str(out)], input=given, check=True, timeout=60)
        return out.read_bytes()

    return run


@pytest.fixture(scope="session")
def video(encode: Encode) -> bytes:
    """An MP4 of grey frames with a tone beside them."""
    return encode("mp4", *TONE, *TO_MP4, given=grey_frames(), before=raw())


@pytest.fixture(scope="session")
def silent_video(encode: Encode) -> bytes:
    """The same without a sound track, its header in front."""
    return encode("mp4", *TO_MP4, "-movflags", "+faststart", given=grey_frames(), before=raw())
