"""Folder listing: which files make which samples, planned once and kept beside the plan.

A folder of a million images is one source of a million units, not a million sources. Its samples stand in
NAME.jsonl, one a line, and where each line starts in NAME.u64; the source's version is their digest.
"""

from __future__ import annotations

import builtins
import csv
import io
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import xxhash

from stoker.errors import BadInputError
from stoker.prepare.media.sources.kinds import CAPTIONS, kind_of, suffix_of
from stoker.storage import Entry, new_file

METADATA = ("metadata.jsonl", "metadata.csv")
CLASSES = "classes.json"
_SPLITS = ({"train", "training"}, {"val", "valid", "validation", "dev"}, {"test", "testing"})
# train2017, test-dev2017, val_images: a split's name and what says nothing of a class
_SPLIT = re.compile(
    r"(train(?:ing)?|val(?:id(?:ation)?)?|dev|test(?:ing)?)(?:[-_.]?(?:set|split|data|images?|dev|\d+))*"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """One sample: its files, media first, the name of its class, and what a metadata.jsonl says of it."""

    files: tuple[Entry, ...]
    label: str = ""
    about: str = ""  # JSON


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """The samples of one folder or prefix."""

    base: str
    samples: tuple[Listed, ...]
    alone: tuple[str, ...] = ()  # captions without media, and other files: they make no sample

    @property
    def bytes(self) -> int:
        return sum(file.bytes for sample in self.samples for file in sample.files)

    @property
    def captioned(self) -> int:
        return sum(
            bool(one.about) or any(not kind_of(suffix_of(file.path)) for file in one.files)
            for one in self.samples
        )

    def lines(self) -> list[builtins.bytes]:
        return [_line(sample) for sample in self.samples]

    @property
    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(b"".join(self.lines()))


def list_samples(base: str, entries: Sequence[Entry]) -> Listing:
    """Group files by folder and stem: media with the captions of their name. Two of one kind (a.jpg, a.png)
    are two samples; an image and a sound of one name are one."""
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        path = PurePosixPath(entry.path)
        groups[str(path.parent / path.stem)].append(entry)
    samples, alone = [], []
    for stem in sorted(groups):
        media = [entry for entry in groups[stem] if kind_of(suffix_of(entry.path))]
        beside = [entry for entry in groups[stem] if suffix_of(entry.path) in CAPTIONS]
        for some in _told_apart(sorted(media, key=lambda entry: entry.path)):
            samples.append(Listed(files=(*some, *sorted(beside, key=lambda entry: entry.path))))
        used = [*media, *beside] if media else []
        alone += [entry.path for entry in groups[stem] if entry not in used]
    return Listing(base=base, samples=tuple(samples), alone=tuple(alone))


def _told_apart(media: list[Entry]) -> list[tuple[Entry, ...]]:
    kinds = Counter(kind_of(suffix_of(entry.path)) for entry in media)
    if not media or max(kinds.values()) > 1:
        return [(entry,) for entry in media]
    return [tuple(sorted(media, key=lambda entry: kind_of(suffix_of(entry.path)), reverse=True))]


def split_folder(listing: Listing, split: str) -> tuple[str, list[str], list[str]]:
    """Where all folders are named train, val or test: the folder that these lie in (images/, or empty), those
    of the wanted split, and all of them; nothing where folders mean something else."""
    folders = [PurePosixPath(one.files[0].path).parts[:-1] for one in listing.samples]
    above: list[str] = []
    while True:
        tops = sorted({parts[0] for parts in folders if parts})
        if tops and all(_SPLIT.fullmatch(top.lower()) for top in tops):
            return "/".join(above), _of_split(tops, split), tops
        if len(tops) != 1 or not all(folders):
            return "", [], []
        above.append(tops[0])
        folders = [parts[1:] for parts in folders]


def splits_among_others(listing: Listing) -> list[str]:
    """Folders named as splits (two at least) beside folders that are none: whoever meant them should know."""
    tops = sorted({_top(one) for one in listing.samples})
    named = [f"{top}/" for top in tops if _SPLIT.fullmatch(top.lower())]
    return named if 1 < len(named) < len(tops) else []


def _of_split(tops: Sequence[str], split: str) -> list[str]:
    """The folder of this very name, or those that mean it."""
    if split in tops:
        return [split]
    wanted = next((names for names in _SPLITS if split.lower() in names), {split.lower()})
    matches = ((top, _SPLIT.fullmatch(top.lower())) for top in tops)
    return [top for top, match in matches if match and match[1] in wanted]


def has_class_folders(listing: Listing) -> bool:
    """Whether folders are classes: all samples lie in some, which are two at least, and none has a caption,
    which says more."""
    tops = set(map(_top, listing.samples))
    return len(tops) > 1 and "" not in tops and not listing.captioned


def labelled(listing: Listing) -> Listing:
    """The samples with the folder that each lies in, below the base, as its class."""
    return replace(listing, samples=tuple(replace(one, label=_top(one)) for one in listing.samples))


def described(listing: Listing, lines: Mapping[str, str]) -> Listing:
    """The samples with what is said of them, by the path of their first file."""
    samples = tuple(replace(one, about=lines.get(one.files[0].path, "")) for one in listing.samples)
    alone = tuple(path for path in listing.alone if PurePosixPath(path).name not in METADATA)
    return replace(listing, samples=samples, alone=alone)


def read_metadata(path: str, data: bytes) -> dict[str, str]:
    """What a metadata.jsonl or metadata.csv says of each file, by its path, as `datasets` has it."""
    folder = path.rpartition("/")[0]
    said, number = {}, 0
    try:
        for line, row in _csv_rows(data) if path.endswith(".csv") else _json_rows(data):
            number = line
            name = row.pop("file_name")
            said[f"{folder}/{name}" if folder else name] = json.dumps(row)
    except (ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
        raise BadInputError(
            f"{path} line {number:,} names no file: {type(error).__name__}: {error}",
            hint='each line is as {"file_name": "a.jpg", "text": "its caption"}, in a .csv as many values as '
            "columns; mend or rename the file",
        ) from error
    return said


def _json_rows(data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    return (
        (number, _json_row(line)) for number, line in enumerate(data.split(b"\n"), start=1) if line.strip()
    )


def _json_row(line: bytes) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:
        return {}  # names no file
    return row


def _csv_rows(data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    rows = csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""))
    if "file_name" not in (rows.fieldnames or ()):
        return  # of somebody else, with names of its own
    for row in rows:
        if None in row:
            raise ValueError(f"it has more values than columns: {row[None][:3]}")
        yield rows.line_num, dict(row)


def read_classes(data: bytes) -> tuple[str, ...]:
    """The names of classes beside shards of ours; whatever else is called so says none."""
    try:
        names = json.loads(data)
    except ValueError:
        return ()
    is_ours = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return tuple(names) if is_ours else ()


def _top(sample: Listed) -> str:
    top, separator, _ = sample.files[0].path.partition("/")
    return top if separator else ""


def keep_listing(listing: Listing, path: Path) -> None:
    """Write the samples, and where each starts; the folder's name is of a plan that holds their digest."""
    if path.with_suffix(".jsonl").exists():
        return
    lines = listing.lines()
    starts = np.cumsum([0, *map(len, lines)], dtype=np.int64)
    for suffix, data in ((".u64", starts.tobytes()), (".jsonl", b"".join(lines))):
        with new_file(path.with_suffix(suffix)) as file:
            file.write(data)


def kept_samples(path: Path, start: int, stop: int) -> Iterator[tuple[int, Listed]]:
    """Samples `start` to `stop` with their numbers."""
    starts = np.fromfile(path.with_suffix(".u64"), np.int64)
    with path.with_suffix(".jsonl").open("rb") as file:
        file.seek(int(starts[start]))
        for number in range(start, stop):
            label, about, *files = json.loads(file.readline())
            entries = tuple(Entry(path=name, bytes=size, version=version) for name, size, version in files)
            yield number, Listed(files=entries, label=label, about=about)


def _line(sample: Listed) -> bytes:
    plain = [sample.label, sample.about, *([file.path, file.bytes, file.version] for file in sample.files)]
    return json.dumps(plain).encode() + b"\n"  # escaped: names may hold bytes that are no UTF-8
