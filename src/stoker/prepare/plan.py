"""Content-addressed plan: everything the tasks need to know, as data, named by its hash.

Planning is pure: options, sources and tokenizer in, plan out. Two commands that would make the same
dataset have the same digest; a task or marker of one plan never mixes with another's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from stoker.errors import BadManifestError, UsageError
from stoker.formats.megatron import token_dtype
from stoker.formats.sizes import counted
from stoker.manifest import TokenizerRecord
from stoker.prepare.curate.recipe import Curation
from stoker.prepare.media.recipe import Media, MediaOptions
from stoker.prepare.neardup import Sketch, choose_sketch
from stoker.prepare.portions import Share, capped
from stoker.prepare.shuffle import KEYS, Cells
from stoker.prepare.sources.discover import cut
from stoker.prepare.sources.documents import MOST_BYTES, MOST_SOURCES, Piece, Reading, Source
from stoker.prepare.spill import Marks, Ordering
from stoker.prepare.writer import Layout
from stoker.storage import is_local, local_path

VERSION = 1

# About 64 splits of a small corpus, so that many cores share it; at least 4 MiB each, so that a task
# is worth starting; at most 256 MiB, so that a killed one is soon done again.
_SPLITS, _SPLIT_BYTES = 64, (4 << 20, 256 << 20)
# Shards reach the asked size, but a corpus that would fill fewer than eight is cut into eight (of 16
# MiB or more) so that as many nodes can share it.
_FEW_SHARDS, _SMALL_SHARD = 8, 16 << 20
_LARGEST_DOCUMENT = 1 << 30
_CELL_BYTES = 64 << 20  # tokens and text gathered at once in pass two
_CONFIRM_TASKS = 4  # per partition of the bands: each reads the candidates of all, and compares its part
_MATCH_BYTES = 8 << 30  # source bytes per partition of a band: some 2 M documents, 50 MB of keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the user asks for."""

    sources: tuple[str, ...]
    out: str
    tokenizer: str = ""
    shares: tuple[Share, ...] = ()  # sources with a weight, a cap or a field of their own
    holdout: tuple[tuple[str, float], ...] = ()  # parts held out, by name, and their shares
    reading: Reading = field(default_factory=Reading)
    curation: Curation = field(default_factory=Curation)
    media: MediaOptions = field(default_factory=MediaOptions)
    split: str = "train"
    format: str = "megatron"
    zstd: bool = False
    shard_bytes: int = 512 << 20
    shuffle: bool = True
    seed: int = 0
    epochs: int = 1
    dedup: bool = True
    near_dedup: float = 0.0
    eod: str = ""
    bos: str = ""
    engine: str = "auto"
    on_error: str = "stop"
    on_mismatch: str = "stop"

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.shard_bytes < 1 << 20:
            raise UsageError(
                f"{counted(self.epochs, 'epoch')} in shards of {self.shard_bytes:,} bytes make no sense",
                hint="ask for one epoch or more, and shards of 1 MiB or more",
            )
        if self.epochs > 1 and not self.shuffle:
            raise UsageError(
                "several epochs without a shuffle would be copies of one", hint="leave --no-shuffle out"
            )
        if not self.shuffle and any(share.weight > 1 for share in self.shares):
            raise UsageError(
                "a weight over 1 without a shuffle would put copies side by side",
                hint="leave --no-shuffle out, or mix datasets when you load them",
            )
        if not 0 < self.reading.max_document_bytes <= _LARGEST_DOCUMENT:
            raise UsageError(
                f"a limit of {self.reading.max_document_bytes:,} bytes for a document cannot be kept",
                hint="use a --max-document-size of 1GiB at most: an index counts tokens in 31 bits",
            )


