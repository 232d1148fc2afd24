"""Native I/O thread pool: chunks read and verified by threads in C, to the host or a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from stoker.load.reading.chunks import Chunk, ChunkLoader, Run
from stoker.load.reading.engines import PAGE
from stoker.load.reading.layout import Piece
from stoker.native import native

# Read and copied at once: what was read is still in the processor's cache when the card fetches it, and
# each copy costs the driver some 3 us (H200, 14 threads: 41 GB/s with 512 KiB, 47 with 1 MiB, 50 with
# 2 MiB, 53 with 4 MiB).
STEP_BYTES = 4 << 20

_HOST = -1


class NativeJob:
    """Stretches being read by the pool."""

    def __init__(self, native: Any, job: Any, *needed: Any) -> None:
        self._native, self._job = native, job
        self._needed = needed  # an event and digests must not go while they may still be looked at

    def finish(self) -> None:
        """Wait until all has been read, and copies to a device asked for. EOFError or OSError if a file could
        not be read, ValueError if a block differs from its digest."""
        self._native.finish(self._job)

    def wait(self, stream: Any) -> None:
        """Let a stream wait for the copies of a finished job, as torch's events do."""
        self._native.wait(self._job, stream.cuda_stream)


class NativePool:
    """Reading threads in C. Jobs are submitted by one thread; `close` is safe twice."""

    def __init__(self, module: Any, *, threads: int, block_bytes: int, device: int, stream: int) -> None:
        self._native = module
        self._most = -(-block_bytes // PAGE) * PAGE
        self._pool = module.open(device, threads, max(STEP_BYTES, self._most), self._most, stream)
        self._verifies = any(module.hash_with(path, symbol) for path, symbol in _hashes())

    def verifies(self, block_bytes: int) -> bool:
        """Whether it can verify blocks of this size."""
        return bool(self._verifies and block_bytes % PAGE == 0 and block_bytes <= self._most)

    def resize(self, threads: int) -> None:
        """Let so many threads work at once, of those it was opened with."""
        self._native.resize(self._pool, threads)

    def submit(self, runs: Sequence[Run], *, target: int, after: Any = None) -> NativeJob:
        """Read runs to their places behind the address `target`; to a device once event `after` is done."""
        asked = [
            (
                run.file,
                run.start,
                run.stop - run.start,
                target + run.at,
                run.digests.ctypes.data,
                run.block_bytes,
                run.file_bytes,
                run.doubted,
                run.trusted,
                run.memory,
            )
            for run in runs
        ]
        event = after.cuda_event if after is not None else 0
        job = self._native.submit(self._pool, asked, event)
        return NativeJob(self._native, job, after, [run.digests for run in runs])

    def pin(self, address: int, size: int) -> None:
        """Let the device copy straight from memory that is only read. OSError if its driver refuses."""
        self._native.pin(self._pool, address, size)

    def unpin(self, address: int) -> None:
        """Take that back, once nothing is copied from there any more."""
        self._native.unpin(self._pool, address)

    def close(self) -> None:
        self._native.close(self._pool)


def open_pool(*, threads: int, block_bytes: int, device: int = _HOST, stream: int = 0) -> NativePool | None:
    """The pool, where the extension was built and, for a device, there is a driver. `block_bytes`: of the
    largest blocks that it is to verify."""
    module = native("load._pump")
    if module is None:
        return None
    with suppress(OSError):
        return NativePool(module, threads=threads, block_bytes=block_bytes, device=device, stream=stream)
    return None


def _hashes() -> Iterator[tuple[str, str]]:
    """Where xxh3 is to be found. The system's library, if it chooses by processor, takes a quarter less time
    than the module's, which is built for any. Old ones, whose xxh3 was another, do not choose."""
    yield "libxxhash.so.0", "XXH3_64bits_dispatch"
    yield import_module("xxhash._xxhash").__file__ or "", "XXH3_64bits"


class Submitted:
    """A chunk that the pool is reading. What it finds wrong is looked at again by `load_anew`, which says
    what it is."""

    def __init__(
        self, job: NativeJob, chunk: Chunk, *, verified: Callable[[], None], load_anew: Callable[[], Chunk]
    ) -> None:
        self._job, self._chunk, self._verified, self._load_anew = job, chunk, verified, load_anew

    def result(self) -> Chunk:
        if self.exception():
            return self._load_anew()
        return self._chunk

    def exception(self) -> BaseException | None:
        try:
            self._job.finish()
        except (EOFError, OSError, ValueError, RuntimeError) as error:  # the last: the pool was closed before
            return error
        self._verified()
        return None


def runs_of(pool: NativePool, loader: ChunkLoader, pieces: Sequence[Piece]) -> list[Run] | None:
    """What the pool has to read for a chunk; None where it cannot, or cannot verify what has to be."""
    runs = loader.runs(pieces)
    if runs is None or not (pool.verifies(loader.block_bytes) or all(map(_is_trusted, runs))):
        return None
    return runs


def _is_trusted(run: Run) -> bool:
    return run.doubted == run.trusted
