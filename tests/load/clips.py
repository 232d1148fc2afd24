"""Small sounds and videos whose samples and frames say where they are."""

from __future__ import annotations

import io
import wave

import numpy as np

FRAMES, SIDE = 40, 48
_STEP = 6  # of grey, from a frame to the next: what a codec loses is less

TONE = ("-f", "lavfi", "-i", "sine=440:duration=4", "-c:a", "aac", "-shortest")
TO_MP4 = ("-c:v", "libx264", "-preset", "ultrafast", "-crf", "1", "-g", "8", "-pix_fmt", "yuv420p")


def raw(*, width: int = SIDE, height: int = SIDE) -> tuple[str, ...]:
    return ("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", "10")


def as_wav(samples: np.ndarray, *, rate: int = 16_000) -> bytes:
    """16-bit samples, of one channel or [samples, channels], as a file."""
    sink = io.BytesIO()
    with wave.open(sink, "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return sink.getvalue()


def ramp(seconds: float, *, rate: int = 16_000, first: int = 0) -> np.ndarray:
    """Samples that say where they are."""
    return (np.arange(round(seconds * rate)) + first) % 30_000


def grey_frames(count: int = FRAMES, *, width: int = SIDE, height: int = SIDE) -> bytes:
    """Raw frames, each of one grey that says which it is."""
    greys = np.arange(count, dtype=np.uint8) * _STEP
    return np.repeat(greys, width * height * 3).tobytes()


def number_of(frame: np.ndarray) -> int:
    """Which of the grey frames it is."""
    return round(float(np.asarray(frame, np.float64).mean()) / _STEP)
