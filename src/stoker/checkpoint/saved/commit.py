"""Atomic commit: a temporary folder, a part and its description from every rank, the manifest last, and one
rename that makes the checkpoint visible.

    rank 0    makes .saving-NAME, says so on the board
    every     writes part-R.bin, part-R.json; puts the description on the board
    rank 0    checks that all parts are of this save and hold every tensor whole; writes checkpoint.json;
              renames the folder; says on the board how it ended
    elsewhere the first rank of a node whose folder is not shared with rank 0 does the same there

Nothing is ever written into a folder that has its final name.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from stoker import __version__
from stoker.checkpoint.saved.cover import check_names, check_parts
from stoker.checkpoint.saved.layout import (
    MANIFEST,
    SAVING,
    Manifest,
    Marks,
    Part,
    checkpoint_name,
    part_name,
    part_record,
)
from stoker.errors import CheckpointError
from stoker.processes import boot, lives, namespaces, started
from stoker.storage import named_errors, new_file, sync_folder

OWNER = "owner.json"
MAKING = ".making-"
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """A save under way, as the board describes it."""

    name: str
    step: int
    save: str

    def folder(self, root: Path) -> Path:
        return root / f"{SAVING}{self.name}"

    def to_json(self) -> bytes:
        return json.dumps({"name": self.name, "step": self.step, "save": self.save}).encode()


def begin(root: Path, *, step: int, sequence: int) -> Saving:
    """A new temporary folder, with who made it."""
    save = secrets.token_hex(4)
    saving = Saving(name=checkpoint_name(sequence=sequence, step=step, save=save), step=step, save=save)
    _make(saving.folder(root))
    return saving


def join(root: Path, note: bytes) -> Saving:
    """The save that rank 0 began."""
    return Saving(**json.loads(note))


def leads_here(root: Path, saving: Saving) -> bool:
    """For the first rank of a node: whether it cannot see the folder that rank 0 made; then it makes one."""
    folder = saving.folder(root)
    if (folder / OWNER).exists():
        return False
    _make(folder)
    return True


def wait_for_folder(root: Path, saving: Saving, *, timeout_s: float) -> None:
    """For the other ranks of a node, which may be faster."""
    deadline = time.monotonic() + timeout_s
    while not saving.folder(root).is_dir():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"the first rank of this node has not made {saving.folder(root)} within {timeout_s:.0f} s",
                hint="its log says why",
            )
        time.sleep(_POLL_S)


def put_part(root: Path, saving: Saving, part: Part) -> bytes:
    """Write a part's description beside it."""
    if not saving.folder(root).is_dir():
        raise _removed(saving.folder(root))
    text = part.to_json()
    with new_file(saving.folder(root) / part_name(part.rank, "json")) as file:
        file.write(text)
    return text


def make_manifest(
    saving: Saving, parts: Sequence[Part], texts: Sequence[bytes], *, marks: Marks | None = None
) -> Manifest:
    """The manifest of a save, if these are its parts, and all of them; with their descriptions as they lie on
    disk."""
    check_parts(parts, save=saving.save)
    check_names(parts)
    return Manifest(
        name=saving.name,
        step=saving.step,
        save=saving.save,
        parts=tuple(map(part_record, parts, texts)),
        saved_at=time.time(),
        made_by=f"stoker {__version__}",
        marks=marks or Marks(),
    )


def commit(root: Path, saving: Saving, manifest: Manifest, texts: Sequence[bytes], *, rank: int) -> Path:
    """Make the save a checkpoint: every node has the descriptions of all parts, though its disk may hold
    only the data of its own, that of `rank` at least."""
    folder, final = saving.folder(root), root / saving.name
    if not (folder / OWNER).exists() or not (folder / part_name(rank, "bin")).exists():
        raise _removed(folder)
    for one, (text, record) in enumerate(zip(texts, manifest.parts, strict=True)):
        _check_size(folder / part_name(one, "bin"), record.bytes)
        _put_missing(folder / part_name(one, "json"), text)
    with new_file(folder / MANIFEST) as file:
        file.write(manifest.to_json())
    with named_errors("write", final):
        folder.rename(final)
        sync_folder(root)
        (final / OWNER).unlink(missing_ok=True)  # not before: a killed save must be known for its maker's
    return final


def wait_for_commit(root: Path, name: str, *, timeout_s: float) -> None:
    """Who hears of a commit may be faster than the first rank of this node, which commits here."""
    deadline = time.monotonic() + timeout_s
    while (root / f"{SAVING}{name}").exists() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _removed(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder} was removed, or a part of it, while it was being written",
        hint="keep other jobs and clean-ups away from it; the checkpoints before are as they were",
    )


def _check_size(path: Path, size: int) -> None:
    """What a rank says it wrote must be here, unless its node has a disk of its own."""
    found = path.stat().st_size if path.exists() else size
    if found != size:
        raise CheckpointError(
            f"{path.name} is {found:,} bytes here, and its rank wrote {size:,}",
            hint="the filesystem does not show all ranks the same file; use disks of their own, and remote=",
        )


def _put_missing(path: Path, text: bytes) -> None:
    if not path.exists():
        with new_file(path) as file:
            file.write(text)


def discard(root: Path, saving: Saving, *, rank: int) -> None:
    """Take away what this rank wrote of a save that failed; the last one takes the folder."""
    folder = saving.folder(root)
    for kind in ("bin", "json"):
        with suppress(OSError):
            (folder / part_name(rank, kind)).unlink()
    with suppress(OSError):
        if {path.name for path in folder.iterdir()} <= {OWNER, MANIFEST}:
            shutil.rmtree(folder)


# --- whose is it --------------------------------------------------------------------------------------


def _make(folder: Path) -> None:
    """A signed folder, all at once: until it is signed its name says who makes it."""
    making = folder.with_name(f"{MAKING}{_tag()}-{folder.name.removeprefix(SAVING)}")
    try:
        with named_errors("write", folder.parent):
            making.mkdir(parents=True)
        with new_file(making / OWNER) as file:
            file.write(json.dumps(this_owner()).encode())
        with named_errors("write", folder):
            making.rename(folder)
    except BaseException:  # a full disk: nothing of it stays
        shutil.rmtree(making, ignore_errors=True)
        raise


def _tag() -> str:
    """This process, in a name."""
    return f"{_machine()}-{os.getpid()}-{started(os.getpid()) or 0}"


def _machine() -> str:
    known = f"{socket.gethostname()} {boot()} {namespaces()}" if namespaces() else secrets.token_hex(4)
    return xxhash.xxh3_64_hexdigest(known.encode())


def maker_is_dead(name: str) -> bool | None:
    """Whether who was making a folder of this name is gone; None where that cannot be seen from here."""
    machine, pid, start, _ = name.removeprefix(MAKING).split("-", 3)
    if machine != _machine():
        return None
    return not lives(int(pid)) or started(int(pid)) != start


def this_owner() -> dict[str, Any]:
    """Who makes a temporary folder: enough to know later whether it still lives."""
    return {
        "host": socket.gethostname(),
        "boot": boot(),
        "pids": namespaces(),
        "pid": os.getpid(),
        "started": started(os.getpid()),
        "at": time.time(),
    }


def is_dead(owner: dict[str, Any]) -> bool | None:
    """Whether the maker of a folder is gone; None where that cannot be seen from here."""
    if owner.get("host") != socket.gethostname():
        return None
    if owner.get("boot") != boot():
        return True
    here = namespaces()
    if not here or owner.get("pids") != here:  # another container of this pod: its processes are not seen
        return None
    return not lives(owner["pid"]) or started(owner["pid"]) != owner["started"]
