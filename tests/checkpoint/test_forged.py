"""Checkpoints intact in every byte and wrong in what they say: a folder may be shared with others."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from stoker.checkpoint.saved.layout import MANIFEST, parse_manifest, parse_part
from stoker.checkpoint.saved.survey import verify_copies
from stoker.checkpoint.saved.tiers import Tiers
from stoker.cli import main
from stoker.errors import BadCheckpointError

State = dict[str, torch.Tensor]


def made() -> State:
    return {"w": torch.arange(3000.0), "v": torch.ones(7)}


@pytest.fixture
def run(open_checkpointer: Any, tmp_path: Path) -> Path:
    """A run with a good checkpoint at step 1 and one at step 2, which tests forge."""
    with open_checkpointer() as saver:
        for step in (1, 2):
            saver.save(step, state=made(), note="good")
    return tmp_path / "run"


def newest(run: Path) -> Path:
    return sorted(path for path in run.iterdir() if path.name[0] != ".")[-1]


def forge(
    folder: Path,
    change: Callable[[Any], Any] = lambda part: None,
    *,
    manifest: Callable[[Any], Any] = lambda plain: None,
) -> None:
    """Change what a checkpoint says of itself, with digests that are right."""
    described, top = folder / "part-00000.json", folder / MANIFEST
    part, plain = json.loads(described.read_bytes()), json.loads(top.read_bytes())["manifest"]
    part = change(part) or part
    text = json.dumps(part).encode()
    described.write_bytes(text)
    plain["parts"][0][1:] = [len(text), xxhash.xxh3_64_hexdigest(text)]
    manifest(plain)
    digest = xxhash.xxh3_64_hexdigest(json.dumps(plain, separators=(",", ":")).encode())
    top.write_bytes(json.dumps({"manifest": plain, "xxh3": digest}).encode())


def piece(number: int, **values: Any) -> Callable[[Any], None]:
    places = {"path": 0, "dtype": 1, "shape": 2, "offsets": 3, "sizes": 4, "at": 5}

    def change(part: Any) -> None:
        for name, value in values.items():
            part["pieces"][number][places[name]] = value

    return change


def fields(**values: Any) -> Callable[[Any], None]:
    return lambda part: part.update(values)


LIES = {
    "a tensor that ends behind its file": piece(0, at=64 * 100),
    "a tensor that begins before its file": piece(0, at=-4096),
    "a tensor behind its file": piece(0, at=1 << 40),
    "a tensor of which a half is missing": piece(0, sizes=[1500]),
    "a tensor whose piece lies outside of it": piece(0, offsets=[10]),
    "a tensor of fewer axes than its piece": piece(0, sizes=[3000, 1]),
    "a tensor of a negative size": piece(0, shape=[-3000], sizes=[-3000]),
    "sizes that are no numbers": piece(0, shape=["a"], sizes=["a"]),
    "a size that is half a number": piece(0, shape=[3000.5], sizes=[3000.5]),
    "a dtype that is none": piece(0, dtype="load"),
    "a name that is none": piece(0, path=[]),
    "a name of numbers": piece(0, path=[3, 4]),
    "pieces that are none": fields(pieces=[1, 2]),
    "no pieces at all": fields(pieces=None),
    "another rank": fields(rank=1),
    "another save": fields(save="00000000"),
    "chunks of no size": fields(chunk_bytes=0),
    "chunks of a negative size": fields(chunk_bytes=-4096),
    "chunks larger than memory": fields(chunk_bytes=1 << 60),
    "fewer chunks than bytes": fields(chunks=["0" * 16]),
    "a digest that is none": fields(chunks=["x"]),
    "more bytes than the file has": fields(bytes=1 << 40),
    "values that are none": fields(values=[1]),
    "no description": lambda part: [1],
}


VALUES = {
    "a value of a kind that is not known": fields(values=[[["note"], {"~": "code", "v": "x"}]]),
    "an array of objects": fields(
        values=[[["note"], {"~": "array", "dtype": "|O", "shape": [1], "v": "AAAAAAAAAAA="}]]
    ),
    "a dtype that is a function": fields(values=[[["note"], {"~": "dtype", "v": "load"}]]),
}


@pytest.mark.parametrize("why", [*LIES, *VALUES])
def test_what_cannot_be_is_skipped_and_the_older_one_taken(
    why: str, run: Path, open_checkpointer: Any
) -> None:
    forge(newest(run), {**LIES, **VALUES}[why])
    state = {name: torch.full_like(one, -1) for name, one in made().items()}
    with open_checkpointer() as saver, pytest.warns(RuntimeWarning, match="skipped: 000002-step"):
        restored = saver.restore(state=state)
    assert restored.step == 1
    assert all(torch.equal(state[name], one) for name, one in made().items())


@pytest.mark.parametrize("why", LIES)
def test_what_cannot_be_is_not_verified(why: str, run: Path) -> None:
    forge(newest(run), LIES[why])
    assert verify_copies(Tiers(root=run), newest(run).name)["local"]


MANIFESTS = {
    "a step that is not in its name": lambda plain: plain.update(step=7),
    "a step that is no number": lambda plain: plain.update(step="2"),
    "a save that is not in its name": lambda plain: plain.update(save="00000000"),
    "a time that is none": lambda plain: plain.update(saved_at="noon"),
    "a metric that is none": lambda plain: plain.update(marks={"metric": "best"}),
    "a pin that is none": lambda plain: plain.update(marks={"pin": ["a"]}),
    "a part of a negative size": lambda plain: plain["parts"][0].__setitem__(0, -1),
    "no parts": lambda plain: plain.update(parts=[]),
}


@pytest.mark.parametrize("why", MANIFESTS)
def test_a_manifest_that_cannot_be_is_refused(why: str, run: Path) -> None:
    folder = newest(run)
    forge(folder, manifest=MANIFESTS[why])
    with pytest.raises(BadCheckpointError, match="cannot be used"):
        parse_manifest((folder / MANIFEST).read_bytes(), name=folder.name)


def test_a_description_that_is_nested_without_end_is_refused(run: Path) -> None:
    folder = newest(run)
    text = b"[" * 100_000 + b"]" * 100_000
    forge(folder)
    plain = json.loads((folder / MANIFEST).read_bytes())["manifest"]
    plain["parts"][0][1:] = [len(text), xxhash.xxh3_64_hexdigest(text)]
    digest = xxhash.xxh3_64_hexdigest(json.dumps(plain, separators=(",", ":")).encode())
    manifest = parse_manifest(json.dumps({"manifest": plain, "xxh3": digest}).encode(), name=folder.name)
    with pytest.raises(BadCheckpointError):
        parse_part(text, manifest=manifest, rank=0)


# --- what lies beside them ----------------------------------------------------------------------------


STRAYS: dict[str, Callable[[Path], Any]] = {
    "a maker of no form": lambda run: (run / ".making-x").mkdir(),
    "a maker without a number": lambda run: (run / ".making-a-b-c-d").mkdir(),
    "an owner that is a list": lambda run: sign(run, "[]"),
    "an owner whose process is no number": lambda run: sign(run, '{"pid": "x", "host": "y"}'),
    "an owner that is nested without end": lambda run: sign(run, "[" * 100_000),
    "an owner that nobody ever writes": lambda run: pipe(run / ".saving-000009-x", "owner.json"),
    "a checkpoint whose manifest nobody writes": lambda run: pipe(run / FOREIGN, MANIFEST),
    "a deletion that leads elsewhere": lambda run: (run / ".trash-a").symlink_to(run.parent / "elsewhere"),
    "a save that leads elsewhere": lambda run: (run / ".saving-a").symlink_to(run.parent / "elsewhere"),
    "a checkpoint that leads elsewhere": lambda run: (run / FOREIGN).symlink_to(run.parent / "elsewhere"),
    "a checkpoint that leads to itself": lambda run: (run / FOREIGN).symlink_to(run / FOREIGN),
}
FOREIGN = "000003-step-000000003-00000000"


def sign(run: Path, text: str) -> None:
    (run / ".saving-000009-x").mkdir()
    (run / ".saving-000009-x" / "owner.json").write_text(text)


def pipe(folder: Path, name: str) -> None:
    folder.mkdir()
    os.mkfifo(folder / name)


@pytest.mark.parametrize("what", STRAYS)
def test_what_others_leave_in_the_folder_stops_nothing_and_nothing_outside_is_touched(
    what: str, run: Path, open_checkpointer: Any
) -> None:
    elsewhere = run.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("mine")
    STRAYS[what](run)
    for verb, *options in (("ls",), ("verify",), ("gc", "--keep", "1")):
        with pytest.raises(SystemExit) as ended:
            main(["checkpoint", verb, str(run), *options])
        assert ended.value.code in (0, 1)
    with open_checkpointer(keep=1) as saver:
        saver.save(3, state=made(), note="good")
        saver.wait()
    assert (elsewhere / "precious").read_text() == "mine"
