"""Without torchcodec, or what it stands on, an error says what to install."""

from __future__ import annotations

import sys

import pytest

from stoker.errors import MissingPackageError
from stoker.load.media.av import codec

FFMPEG = RuntimeError("Could not load libtorchcodec. Likely causes: FFmpeg is not properly installed")
CUDA = OSError("Could not load this library: libtorchcodec_image.so")
CUDA.__cause__ = OSError("libnvrtc.so.13: cannot open shared object file")


def test_without_torchcodec_it_says_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchcodec", None)
    with pytest.raises(MissingPackageError, match="torchcodec is not installed") as raised:
        codec.codec.__wrapped__()
    assert "pip install" in raised.value.hint
    assert "torchcodec" in raised.value.hint


@pytest.mark.parametrize(("error", "hint"), [(FFMPEG, "apt install ffmpeg"), (CUDA, "'torchcodec<0.14'")])
def test_a_torchcodec_that_cannot_load_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, error: Exception, hint: str
) -> None:
    def fails(package: str, **_: str) -> None:
        if package == "torchcodec":
            raise error

    monkeypatch.setattr(codec, "require", fails)
    with pytest.raises(MissingPackageError) as raised:
        codec.codec.__wrapped__()
    assert hint in raised.value.hint
