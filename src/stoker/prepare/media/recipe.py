"""Media recipe: what is asked of samples, checked; part of the plan, so that its digest names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.errors import UsageError

# Pillow's own limit, twice its MAX_IMAGE_PIXELS: half a gigabyte of RGB.
MOST_PIXELS = 178_956_970
QUALITY = 95  # of what is resized, unless another is asked for; as img2dataset has it
HASH_BITS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaOptions:
    """What the user asks of media. 0 asks for nothing."""

    kind: str = "auto"
    labels: str = "auto"
    check: str = "decode"
    longest_side: int = 0
    shortest_side: int = 0
    jpeg_quality: int = 0
    min_side: int = 0
    max_aspect: float = 0.0
    max_pixels: int = MOST_PIXELS

    def __post_init__(self) -> None:
        if self.longest_side and self.shortest_side:
            raise UsageError(
                "--longest-side and --shortest-side were both given",
                hint="choose one: the longest side bounds the size, the shortest what a crop can be",
            )
        sides = (self.longest_side, self.shortest_side, self.min_side)
        if min(sides) < 0 or self.max_pixels < 1 or not 0 <= self.jpeg_quality <= 100:
            raise UsageError(
                f"sides of {', '.join(map(str, sides))}, {self.max_pixels} pixels and a quality of "
                f"{self.jpeg_quality} make no sense",
                hint="give sides and pixels of 1 or more, and a --jpeg-quality of 1 to 100 (85, say)",
            )
        if self.max_aspect and not self.max_aspect >= 1:
            raise UsageError(
                f"--max-aspect {self.max_aspect} would leave no image",
                hint="give the longer side over the shorter one, as 3",
            )

    @property
    def asks_for_something(self) -> bool:
        """Whether an option was given that does nothing for text."""
        return self != MediaOptions(kind=self.kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Media:
    """What tasks do to media. `engine` is what decodes and encodes: its bytes may differ by version."""

    options: MediaOptions
    engine: str
    classes: tuple[str, ...] = ()
    near_bits: int = (
        -1
    )  # images whose hashes differ in so many bits at most may be copies; -1: not looked for

    @property
    def bands(self) -> int:
        """Parts of a hash, of which two that differ in so many bits must share one."""
        return self.near_bits + 1

    @classmethod
    def from_plain(cls, raw: dict[str, Any]) -> Media:
        """The recipe of a plan's JSON."""
        options = MediaOptions(**raw["options"])
        return cls(**{**raw, "options": options, "classes": tuple(raw["classes"])})


def near_bits(similarity: float) -> int:
    """Of 64 bits, how many may differ; -1 where copies are not looked for."""
    if not similarity:
        return -1
    if not 0.8 <= similarity <= 1:
        raise UsageError(
            f"--near-dedup {similarity} is no similarity of images",
            hint="give 0.8 to 1, the share of equal bits of two hashes: with 0.9 may 6 of 64 differ",
        )
    return int((1 - similarity) * HASH_BITS + 1e-9)
