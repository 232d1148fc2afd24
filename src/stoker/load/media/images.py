"""Images of samples: decoded into the arrays of a batch, by the threads that run a transform."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from stoker.errors import BadShardError, UsageError
from stoker.load.assembly.rows import Buffers
from stoker.load.media.boxes import DRAWN, crop_of, uniforms
from stoker.load.media.decode import Decoder, DrawCrop, Engine, Pixels, choose_engine
from stoker.load.media.image import Image
from stoker.load.media.kinds import Filling, Troubles, keys_of_task
from stoker.load.media.mixing import BOX, OTHER, WEIGHT, mix_columns
from stoker.load.ordering.draw import Draw
from stoker.load.ordering.plan import Task

SUFFIXES = (
    "jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "pbm", "avif",
    "jp2",
)  # fmt: skip
LABEL, IS_OK = "cls", "image_ok"
MIXED = (WEIGHT, BOX, OTHER)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageReport:
    """What became of the images of this process; of worker processes only they know."""

    engine: str
    why: str
    decoded: int
    by_card: int  # of those: the rest were decoded by the processor
    by_library: int  # PNG, WebP, and JPEGs that the C engine does not take
    corrupt: int
    named: tuple[str, ...]  # some of the corrupt ones, and what is wrong with them


class Card(Protocol):
    """Decodes what it can of a task at once; `device.pictures.Card`."""

    is_used: bool

    @property
    def why(self) -> str: ...
    def begin(
        self,
        draw: Draw,
        images: dict[str, Image],
        draws: Sequence[Callable[[int], DrawCrop]],
        mixes: dict[str, Any],
        *,
        on_host: Callable[[Any, list[DrawCrop], list[Pixels | None]], list[Pixels]],
        count: Callable[[int, int], None],
    ) -> Filling: ...


class Images:
    """Makes the image columns of a loader."""

    what, suffixes = "image", (SUFFIXES,)

    def __init__(
        self,
        columns: dict[str, Image],
        *,
        seed: int,
        on_corrupt: str,
        engine: Engine | None = None,
        card: Card | None = None,
    ) -> None:
        first = next(iter(columns.values()))
        self._columns, self._seed = columns, seed
        self.policy, self.member = first.on_corrupt or on_corrupt, first.member
        self.columns = frozenset(columns)
        self.taken = {*columns, IS_OK, *(MIXED if first.mixes else ())}
        self.is_even = all(one.crop != "whole" for one in columns.values())
        self._engine = engine or choose_engine(first.engine)
        self._decoder = Decoder(self._engine, max_pixels=first.max_pixels)
        self._buffers = {name: Buffers() for name in columns}
        self._card = card
        self._decoded = self._by_library = self._by_card = 0
        self._troubles = Troubles()
        self._counting = threading.Lock()

    def report(self) -> ImageReport:
        card = self._card
        return ImageReport(
            engine="nvjpeg" if card and card.is_used else self._engine.name,
            why=f"{card.why}; the rest {self._engine.why}" if card else self._engine.why,
            decoded=self._decoded + self._by_card,
            by_card=self._by_card,
            by_library=self._by_library,
            corrupt=self._troubles.count,
            named=self._troubles.named,
        )

    def begin(self, task: Task) -> Filling:
        draws, mixes, rows = self._draws(task), self._mixes(task), len(task.draw)
        if self._card:
            return self._card.begin(
                task.draw, self._columns, draws, mixes, on_host=self._decoded_one, count=self._count_card
            )
        return _Pictures(self._decoded_one, self._columns, self._rooms(rows), draws, mixes)

    def count(self, wrong: str) -> None:
        self._troubles.add(wrong)

    def _count_card(self, images: int, again: int) -> None:
        self._by_card += images
        with self._counting:
            self._decoded -= again
            self._by_library -= 0 if self._engine.jpeg else again

    def evened(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {}  # who asked for whole images has them in their own sizes

    def _decoded_one(self, data: Any, draws: list[DrawCrop], outs: list[Pixels | None]) -> list[Pixels]:
        """The crops of one image, in a thread of the pool."""
        found, by_library = self._decoder.crops(data, draws, outs)
        with self._counting:
            self._decoded += 1
            self._by_library += by_library
        return found

    def _rooms(self, rows: int) -> dict[str, Any]:
        """Where images go; none for those of their own sizes."""
        return {
            name: None
            if one.crop == "whole"
            else self._buffers[name].take((rows, one.size, one.size, 3), np.dtype(np.uint8))
            for name, one in self._columns.items()
        }

    def _draws(self, task: Task) -> list[Callable[[int], DrawCrop]]:
        """What a row's crop of each column is drawn from: the seed, the epoch, the sample, nothing else."""

        def of(image: Image, numbers: list[list[float]]) -> Callable[[int], DrawCrop]:
            return lambda row: (
                lambda width, height, turn: crop_of(image, width, height, numbers[row], turn=turn)
            )

        return [
            of(image, uniforms(keys_of_task(task, seed=self._seed, what=which), DRAWN).tolist())
            for which, image in enumerate(self._columns.values())
        ]

    def _mixes(self, task: Task) -> dict[str, Any]:
        return mix_columns(self._columns, keys_of_task(task, seed=self._seed, what=len(self._columns)))


class _Pictures:
    """The images of one task."""

    def __init__(
        self,
        decode: Callable[[Any, list[DrawCrop], list[Pixels | None]], list[Pixels]],
        images: dict[str, Image],
        rooms: dict[str, Any],
        draws: Sequence[Callable[[int], DrawCrop]],
        mixes: dict[str, Any],
    ) -> None:
        self._decode, self._images, self._rooms, self._draws = decode, images, rooms, draws
        self.columns = {**{name: room for name, room in rooms.items() if room is not None}, **mixes}

    def decode(self, row: int, data: Any) -> dict[str, Any]:
        found = self._decode(data, [draw(row) for draw in self._draws], self._outs(row))
        return dict(zip(self._images, found, strict=True))

    def blank(self, row: int) -> dict[str, Any]:
        found = {}
        for (name, image), out in zip(self._images.items(), self._outs(row), strict=True):
            room = np.empty((image.size, image.size, 3), np.uint8) if out is None else out
            room[:] = 0
            found[name] = room
        return found

    def finish(self) -> dict[int, str]:
        return {}

    def _outs(self, row: int) -> list[Pixels | None]:
        return [None if room is None else room[row] for room in self._rooms.values()]


def label_of(value: Any, named: str) -> int:
    """A class, as it is written in a member."""
    try:
        return int(bytes(value))
    except ValueError:
        raise BadShardError(
            f"the label of {named} is {bytes(value)[:40]!r}, no whole number",
            hint="a member `cls` holds the number of a class in ASCII; call another thing otherwise",
        ) from None


def check_left_alone(name: str, image: Image, found: Any) -> None:
    """What a transform or a collate made instead is theirs; what was asked for of pixels cannot be done."""
    if image.number == "uint8":
        return
    shape = f"{found.dtype} of {tuple(found.shape)}" if hasattr(found, "shape") else type(found).__name__
    raise UsageError(
        f"normalize=, dtype= and mixing have nothing to work on: {name!r} is {shape} after `transform` "
        "or `collate`, not bytes of [rows, height, width, 3]",
        hint="let them leave the pixels as they are, or leave those options out",
    )


def check_label(found: Any, kind: type) -> None:
    """Mixed images have two labels each."""
    if not isinstance(found, kind):
        raise UsageError(
            f"mixed images need a label each, and batches have no numbers in {LABEL!r}",
            hint="use samples with a member `cls`, or leave mixup and cutmix out",
        )
