"""nvJPEG: batches of JPEGs to pixels in a card's memory, by the engines it has for them. The home of
libnvjpeg, which comes with CUDA, with torchvision, or with nvidia-nvjpeg.

One handle and one state: used by one thread. What is asked for is done in the order of a stream, and the
bytes must stay where they are until then.
"""

from __future__ import annotations

import ctypes
import glob
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

_HARDWARE, _DEFAULT = 3, 0  # backends: engines beside the processors of a card (A100, H100), and those
_PLANES_OF_RGB = 3
_INTERPOLATED = 32  # colours between those that were stored, as libjpeg makes them
_OLDEST = 11  # where a pitch became 64 bits wide

_PLACES = "libnvjpeg.so.{cuda}", "libnvjpeg.so"
_BESIDE = ("nvidia", "{root}/*/lib/libnvjpeg.so.*"), ("torchvision", "{root}.libs/libnvjpeg*.so*")

Integers = npt.NDArray[np.int64]


class NvJpegError(Exception):
    """There is none here, or it does not work."""


class NvJpeg:
    """A decoder on the current device. One that was closed is opened again when it is to decode."""

    def __init__(self, cuda: str) -> None:
        """`cuda`: the major version that torch was built for; a library of another may not fit the driver."""
        self._library = _opened(cuda)
        self._handle, self._state = ctypes.c_void_p(), ctypes.c_void_p()
        self._batch = 0
        self._open()

    def _open(self) -> None:
        self.is_hardware = not self._create(_HARDWARE)
        if not self.is_hardware:
            self._check("nvjpegCreateEx", self._create(_DEFAULT))
        self._check("nvjpegJpegStateCreate", self._call("JpegStateCreate", ctypes.byref(self._state)))

    def decode(
        self, addresses: Integers, sizes: Integers, planes: Integers, pitches: Integers, *, stream: int
    ) -> bool:
        """Whether all of these were taken. `planes`: where red, green and blue of each go, [images, 3]."""
        if not self._handle:
            self._open()
        count = len(addresses)
        if count != self._batch:
            self._batch = 0
            if self._call(
                "DecodeBatchedInitialize", ctypes.c_int(count), ctypes.c_int(1), _PLANES_OF_RGB, state=True
            ):
                return False
            self._batch = count
        out = np.zeros((count, 8), np.int64)  # four addresses, four pitches
        out[:, :3], out[:, 4:7] = planes, pitches[:, None]
        given = [*(np.ascontiguousarray(one, np.int64) for one in (addresses, sizes)), out]
        pointers = [ctypes.c_void_p(one.ctypes.data) for one in given]
        if self._call("DecodeBatched", *pointers, ctypes.c_void_p(stream), state=True):
            self._batch = 0  # begin anew after a failure
            return False
        return True

    def close(self) -> None:
        """Safe twice."""
        if self._state:
            self._library.nvjpegJpegStateDestroy(self._state)
        if self._handle:
            self._library.nvjpegDestroy(self._handle)
        self._handle, self._state = ctypes.c_void_p(), ctypes.c_void_p()
        self._batch = 0

    def _create(self, backend: int) -> int:
        flags = ctypes.c_uint(_INTERPOLATED)
        found: int = self._library.nvjpegCreateEx(backend, None, None, flags, ctypes.byref(self._handle))
        return found

    def _call(self, name: str, *args: Any, state: bool = False) -> int:
        some = (self._state,) if state else ()
        found: int = getattr(self._library, f"nvjpeg{name}")(self._handle, *some, *args)
        return found

    def _check(self, name: str, status: int) -> None:
        if status:
            self.close()
            raise NvJpegError(f"{name} ended with {status}")


def _opened(cuda: str) -> ctypes.CDLL:
    for path in _paths(cuda):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        major = ctypes.c_int()
        if not library.nvjpegGetProperty(0, ctypes.byref(major)) and major.value >= _OLDEST:
            return library
    raise NvJpegError("libnvjpeg was not found: it comes with CUDA's toolkit, torchvision or nvidia-nvjpeg")


def _paths(cuda: str) -> Iterator[str]:
    """Of the version that torch has first."""
    yield from (place.format(cuda=cuda) for place in _PLACES[:1])
    found: list[str] = []
    for package, pattern in _BESIDE:
        spec = find_spec(package)
        for root in (spec and spec.submodule_search_locations) or ():
            found += sorted(glob.glob(pattern.format(root=glob.escape(root))))
    yield from sorted(found, key=lambda path: f".{cuda}" not in os.path.basename(path))
    yield _PLACES[1]
