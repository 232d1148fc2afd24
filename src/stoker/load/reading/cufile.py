"""GPUDirect Storage (cuFile): reads from a file straight into device memory.

Through kvikio where it is installed, else through the driver's own libcufile. Without the nvidia-fs kernel
module both fall back to copying through the host ("compat mode"), which gains nothing over our own reads;
`open_cufile` says which it is.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from ctypes.util import find_library
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

_NVIDIA_FS = Path("/proc/driver/nvidia-fs/version")


class CuFile(Protocol):
    """Reads into device memory; any thread may call `read`."""

    def read(self, path: Path, *, offset: int, pointer: int, size: int) -> int: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A way to read through cuFile, or None, and what to know about it."""

    cufile: CuFile | None
    reason: str


def open_cufile() -> Opened:
    """The best cuFile there is, or None with the reason."""
    mode = "GPUDirect" if _NVIDIA_FS.exists() else "compat mode: no nvidia-fs kernel module"
    with suppress(ImportError):
        return Opened(cufile=_Kvikio(import_module("kvikio")), reason=f"kvikio, {mode}")
    try:
        return Opened(cufile=_Library(), reason=f"libcufile, {mode}")
    except OSError as error:
        return Opened(cufile=None, reason=f"no cuFile here ({error}): reading through the host")


class _Kvikio:
    def __init__(self, kvikio: Any) -> None:
        self._kvikio = kvikio

    def read(self, path: Path, *, offset: int, pointer: int, size: int) -> int:
        with self._kvikio.CuFile(str(path), "r") as file:
            return int(file.read(_DeviceBuffer(pointer, size), size=size, file_offset=offset))

    def close(self) -> None:
        pass  # kvikio keeps nothing open between reads


class _DeviceBuffer:
    """Device memory as others' arrays see it."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


class _Error(ctypes.Structure):
    _fields_ = [("err", ctypes.c_int), ("cuda", ctypes.c_int)]


class _Handle(ctypes.Union):
    _fields_ = [("fd", ctypes.c_int), ("pointer", ctypes.c_void_p)]


class _Description(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle", _Handle),
        ("operations", ctypes.c_void_p),
    ]


_OPAQUE_FD = 1


class _Library:
    """libcufile through ctypes, which lets other threads run during a read."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL(find_library("cufile") or "libcufile.so.0")
        for name in ("cuFileDriverOpen", "cuFileHandleRegister"):
            getattr(self._lib, name).restype = _Error
        self._lib.cuFileRead.restype = ctypes.c_ssize_t
        self._lib.cuFileRead.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int64,
            ctypes.c_int64,
        ]
        self._check(self._lib.cuFileDriverOpen(), "cuFileDriverOpen")
        self._open: dict[Path, tuple[int, ctypes.c_void_p]] = {}
        self._lock = threading.Lock()

    def read(self, path: Path, *, offset: int, pointer: int, size: int) -> int:
        got = int(self._lib.cuFileRead(self._handle(path), pointer, size, offset, 0))
        if got < 0:
            raise OSError(-got if got != -1 else ctypes.get_errno(), f"cuFileRead of {path} failed ({got})")
        return got

    def close(self) -> None:
        """Give every file back; safe twice."""
        with self._lock:
            opened, self._open = self._open, {}
        for fd, handle in opened.values():
            self._lib.cuFileHandleDeregister(handle)
            os.close(fd)

    def _handle(self, path: Path) -> ctypes.c_void_p:
        with self._lock:
            if path not in self._open:
                self._open[path] = self._register(path)
            return self._open[path][1]

    def _register(self, path: Path) -> tuple[int, ctypes.c_void_p]:
        try:
            return self._register_with(path, os.O_DIRECT)
        except OSError:  # a filesystem without O_DIRECT: compat mode reads it all the same
            return self._register_with(path, 0)

    def _register_with(self, path: Path, flags: int) -> tuple[int, ctypes.c_void_p]:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
        description = _Description(type=_OPAQUE_FD, handle=_Handle(fd=fd), operations=None)
        handle = ctypes.c_void_p()
        try:
            found = self._lib.cuFileHandleRegister(ctypes.byref(handle), ctypes.byref(description))
            self._check(found, "cuFileHandleRegister")
        except BaseException:
            os.close(fd)
            raise
        return fd, handle

    @staticmethod
    def _check(found: _Error, call: str) -> None:
        if found.err:
            raise OSError(f"{call} failed with {found.err} (CUDA {found.cuda})")
