"""Container headers: how large the frames of a video are, before a decoder sees it.

A decoder that is opened may take memory for a frame only to see what is in a stream. Of MP4 and Matroska,
what most videos are, the header says how large one is; of others the decoder does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_MP4_BOXES = (b"moov", b"trak", b"mdia", b"minf", b"stbl")  # one in the other
_SAMPLES, _OF_VIDEO = b"stsd", b"vmhd"
_SEGMENT, _TRACKS, _ENTRY, _VIDEO, _WIDTH, _HEIGHT = 0x18538067, 0x1654AE6B, 0xAE, 0xE0, 0xB0, 0xBA
_CLUSTER = 0x1F43B675  # frames begin: tracks come before
_MOST_PARTS = 10_000  # of a file's outline: one of more is looked at by the decoder alone


def frame_sizes(data: Any) -> list[tuple[int, int]]:
    """Widths and heights that the header says; none where it is of another kind, or damaged."""
    view = memoryview(data).cast("B")
    if _is_matroska(view):
        return list(_of_matroska(view))
    return list(_of_mp4(view, 0, len(view), 0)) if _is_mp4(view) else []


def says_when(data: Any) -> bool:
    """Whether its header or packets say when each frame is shown, so that one can be sought by its number.
    Those of AVI and MPEG do not where frames stand in another order than they are shown in."""
    view = memoryview(data).cast("B")
    return _is_matroska(view) or _is_mp4(view)


def may_leave_out(data: Any) -> bool:
    """Whether it is an MP4 with all of its bytes and an edit list: `ffmpeg -ss 5 -c copy` writes one that
    leaves frames out, which the header counts all the same."""
    view = memoryview(data).cast("B")
    if not _is_mp4(view) or not _has_all(view):
        return False
    movies = [at for kind, *at in _boxes(view, 0, len(view)) if kind == b"moov"]
    tracks = [at for movie in movies for kind, *at in _boxes(view, *movie) if kind == b"trak"]
    return any(kind == b"edts" for track in tracks for kind, *_ in _boxes(view, *track))


def _is_matroska(view: memoryview) -> bool:
    return bytes(view[:4]) == b"\x1aE\xdf\xa3"


def _is_mp4(view: memoryview) -> bool:
    return bytes(view[4:8]) in (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip")


def _of_mp4(view: memoryview, start: int, stop: int, depth: int) -> Iterator[tuple[int, int]]:
    boxes = list(_boxes(view, start, stop))
    is_video = any(kind == _OF_VIDEO for kind, _, _ in boxes)
    for kind, begin, end in boxes:
        if kind in _MP4_BOXES[depth : depth + 1] and (kind != b"stbl" or is_video):
            yield from _of_mp4(view, begin, end, depth + 1)
        elif kind == _SAMPLES:
            for _, at, until in _boxes(view, begin + 8, end):
                if until - at >= 28:
                    yield _number(view[at + 24 : at + 26]), _number(view[at + 26 : at + 28])


def _boxes(view: memoryview, start: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
    for _ in range(_MOST_PARTS):
        if start + 8 > stop:
            return
        size, head = _size(view, start)
        end = stop if size == 0 else min(stop, start + size)
        if end < start + head:
            return
        yield bytes(view[start + 4 : start + 8]), start + head, end
        start = end


def _size(view: memoryview, start: int) -> tuple[int, int]:
    """Of a box as it says itself, or 0: all the rest; and of what stands before its content."""
    size = _number(view[start : start + 4])
    return (_number(view[start + 8 : start + 16]), 16) if size == 1 else (size, 8)


def _has_all(view: memoryview) -> bool:
    """Whether the last box ends where the file does, or before."""
    start = 0
    for _, _, end in _boxes(view, 0, len(view)):
        if start + _size(view, start)[0] > len(view):
            return False
        start = end
    return start > 0


def _of_matroska(view: memoryview) -> Iterator[tuple[int, int]]:
    inside = ((name, at, end) for name, at, end in _elements(view, 0, len(view)) if name == _SEGMENT)
    for _, start, stop in inside:
        for name, at, end in _elements(view, start, stop):
            if name == _CLUSTER:
                return
            if name == _TRACKS:
                yield from _of_tracks(view, at, end)


def _of_tracks(view: memoryview, start: int, stop: int) -> Iterator[tuple[int, int]]:
    for entry, at, end in _elements(view, start, stop):
        for kind, begin, until in _elements(view, at, end) if entry == _ENTRY else ():
            if kind == _VIDEO:
                said = {name: _number(view[a:b]) for name, a, b in _elements(view, begin, until)}
                yield said.get(_WIDTH, 0), said.get(_HEIGHT, 0)


def _elements(view: memoryview, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Names, and where each begins and ends. Names and sizes are numbers that begin with their length."""
    for _ in range(_MOST_PARTS):
        if start >= stop or not view[start]:
            return
        at = start + _length(view[start])
        if at >= stop or not view[at]:
            return
        name, begin = _number(view[start:at]), at + _length(view[at])
        bits = (1 << 7 * (begin - at)) - 1
        size = _number(view[at:begin]) & bits
        end = stop if size == bits else min(stop, begin + size)  # all bits: of no known size
        yield name, begin, end
        start = end


def _length(first: int) -> int:
    return 9 - first.bit_length()


def _number(some: memoryview) -> int:
    return int.from_bytes(some, "big")
