"""On-disk layout of a checkpoint: its files, its chunks, and what its manifests say. No torch here.

    ROOT/000012-step-000000500-3f9ac2d1/     sequence, step, token of the save; never overwritten
        part-00000.bin      the tensors of rank 0, back to back, each at a multiple of 64 bytes
        part-00000.json     what lies where in it, a digest for every chunk of it, this rank's plain values
        checkpoint.json     step, world, and the size and digest of every part; written last
    ROOT/.saving-000012-...                  a save under way, or what a killed one left

A tensor that several ranks hold in pieces is described by boxes: where a piece begins in the whole tensor
and how large it is. `docs/concepts/checkpoints.md` describes the format for other readers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from stoker.errors import BadCheckpointError, UsageError

VERSION = 1
MANIFEST = "checkpoint.json"
SAVING = ".saving-"
ALIGNMENT = 64  # of a tensor in its file: a cache line, and a multiple of every element size
CHUNK_BYTES = 8 << 20  # written, read and hashed at once (O_DIRECT 4-8 MiB was fastest, small machine)

# One step of a path to a value: a key of a dictionary, a place in a list, or ("k", a key that is no text).
Path = tuple[Any, ...]
Sizes = tuple[int, ...]
Text = bytes  # the records below have a field of that name

# What comes of a text that is no record of ours: whoever can write in a folder can write anything.
NO_RECORD = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)

_NAME = re.compile(r"^(\d{6,})-step-(\d{9,})-([0-9a-f]{8})$")
_ITEM_BYTES = {
    "float64": 8, "int64": 8, "uint64": 8, "complex64": 8, "float32": 4, "int32": 4, "uint32": 4,
    "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2, "complex128": 16, "complex32": 4,
    "int8": 1, "uint8": 1, "bool": 1, "bits16": 2, "bits8": 1, "bits1x8": 1, "bits2x4": 1, "bits4x2": 1,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1, **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
}  # fmt: skip


def item_bytes(dtype: str) -> int:
    """Bytes of one element. A dtype that is not in the table is refused: a guess would lose data."""
    if dtype not in _ITEM_BYTES:
        raise UsageError(
            f"{dtype} is a dtype that this stoker does not know",
            hint="save it as a view of another dtype (`tensor.view(torch.uint8)`), or use a newer stoker",
        )
    return _ITEM_BYTES[dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A piece of a tensor: where it begins in the whole one, and how large it is."""

    path: Path
    dtype: str
    shape: Sizes
    offsets: Sizes
    sizes: Sizes

    @property
    def name(self) -> str:
        return path_name(self.path)

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * item_bytes(self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A box and the byte of its part's file at which it lies."""

    box: Box
    at: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one rank wrote."""

    rank: int
    save: str
    bytes: int
    pieces: tuple[Piece, ...]
    chunks: tuple[int, ...]
    chunk_bytes: int = CHUNK_BYTES
    values: tuple[tuple[Path, Any], ...] = ()  # Any: the JSON form of a plain value
    own: tuple[tuple[Path, Any], ...] = ()  # as values, but of this rank alone: its random generators
    pieces_text: str = field(default="", compare=False, repr=False)  # as JSON, where that is known already

    def to_json(self) -> Text:
        plain = {
            "rank": self.rank,
            "save": self.save,
            "bytes": self.bytes,
            "chunk_bytes": self.chunk_bytes,
            "chunks": [f"{digest:016x}" for digest in self.chunks],
            "values": [[plain_path(path), value] for path, value in self.values],
            "own": [[plain_path(path), value] for path, value in self.own],
        }
        text = json.dumps(plain, separators=(",", ":"))
        return f'{text[:-1]},"pieces":{self.pieces_text or pieces_text(self.pieces)}}}'.encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRecord:
    """What the manifest knows of a part: sizes of its two files and the digest of its description."""

    bytes: int
    json_bytes: int
    xxh3: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """What its maker says of a checkpoint: why it was saved, how good it is, under which name it is kept."""

    reason: str = ""  # "final", "SIGTERM on rank 1", "imported from ..."
    metric: float | None = None
    pin: str = ""

    def to_plain(self) -> dict[str, Any]:
        said = {"reason": self.reason, "metric": self.metric, "pin": self.pin}
        return {key: value for key, value in said.items() if value not in ("", None)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A whole checkpoint."""

    name: str
    step: int
    save: str
    parts: tuple[PartRecord, ...]
    saved_at: float = 0.0
    made_by: str = ""
    version: int = VERSION
    marks: Marks = field(default_factory=Marks)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def to_json(self) -> Text:
        plain = {
            "version": self.version,
            "name": self.name,
            "step": self.step,
            "save": self.save,
            "saved_at": self.saved_at,
            "made_by": self.made_by,
            "parts": [[part.bytes, part.json_bytes, part.xxh3] for part in self.parts],
        }
        if marks := self.marks.to_plain():  # else the text is one that every stoker reads
            plain["marks"] = marks
        body = json.dumps(plain, separators=(",", ":"))
        return json.dumps({"manifest": plain, "xxh3": _digest(body.encode())}, indent=1).encode() + b"\n"


def pieces_text(pieces: Iterable[Piece]) -> str:
    """Pieces as JSON: the same for every save of a plan, and the longest part of a description."""
    return json.dumps([_plain_piece(piece) for piece in pieces], separators=(",", ":"))


def checkpoint_name(*, sequence: int, step: int, save: str) -> str:
    return f"{sequence:06d}-step-{step:09d}-{save}"


def sequence_of(name: str) -> int | None:
    """The place of a checkpoint in its run; None for a folder that is no checkpoint."""
    match = _NAME.match(name)
    return int(match[1]) if match else None


def step_of(name: str) -> int:
    match = _NAME.match(name)
    return int(match[2]) if match else -1


def newest_first(names: Iterable[str]) -> list[str]:
    """The names that are checkpoints', the newest first."""
    known = [(sequence, name) for name in names if (sequence := sequence_of(name)) is not None]
    return [name for _, name in sorted(known, reverse=True)]


def part_name(rank: int, kind: str) -> str:
    return f"part-{rank:05d}.{kind}"


def file_names(manifest: Manifest) -> Iterator[tuple[str, int]]:
    """Every file of a checkpoint but the manifest, with its size."""
    for rank, part in enumerate(manifest.parts):
        yield part_name(rank, "bin"), part.bytes
        yield part_name(rank, "json"), part.json_bytes


def path_name(path: Path) -> str:
    return ".".join(str(step[1]) if isinstance(step, tuple) else str(step) for step in path)


def place(boxes: Sequence[Box]) -> tuple[tuple[Piece, ...], int]:
    """Lay boxes out in a file, one after another; and the size of the file."""
    pieces, at = [], 0
    for box in boxes:
        pieces.append(Piece(box=box, at=at))
        at += -(-box.bytes // ALIGNMENT) * ALIGNMENT
    return tuple(pieces), at


def part_record(part: Part, text: bytes) -> PartRecord:
    return PartRecord(bytes=part.bytes, json_bytes=len(text), xxh3=_digest(text))


def parse_manifest(text: bytes, *, name: str) -> Manifest:
    """The manifest in this text; a torn one, a changed one, or that of another checkpoint is refused."""
    try:
        raw = json.loads(text)
        plain = raw["manifest"]
        if raw["xxh3"] != _digest(json.dumps(plain, separators=(",", ":")).encode()):
            raise ValueError("its digest does not match")
        if plain["version"] != VERSION:
            raise ValueError(f"it is of version {plain['version']}, this stoker reads {VERSION}")
        parts = tuple(PartRecord(bytes=b, json_bytes=j, xxh3=x) for b, j, x in plain.pop("parts"))
        marks = Marks(**plain.pop("marks", {}))
        manifest = Manifest(parts=parts, marks=marks, **plain)
        if manifest.name == name:
            check_manifest(manifest)
    except NO_RECORD as error:
        raise BadCheckpointError(f"the manifest of {name} cannot be used: {error}", hint=SKIPPED) from error
    if manifest.name != name:
        raise BadCheckpointError(
            f"{name} holds the manifest of {manifest.name}", hint="move it back under its own name"
        )
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """A digest says that bytes are what somebody wrote, not that they can be."""
    known = _NAME.match(manifest.name)
    if not known or (manifest.step, manifest.save) != (int(known[2]), known[3]):
        raise ValueError(f"it is of step {manifest.step!r} of save {manifest.save!r}")
    for one in manifest.parts:
        if not _are_counts(one.bytes, one.json_bytes) or type(one.xxh3) is not str:
            raise ValueError(f"{one} is no part")
    marks = manifest.marks
    if not manifest.parts or not _is_number(manifest.saved_at) or not _is_number(marks.metric or 0):
        raise ValueError("it has no parts, or a time or a metric that is no number")
    if not all(type(word) is str for word in (manifest.made_by, marks.reason, marks.pin)):
        raise ValueError("a word in it is none")


def parse_part(text: bytes, *, manifest: Manifest, rank: int) -> Part:
    """The description of a part; it must be the one its manifest was written for."""
    record, where = manifest.parts[rank], f"{part_name(rank, 'json')} of {manifest.name}"
    if len(text) != record.json_bytes or _digest(text) != record.xxh3:
        raise BadCheckpointError(f"{where} is not the file its manifest names", hint=SKIPPED)
    try:
        part = part_from_json(text)
        check_part(part, record)
    except (*NO_RECORD, UsageError) as error:
        raise BadCheckpointError(f"{where} cannot be used: {error}", hint=SKIPPED) from error
    if (part.rank, part.save) != (rank, manifest.save):
        raise BadCheckpointError(f"{where} belongs to another save", hint=SKIPPED)
    return part


def check_part(part: Part, record: PartRecord) -> None:
    """Does what it describes lie in its file? A tensor that ended behind it would be restored in part."""
    if part.bytes != record.bytes or not _are_counts(part.chunk_bytes) or not part.chunk_bytes:
        raise ValueError(f"it is of {part.bytes!r} bytes in chunks of {part.chunk_bytes!r}")
    if len(part.chunks) != -(-part.bytes // part.chunk_bytes):
        raise ValueError(f"it has {len(part.chunks)} chunks of {part.bytes:,} bytes")
    for piece in part.pieces:
        box, axes = piece.box, len(piece.box.shape)
        if not box.path or type(box.path[0]) is not str:
            raise ValueError(f"{box.path!r} is no name")
        if not _are_counts(piece.at, *box.shape, *box.offsets, *box.sizes):
            raise ValueError(f"{box.name} has sizes that are none")
        if not len(box.offsets) == len(box.sizes) == axes or piece.at + box.bytes > part.bytes:
            raise ValueError(f"{box.name} does not lie in its file")


def _are_counts(*values: Any) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def part_from_json(text: bytes) -> Part:
    plain = json.loads(text)
    return Part(
        rank=plain["rank"],
        save=plain["save"],
        bytes=plain["bytes"],
        chunk_bytes=plain["chunk_bytes"],
        chunks=tuple(int(digest, 16) for digest in plain["chunks"]),
        pieces=tuple(_piece(row) for row in plain["pieces"]),
        values=tuple((read_path(path), value) for path, value in plain["values"]),
        own=tuple((read_path(path), value) for path, value in plain["own"]),
    )


SKIPPED = "it is skipped; restore an older one, or copy it again from the remote tier"


def _digest(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def _plain_piece(piece: Piece) -> list[Any]:
    box = piece.box
    return [plain_path(box.path), box.dtype, list(box.shape), list(box.offsets), list(box.sizes), piece.at]


def _piece(row: list[Any]) -> Piece:
    path, dtype, shape, offsets, sizes, at = row
    box = Box(
        path=read_path(path), dtype=dtype, shape=tuple(shape), offsets=tuple(offsets), sizes=tuple(sizes)
    )
    return Piece(box=box, at=at)


def plain_path(path: Path) -> list[Any]:
    return [list(step) if isinstance(step, tuple) else step for step in path]


def read_path(plain: Any) -> Any:
    """Lists back to tuples, as deep as they go: a key of a dictionary may be a tuple too."""
    return tuple(map(read_path, plain)) if isinstance(plain, list) else plain
