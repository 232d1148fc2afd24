"""A foreign checkpoint written as one of stoker's: piece by piece, hashed, committed by one rename."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

from stoker.checkpoint.foreign.source import Foreign
from stoker.checkpoint.saved.commit import begin, commit, discard, make_manifest, put_part
from stoker.checkpoint.saved.layout import CHUNK_BYTES, Marks, Part, part_name, sequence_of
from stoker.checkpoint.saved.reader import Checkpoint
from stoker.checkpoint.saved.retention import collect
from stoker.checkpoint.saved.tiers import local_names
from stoker.checkpoint.saved.writer import write_part
from stoker.errors import UsageError
from stoker.storage import named_errors


class _Pages:
    """The writer's source: chunks of a foreign checkpoint in page-aligned memory, a few at a time."""

    def __init__(self, foreign: Foreign) -> None:
        self._foreign, self.bytes = foreign, foreign.parts[0].bytes
        self._buffers: dict[int, mmap.mmap] = {}
        self._lock = threading.Lock()

    def chunk(self, start: int, stop: int) -> memoryview:
        buffer = mmap.mmap(-1, stop - start)
        with self._lock:
            self._buffers[start] = buffer
        view = memoryview(buffer)
        self._foreign.fill(view[: min(stop, self.bytes) - start], start)
        return view

    def release(self, start: int, stop: int) -> None:
        with self._lock:
            del self._buffers[start]  # closed when its view is gone


def import_checkpoint(foreign: Checkpoint, root: Path, *, step: int | None = None) -> str:
    """Write a foreign checkpoint into a run folder, as its newest one; gives its name."""
    if not isinstance(foreign, Foreign):
        raise UsageError(
            f"{foreign.name} is a checkpoint of stoker already",
            hint="copy its folder, or begin a run from it with restore(source=...)",
        )
    with named_errors("write", root):
        root.mkdir(parents=True, exist_ok=True)
        collect(root)
    known = (sequence_of(name) or 0 for name in local_names(root))
    counted = foreign.step if step is None else step
    saving = begin(root, step=counted, sequence=1 + max(known, default=0))
    try:
        path = saving.folder(root) / part_name(0, "bin")
        chunks = write_part(path, _Pages(foreign), chunk_bytes=CHUNK_BYTES)
        theirs = foreign.parts[0]
        part = Part(
            rank=0,
            save=saving.save,
            bytes=theirs.bytes,
            pieces=theirs.pieces,
            chunks=chunks,
            values=theirs.values,
        )
        text = put_part(root, saving, part)
        marks = Marks(reason=f"imported from {foreign.name}")
        commit(root, saving, make_manifest(saving, [part], [text], marks=marks), [text], rank=0)
    except BaseException:
        discard(root, saving, rank=0)
        raise
    return saving.name
