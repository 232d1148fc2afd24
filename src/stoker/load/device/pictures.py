"""JPEGs decoded by the card: all of a task at once, their crops made by one kernel as the numbers that were
asked for.

What a card cannot do, and bytes that are not a whole JPEG, are left to the processor image by image: it is
the one that says what is wrong with an image (`media.decode`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from stoker.load.device.crops import Place, as_numbers, cropped_by, cuts_of, put_crops
from stoker.load.device.nvjpeg import NvJpeg, NvJpegError
from stoker.load.device.streams import Device
from stoker.load.media.boxes import Crop
from stoker.load.media.decode import DrawCrop, Pixels, Undecodable
from stoker.load.media.image import Image
from stoker.load.ordering.draw import Draw
from stoker.native import native

_ARENA_BYTES = 256 << 20  # of pixels that are decoded at once: 450 images of 500 x 375
_ARENAS = 2  # one is written to while the other is cut up
_EACH = 256  # planes begin at multiples of this
_MEASURED = 16  # images by which the card is compared with the processor
_REMEMBERED = 1 << 26  # samples of which it is known that they are whole: a byte each

OnHost = Callable[[Any, list[DrawCrop], list[Pixels | None]], list[Pixels]]
Draws = Sequence[Callable[[int], DrawCrop]]
Array = npt.NDArray[Any]


class Batches(Protocol):
    """Decodes batches; `nvjpeg.NvJpeg`."""

    is_hardware: bool

    def decode(self, addresses: Any, sizes: Any, planes: Any, pitches: Any, *, stream: int) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Jpeg:
    """A whole one, and what to cut out of it for each column."""

    data: npt.NDArray[np.uint8]
    width: int
    height: int
    crops: Sequence[Crop]

    @property
    def room(self) -> int:
        return -(-3 * self.width * self.height // _EACH) * _EACH


class Card:
    """Makes images on a device. Used by the thread that assembles, on the stream it gathers on."""

    def __init__(
        self, device: Device, decoder: Batches, survey: Any, *, max_pixels: int, is_chosen: bool, threads: int
    ) -> None:
        self.device, self._decoder, self._survey = device, decoder, survey
        self._max_pixels, self._threads = max_pixels, threads
        self._pool: ThreadPoolExecutor | None = None
        self._arenas: deque[tuple[torch.Tensor, Any]] = deque()
        self._known: dict[int, npt.NDArray[np.bool_]] = {}  # samples of each layout that are whole
        self.decides = not is_chosen  # whether it is still to be found out which is faster
        self.is_used = True
        self._rates = ""

    @property
    def why(self) -> str:
        engines = "engines of the card" if self._decoder.is_hardware else "processors of the card"
        return f"JPEGs by the {engines}{self._rates}; crops by {cropped_by()}"

    def begin(
        self,
        draw: Draw,
        images: dict[str, Image],
        draws: Draws,
        mixes: dict[str, Any],
        *,
        on_host: OnHost,
        count: Callable[[int, int], None],
    ) -> OnCard:
        return OnCard(self, draw, images, draws, mixes, on_host, count)

    def whole(self, members: dict[int, Array], draw: Draw) -> dict[int, tuple[int, int, int]]:
        """Of the rows whose bytes are a JPEG that a card decodes: width, height, and how it is to be turned.
        The codes of a sample are read once: its bytes are those that were verified when they were first
        read."""
        if not members:
            return {}
        rows = np.fromiter(members, np.int64, len(members))
        sizes = np.array([one.nbytes for one in members.values()], np.int64)
        addresses = np.array([one.ctypes.data for one in members.values()], np.int64)
        of, samples = draw.dataset[rows], draw.sample[rows]
        known, found = np.zeros(len(rows), np.uint8), np.zeros((len(rows), 3), np.int32)
        for layout in np.unique(of):
            mine = of == layout
            known[mine] = self._remembered(layout, samples[mine])[np.minimum(samples[mine], _REMEMBERED)]
        self.side_by_side(
            len(rows), partial(_on_stretch, self._survey.survey, addresses, sizes, known, found)
        )
        is_whole = (found[:, 0] > 0) & (found[:, 0].astype(np.int64) * found[:, 1] <= self._max_pixels)
        for layout in np.unique(of):
            mine = (of == layout) & is_whole & (samples < _REMEMBERED)
            self._known[layout][samples[mine]] = True
        return {
            row: tuple(one)
            for row, one in zip(rows[is_whole].tolist(), found[is_whole].tolist(), strict=True)
        }

    def side_by_side(self, count: int, work: Callable[[int, int], Any]) -> None:
        """Work on stretches of so many rows, in the threads there are."""
        each = -(-count // self._threads) or 1
        if each >= count:
            work(0, count)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="stoker-survey")
        for one in [self._pool.submit(work, at, min(at + each, count)) for at in range(0, count, each)]:
            one.result()

    def decode(
        self, jpegs: dict[int, Jpeg], outs: dict[str, torch.Tensor], images: dict[str, Image]
    ) -> list[int]:
        """Crops into the rows of `outs` that these have as keys; those that the card did not take."""
        refused: list[int] = []
        for rows in _shared_out(jpegs):
            some = [jpegs[row] for row in rows]
            offsets = np.concatenate([[0], np.cumsum([one.room for one in some])]).tolist()
            arena = self._arena(offsets[-1])
            taken = self._decode(some, arena, offsets)
            read = self.device.mark(awaited=True)  # their bytes
            refused += [row for row, is_so in zip(rows, taken, strict=True) if not is_so]
            good = [number for number, is_so in enumerate(taken) if is_so]
            places = [Place(at=offsets[n], width=some[n].width, height=some[n].height) for n in good]
            for column, (name, image) in enumerate(images.items()):
                crops = [some[n].crops[column] for n in good]
                if crops:
                    cuts = cuts_of(places, crops, [rows[n] for n in good])
                    put_crops(self.device, arena, cuts, outs[name], image)
            self._arenas.append((arena, self.device.mark(awaited=True)))
            if read is not None:
                read.synchronize()
        return refused

    def decide(self, jpegs: int, host_s: float, again: Callable[[], Sequence[int]]) -> None:
        """Which of both goes on: the processor took so long for these; `again` has the card do them, and says
        which ones it did not take."""
        self.decides = False
        again()  # what is only there once is not counted
        self.device.drain()
        begin = time.monotonic()
        taken = jpegs - len(again())
        self.device.drain()
        card, host = taken / (time.monotonic() - begin), jpegs / host_s
        self.is_used = card >= host
        self._rates = f", {card:,.0f} images/s at the start, the processor {host:,.0f}"

    def room(self, rows: int, side: int) -> torch.Tensor:
        """Memory for pixels that the processor makes, which the card can read."""
        return self.device.pinned(rows * side * side * 3).view(rows, side, side, 3)

    def close(self) -> None:
        """Safe twice; whoever goes on afterwards closes it again."""
        if self._pool:
            self._pool.shutdown()
            self._pool = None
        if isinstance(self._decoder, NvJpeg):
            self.device.drain()
            self._decoder.close()

    def _remembered(self, layout: int, samples: Array) -> Array:
        """Which samples of a layout are known to be whole, with room for these."""
        known = self._known.get(layout, np.zeros(0, bool))
        needed = min(int(samples.max()), _REMEMBERED) + 1  # what lies behind the last is never known
        if needed > len(known):
            known = np.concatenate([known, np.zeros(max(needed, 2 * len(known)) - len(known), bool)])
        self._known[layout] = known
        return known

    def _arena(self, size: int) -> torch.Tensor:
        """Memory for pixels that nothing uses any more: nvJPEG writes there at once, on its own streams."""
        if len(self._arenas) >= _ARENAS:
            arena, cut = self._arenas.popleft()
            if cut is not None:
                cut.synchronize()
            if arena.numel() >= size:
                return arena
        arena = torch.empty(size, dtype=torch.uint8, device=self.device.torch_device)
        self.device.drain()  # whoever had it before may still be using it
        return arena

    def _decode(self, jpegs: Sequence[Jpeg], arena: torch.Tensor, offsets: Sequence[int]) -> list[bool]:
        """Which of these were taken."""
        addresses = np.array([one.data.ctypes.data for one in jpegs], np.int64)
        sizes = np.array([one.data.nbytes for one in jpegs], np.int64)
        plane = np.array([one.width * one.height for one in jpegs], np.int64)
        planes = arena.data_ptr() + np.array(offsets[:-1])[:, None] + plane[:, None] * np.arange(3)
        pitches = np.array([one.width for one in jpegs], np.int64)
        stream = self.device.gather_stream

        def taken(some: slice) -> list[bool]:
            count = some.stop - some.start
            if self._decoder.decode(addresses[some], sizes[some], planes[some], pitches[some], stream=stream):
                return [True] * count
            if count == 1:
                return [False]
            middle = some.start + count // 2  # nobody says which one it was
            return taken(slice(some.start, middle)) + taken(slice(middle, some.stop))

        return taken(slice(0, len(jpegs)))


class OnCard:
    """The images of one task."""

    def __init__(
        self,
        card: Card,
        draw: Draw,
        images: dict[str, Image],
        draws: Draws,
        mixes: dict[str, Any],
        on_host: OnHost,
        count: Callable[[int, int], None],
    ) -> None:
        self._card, self._draw, self._images, self._draws, self._mixes = card, draw, images, draws, mixes
        self._on_host, self._count = on_host, count
        self._members: dict[int, Array] = {}
        self._host: dict[int, list[Pixels]] = {}
        self._wrong: dict[int, str] = {}
        self._rooms = [] if card.is_used else [card.room(len(draw), one.size) for one in images.values()]
        self.columns: dict[str, Any] = {}

    def decode(self, row: int, data: Any) -> dict[str, Any]:
        """Only noted: all are done at once."""
        self._members[row] = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
        return {}

    def blank(self, row: int) -> dict[str, Any]:
        sizes, outs = (one.size for one in self._images.values()), self._outs(row)
        self._host[row] = [
            np.empty((side, side, 3), np.uint8) if out is None else out
            for side, out in zip(sizes, outs, strict=True)
        ]
        for room in self._host[row]:
            room[:] = 0
        return {}

    def finish(self) -> dict[int, str]:
        """Decode what was noted. Rows that cannot be decoded, and why."""
        card, on = self._card, self._card.device.torch_device
        self.columns = {
            name: torch.empty(
                (len(self._draw), one.size, one.size, 3), dtype=getattr(torch, one.number), device=on
            )
            for name, one in self._images.items()
        }
        if card.is_used:
            self._by_card()
        else:
            self._by_processor(list(self._members))
        self._put_host()
        self._members = {}
        self.columns |= self._mixes
        return self._wrong

    def _by_card(self) -> None:
        """All of these; what it cannot do, the processor does."""
        card = self._card
        jpegs = {row: self._jpeg(row, *found) for row, found in card.whole(self._members, self._draw).items()}
        others = sorted(self._members.keys() - jpegs.keys())
        if card.decides and len(jpegs) >= _MEASURED:
            blank, begin = self._host.copy(), time.monotonic()
            self._by_processor(list(jpegs))
            host_s = time.monotonic() - begin
            card.decide(len(jpegs), host_s, lambda: card.decode(jpegs, self.columns, self._images))
            if not card.is_used:
                self._by_processor(others)
                return
            self._count(0, len(jpegs))  # measured, and made anew
            self._host, self._wrong = blank, {}
        refused = card.decode(jpegs, self.columns, self._images)
        self._count(len(jpegs) - len(refused), 0)
        self._by_processor([*refused, *others])

    def _jpeg(self, row: int, width: int, height: int, turn: int) -> Jpeg:
        crops = [draw(row)(width, height, turn) for draw in self._draws]
        return Jpeg(data=self._members[row], width=width, height=height, crops=crops)

    def _by_processor(self, rows: Sequence[int]) -> None:
        def some(at: int, stop: int) -> None:
            for row in rows[at:stop]:
                try:
                    draws = [draw(row) for draw in self._draws]
                    self._host[row] = self._on_host(self._members[row], draws, self._outs(row))
                except Undecodable as error:
                    self._wrong[row] = str(error)
                    self.blank(row)

        if rows:
            self._card.side_by_side(len(rows), some)

    def _put_host(self) -> None:
        """What was decoded on the processor goes where the rest is."""
        if not self._host:
            return
        device = self._card.device
        if self._rooms:
            for (name, image), room in zip(self._images.items(), self._rooms, strict=True):
                self.columns[name] = as_numbers(device.sent(room.numpy()), image)
            return
        at = device.sent(np.array(list(self._host), np.int64))
        for column, (name, image) in enumerate(self._images.items()):
            pixels = device.sent(np.stack([some[column] for some in self._host.values()]))
            self.columns[name][at] = as_numbers(pixels, image)

    def _outs(self, row: int) -> list[Pixels | None]:
        return [room.numpy()[row] for room in self._rooms] or [None] * len(self._images)


def open_card(device: Device, *, max_pixels: int, is_chosen: bool, threads: int) -> Card | str:
    """A card that decodes, or why there is none."""
    survey = native("load.media._survey")
    if survey is None:
        return "the C module that looks at JPEGs was not built"
    if not device.is_cuda:
        return f"{device.torch_device} is no card"
    try:
        with device.gathering():
            decoder = NvJpeg(str(torch.version.cuda).partition(".")[0])
    except NvJpegError as error:
        return str(error)
    return Card(device, decoder, survey, max_pixels=max_pixels, is_chosen=is_chosen, threads=threads)


def _on_stretch(call: Callable[..., None], *arrays_and_ends: Any) -> None:
    """A function in C, of the rows from the first of two numbers up to the second."""
    *arrays, at, stop = arrays_and_ends
    call(stop - at, *(array[at:].ctypes.data for array in arrays))


def _shared_out(jpegs: dict[int, Jpeg]) -> list[list[int]]:
    """Rows that are decoded at once, by the room they take."""
    batches: list[list[int]] = []
    left = 0
    for row, jpeg in jpegs.items():
        if jpeg.room > left:
            batches.append([])
            left = _ARENA_BYTES
        batches[-1].append(row)
        left -= jpeg.room
    return batches
