"""Files that somebody, or a disk, has changed. What may come of them: the right samples, or a StokerError."""

from __future__ import annotations

import io
import itertools
import json
import random
import resource
import shutil
import signal
import struct
import tarfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from small_datasets import make_tars, make_tokens, write_dataset, write_files

from stoker.errors import StokerError
from stoker.load.loader import Loader
from stoker.manifest import NAME
from stoker.prepare.check import adopt

DOCUMENTS = (7, 1, 40, 3, 12)
TOKENS = sum(DOCUMENTS)
_HOSTILE = (0, 1, 2, 3, 5, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
_MOST_BYTES = 1 << 30  # that a case may take beyond what the process has
_MOST_S = 20


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Changed in one to three places."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice((_flip, _flip, _number, _number, _cut, _grow, _repeat))(changed, rng)
    return bytes(changed)


def _flip(data: bytearray, rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _number(data: bytearray, rng: random.Random) -> None:
    width = rng.choice((1, 2, 4, 8))
    if len(data) >= width:
        at = rng.randrange(len(data) - width + 1)
        value = (
            rng.choice(_HOSTILE)
            if rng.random() < 0.7
            else int.from_bytes(data[at : at + width], "little") + 1
        )
        data[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")


def _cut(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    del data[at : at + rng.choice((1, 8, 512, len(data)))]


def _grow(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.choice((1, 8, 512)))


def _repeat(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data) + 1)
    data[start:start] = data[start : start + rng.choice((4, 8, 512, 1024))]


def hostile_value(value, rng: random.Random):
    """A leaf of a JSON document, changed."""
    if isinstance(value, bool) or value is None:
        return rng.choice((0, 1, "", [], {}, None))
    if isinstance(value, int):
        return rng.choice(
            (value + 1, value - 1, -value, 0, 2**40, 2**63, 10**30, 1.5, "7", None, True, [value])
        )
    if isinstance(value, (list, dict)):
        return rng.choice((None, 7, "x", [], {}, [value], [1, 2], {"a": 1}))
    if isinstance(value, float):
        return rng.choice((-value, 0, "x", None, 1e308))
    return rng.choice(
        ("", "../../etc/passwd", "/etc/passwd", value + "x", "a\0b", value[:-1], 7, None, [], "int16")
    )


def hostile_json(plain, rng: random.Random):
    """A JSON document with one leaf changed, taken away or added."""
    changed = json.loads(json.dumps(plain))
    holder, key = rng.choice(list(_leaves(changed)))
    what = rng.random()
    if what < 0.15:
        del holder[key]
    elif what < 0.25 and isinstance(holder, dict):
        holder[f"{key}2"] = holder[key]
    else:
        holder[key] = hostile_value(holder[key], rng)
    return changed


def _leaves(plain):
    for key, value in list(plain.items() if isinstance(plain, dict) else enumerate(plain)):
        if isinstance(value, (dict, list)) and value:
            yield from _leaves(value)
        yield plain, key


@contextmanager
def limits():
    """Little memory and little time."""

    def ring(_number, _frame):
        raise AssertionError(f"nothing came of it in {_MOST_S} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before, alarm = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, ring)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MOST_BYTES, before[1]))
    signal.setitimer(signal.ITIMER_REAL, _MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        resource.setrlimit(resource.RLIMIT_AS, before)


def rows_of(folder: Path, **options) -> list:
    """Every sample of an epoch, in the order on disk."""
    given = {"batch_size": 1, "shuffle": "off", "output": "numpy", "workers": "inline", "chunk_bytes": 2048}
    with Loader(folder, **{**given, **options}) as loader:
        if folder.joinpath("tars").exists():
            return [{name: one[0] for name, one in batch.items()} for batch in loader]
        if options.get("packing", "concat") == "concat":
            return [batch["input_ids"][0].tolist() for batch in loader]
        return [
            row[batch["attention_mask"][0] > 0].tolist() for batch in loader for row in batch["input_ids"]
        ]


class Idx:
    """An `.idx` that was changed before the folder was adopted, or before it was digested."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ids = np.arange(100, 100 + TOKENS, dtype=np.uint16)
        made = make_tokens(folder / "made", [list(DOCUMENTS)])
        self._index = (made / "e0-0000.idx").read_bytes()

    def run(self, rng: random.Random) -> bool:
        """True where it was refused."""
        index, folder = mutated(self._index, rng), self._folder / "case"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        adopted = rng.random() < 0.5
        try:
            with limits():
                if adopted:
                    (folder / "a.bin").write_bytes(self._ids.tobytes())
                    (folder / "a.idx").write_bytes(index)
                    adopt(str(folder))
                else:
                    files = {".bin": self._ids.tobytes(), ".idx": index}
                    shard = write_files(folder, "a", files, len(DOCUMENTS), TOKENS)
                    write_dataset(folder, [shard], format="megatron", dtype="uint16")
                found = rows_of(folder, seq_len=TOKENS, packing="pad", labels="")
                windows = rows_of(folder, seq_len=4)
        except StokerError:
            return True
        documents, ids = self._as_said(index)
        assert found == documents, (found, documents)
        assert windows == [ids[at : at + 4] for at in range(0, len(ids) - 4, 4)]
        return False

    def _as_said(self, index: bytes):
        """The documents as a plain reading of the changed index finds them; and it must leave nothing out."""
        code, count, bounds = struct.unpack_from("<BQQ", index, 17)
        kind = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}[code]
        ids = np.frombuffer(self._ids.tobytes(), kind).tolist()
        lengths = struct.unpack_from(f"<{count}i", index, 34)
        starts = struct.unpack_from(f"<{bounds}q", index, 34 + 12 * count)
        cuts = [sum(lengths[:start]) for start in starts]
        assert cuts[0] == 0
        assert cuts[-1] == len(ids)
        return [ids[a:b] for a, b in itertools.pairwise(cuts)], ids


class Tar:
    """A tar that was changed before the folder was adopted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tar = (make_tars(folder / "made", [4]) / "t0000.tar").read_bytes()[: 512 * 20]

    def run(self, rng: random.Random) -> bool:
        data, folder = mutated(self._tar, rng), self._folder / "case"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "tars").mkdir(parents=True)
        (folder / "a.tar").write_bytes(data)
        try:
            with limits():
                adopt(str(folder))
                found = rows_of(folder)
        except StokerError:
            return True
        assert found == self._as_said(data)
        return False

    def _as_said(self, data: bytes):
        samples: list[dict] = []
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                base = member.name.rpartition("/")[2]
                stem, _, suffix = base.partition(".")
                if member.isfile() and stem and suffix:
                    key = member.name[: len(member.name) - len(suffix) - 1]
                    if not samples or samples[-1]["__key__"] != key:
                        samples.append({"__key__": key})
                    samples[-1][suffix] = archive.extractfile(member).read()
        return samples


class SideIndex:
    """The index of a tar, changed and then digested: the tar is as it was, and so must its samples be."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = make_tars(folder / "made", [5])
        (self._made / "tars").mkdir()
        self._index = (self._made / "t0000.index.npz").read_bytes()
        self._samples = rows_of(self._made)

    def run(self, rng: random.Random) -> bool:
        index = self._edited(rng) if rng.random() < 0.6 else mutated(self._index, rng)
        folder = self._folder / "case"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "tars").mkdir(parents=True)
        files = {".tar": (self._made / "t0000.tar").read_bytes(), ".index.npz": index}
        write_dataset(folder, [write_files(folder, "t0000", files, 5, 0)], format="webdataset")
        try:
            with limits():
                found = rows_of(folder)
        except StokerError:
            return True
        assert found == self._samples
        return False

    def _edited(self, rng: random.Random) -> bytes:
        """A number in one of its arrays, changed: the file stays whole."""
        arrays = dict(np.load(io.BytesIO(self._index)))
        name = rng.choice(("starts", "suffix", "offset", "size", "keys", "suffixes"))
        array = arrays[name] = arrays[name].copy()
        row = rng.randrange(len(array))
        if array.dtype.kind == "S":
            array[row] = array[row - 1] if rng.random() < 0.5 else b"other"
        else:
            changes = (1, -1, 512, -512, 1024, 2**40, -(2**40), 3)
            array[row] = np.array(int(array[row]) + rng.choice(changes)).astype(array.dtype)
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        return buffer.getvalue()


class Manifested:
    """A manifest that was changed; the shards are as they were, and so must the samples be."""

    def __init__(self, folder: Path) -> None:
        self._made = [
            make_tokens(folder / "tokens", [[50, 3, 40], [9, 60]]),
            make_tars(folder / "set", [3, 2]),
        ]
        (self._made[1] / "tars").mkdir()
        self._texts = [(made / NAME).read_bytes() for made in self._made]
        self._rows = [self._read(number) for number in range(2)]

    def _read(self, number: int):
        if number:
            return rows_of(self._made[1])
        documents = rows_of(self._made[0], seq_len=100, packing="pad", labels="")
        return documents, rows_of(self._made[0], seq_len=8)

    def run(self, rng: random.Random) -> bool:
        number = rng.randrange(2)
        if rng.random() < 0.7:
            text = json.dumps(hostile_json(json.loads(self._texts[number]), rng)).encode()
        else:
            text = mutated(self._texts[number], rng)
        (self._made[number] / NAME).write_bytes(text)
        try:
            with limits():
                found = self._read(number)
        except StokerError:
            return True
        assert found == self._rows[number]
        return False


class State:
    """A saved position that was changed: it must lead on as the one that was saved."""

    def __init__(self, folder: Path) -> None:
        self._made = make_tokens(folder / "made", [[200, 30, 90]])
        with self._loader() as loader:
            batches = iter(loader)
            for _ in range(3):
                next(batches)
            self._state = json.loads(json.dumps(loader.state_dict()))
            self._rest = [batch["input_ids"].tolist() for batch in batches]

    def _loader(self) -> Loader:
        return Loader(self._made, batch_size=2, seq_len=8, output="numpy", workers="inline", chunk_bytes=256)

    def run(self, rng: random.Random) -> bool:
        state = hostile_json(self._state, rng)
        with self._loader() as loader:
            try:
                with limits():
                    loader.load_state_dict(state)
                    rest = [batch["input_ids"].tolist() for batch in loader]
            except StokerError:
                return True
        assert rest == self._rest, state
        return False


KINDS = {"idx": Idx, "tar": Tar, "side index": SideIndex, "manifest": Manifested, "state": State}


def fuzz(kind: str, folder: Path, *, cases: int, seed: int) -> int:
    """How many of so many changed files were refused; the others gave the right samples, or this raises."""
    subject, refused = KINDS[kind](folder), 0
    for number in range(cases):
        try:
            refused += subject.run(random.Random(f"{seed} {kind} {number}"))
        except BaseException as error:
            error.add_note(f"{kind}, seed {seed}, case {number}")
            raise
    return refused