MASKS = "loss_mask"  # the folder of a Megatron dataset's masks


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One dataset of those that a plan makes: which documents, and in which folder below the output."""

    side: str
    folder: str
    is_mask: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the tasks do. `digest` names it."""

    sources: tuple[Source, ...]
    splits: tuple[tuple[Piece, ...], ...]
    reading: Reading
    curation: Curation
    tokenizer: TokenizerRecord | None
    family: str
    format: str
    zstd: bool
    shard_bytes: int
    shuffle: bool
    seed: int
    epochs: int
    dedup: bool
    near_dedup: float
    on_error: str
    out: str
    curation_digest: str
    media: Media | None = None
    holdout: tuple[tuple[str, float], ...] = ()

    @cached_property
    def digest(self) -> str:
        content = {"version": VERSION, **asdict(self), "out": ""}
        if self.media is None:  # as before there was any: a dataset of text is still its command's
            del content["media"]
        return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())

    @property
    def bytes(self) -> int:
        return sum(source.bytes for source in self.sources)

    @property
    def dtype(self) -> np.dtype[Any]:
        return token_dtype(self.tokenizer.vocabulary if self.tokenizer else 1)

    @property
    def masked(self) -> bool:
        """Whether tokens have a loss mask."""
        return self.reading.conversation.mask

    @property
    def layout(self) -> Layout:
        return Layout(format=self.format, dtype=self.dtype, zstd=self.zstd, masked=self.masked)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The datasets that come of this plan: what is trained on, what is held out, masks beside them."""
        folders = ("", *(name for name, _ in self.holdout))
        parts = [Part(side=folder, folder=folder) for folder in folders]
        if self.masked and self.format == "megatron":
            parts += [
                Part(side=folder, folder=f"{folder}/{MASKS}" if folder else MASKS, is_mask=True)
                for folder in folders
            ]
        return tuple(parts)

    def part_of_task(self, number: int) -> tuple[Part, int, int]:
        """Which of the datasets a write task makes, its number there, and how many tasks do so."""
        parts = self.parts
        many = self.stages["write"] - len(parts) + 1  # of what is trained on; each other part has one
        return (parts[0], number, many) if number < many else (parts[number - many + 1], 0, 1)

    @property
    def most_times(self) -> int:
        """How often a document is taken at most."""
        return max(math.ceil(source.weight) for source in self.sources)

    @property
    def ordering(self) -> Ordering:
        return Ordering(
            shuffle=self.shuffle,
            dedup=self.dedup,
            seed=self.seed,
            epochs=self.epochs,
            fold=self.curation.fold,
        )

    @property
    def marks(self) -> Marks:
        if self.tokenizer is None:
            return Marks()
        before, after = self.tokenizer.bos, self.tokenizer.eod
        return Marks(before=() if before is None else (before,), after=() if after is None else (after,))

    @property
    def straight(self) -> bool:
        """With neither a shuffle nor a search for copies, splits become shards in one pass."""
        return is_straight(self, self.sources) and not self.media

    @property
    def sketch(self) -> Sketch | None:
        return choose_sketch(self.near_dedup) if self.near_dedup and not self.media else None

    @property
    def steps(self) -> list[str]:
        """What documents pass, by name, for statistics."""
        meeting = {"duplicates": self.dedup, "near_duplicates": bool(self.near_dedup)}
        named = ["media"] if self.media else [ask.step for ask in self.curation.steps]
        portions = {
            "sampling": any(source.weight < 1 for source in self.sources),
            "holdout": bool(self.holdout),
            "weights": self.most_times > 1,
        }
        last = {"caps": bool(capped(self.sources))}
        asked = [step for step, is_asked in {**portions, **meeting, **last}.items() if is_asked]
        return list(dict.fromkeys([*named, *asked]))

    @property
    def exact_match(self) -> bool:
        """Without a shuffle copies do not meet by themselves: a match task must find them."""
        return self.dedup and not self.shuffle

    @property
    def stages(self) -> dict[str, int]:
        """The stages in order, and how many tasks each has."""
        if self.straight:
            return {**self._first_look, "write": len(self.splits)}
        write = max(1, min(_FEW_SHARDS, self.bytes // _SMALL_SHARD), self.bytes // self.shard_bytes)
        bands = (self.sketch.bands if self.sketch else 0) + self.exact_match
        if self.media:
            bands = self.media.bands + self.exact_match
        counts = {
            **self._first_look,
            "map": len(self.splits),
            "match": bands * self.match_parts,
            "confirm": _CONFIRM_TASKS * self.match_parts if self.sketch else 0,
            "cluster": 1 if self.near_dedup else 0,
            "cap": 1 if capped(self.sources) else 0,
            "write": write + len(self.parts) - 1,  # parts held out, and masks, are small: a task each
        }
        return {stage: count for stage, count in counts.items() if count}

    @property
    def _first_look(self) -> dict[str, int]:
        """The pass before the first, where lines are compared over the whole corpus."""
        if self.curation.lines_at < 0:
            return {}
        return {"lines": len(self.splits), "common": self.match_parts}

    def piece_bytes(self, piece: Piece) -> int:
        source = self.sources[piece.source]
        return source.bytes * (piece.stop - piece.start) // source.units

    @property
    def match_parts(self) -> int:
        return -(-self.bytes // _MATCH_BYTES) or 1

    def cells(self, *, tokens: int, text_bytes: int) -> Cells:
        """How the tokens that pass one made are cut into shards, and shards into cells."""
        if self.media:  # samples are streamed: a cell is a shard
            shards = max(-(-text_bytes // self.shard_bytes), min(_FEW_SHARDS, text_bytes // _SMALL_SHARD), 1)
            return Cells(universe=KEYS if self.shuffle else text_bytes + 1, shards=shards, per_shard=1)
        size = tokens * self.dtype.itemsize + (text_bytes * 3 if self.layout.with_texts else 0)
        shards = max(-(-size // self.shard_bytes), min(_FEW_SHARDS, size // _SMALL_SHARD), 1)
        return Cells(
            universe=KEYS if self.shuffle else tokens + 1,  # a last document without tokens lies at their end
            shards=shards,
            per_shard=-(-size // shards // _CELL_BYTES) or 1,
        )

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)


def make_plan(
    options: Options,
    sources: Sequence[Source],
    tokenizer: TokenizerRecord | None,
    family: str,
    media: Media | None = None,
) -> Plan:
    """Cut the sources and fix every choice."""
    total = sum(source.bytes for source in sources)
    if is_straight(options, sources) and not media:
        split_bytes = max(2 * _SMALL_SHARD, min(2 * options.shard_bytes, total // _FEW_SHARDS))
    else:
        split_bytes = max(_SPLIT_BYTES[0], min(_SPLIT_BYTES[1], total // _SPLITS))
    if len(sources) >= MOST_SOURCES or any(source.bytes >= MOST_BYTES for source in sources):
        raise UsageError(
            f"{counted(len(sources), 'source')}, or one of a terabyte and more, are too many for one plan",
            hint="join small files, or prepare parts of the data into datasets of their own",
        )
    return Plan(
        out=str(local_path(options.out).absolute()) if is_local(options.out) else options.out,
        sources=tuple(sources),
        splits=tuple(cut(sources, split_bytes=split_bytes)),
        tokenizer=tokenizer,
        family=family,
        curation_digest=options.curation.digest(),
        media=media,
        **{
            **{name: getattr(options, name) for name in _SHARED},
            **({"format": "webdataset"} if media else {}),
        },
    )


def is_straight(choices: Options | Plan, sources: Sequence[Source]) -> bool:
    meets = choices.shuffle or choices.dedup or choices.near_dedup
    return not (meets or choices.holdout or choices.reading.conversation.mask or capped(sources))


_SHARED = (
    "reading", "curation", "format", "zstd", "shard_bytes", "shuffle", "seed", "epochs", "dedup",
    "near_dedup", "on_error", "holdout",
)  # fmt: skip


def read_plan(folder: Path) -> Plan:
    """The plan a task folder belongs to."""
    try:
        raw = json.loads((folder / "plan.json").read_bytes())
        if raw.pop("version") != VERSION:
            raise ValueError("it is of another version of stoker")
        return _from_plain(raw)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadManifestError(
            f"cannot read the plan in {folder}: {error}", hint="delete the folder and prepare again"
        ) from error


def _from_plain(raw: dict[str, Any]) -> Plan:
    return Plan(
        **{
            **raw,
            "sources": tuple(Source(**source) for source in raw["sources"]),
            "splits": tuple(tuple(Piece(**piece) for piece in split) for split in raw["splits"]),
            "reading": Reading.from_plain(raw["reading"]),
            "curation": Curation.from_plain(raw["curation"]),
            "tokenizer": TokenizerRecord(**raw["tokenizer"]) if raw["tokenizer"] else None,
            "media": Media.from_plain(raw["media"]) if raw.get("media") else None,
            "holdout": tuple((name, share) for name, share in raw["holdout"]),
        }
    )
