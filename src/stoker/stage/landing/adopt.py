"""Adoption: what lies here already and has the right digest is taken, and not fetched.

The blobs of a Hugging Face cache are named by the very digests that the hub tells:
`models--org--name/blobs/SHA256`. One that has its digest becomes the snapshot's file by a hard link, so that
nothing is copied and nothing lies here twice. And of a unit that is brought again because something in it is
damaged, the files and slices that are not damaged stay.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

import xxhash

from stoker.errors import StorageError
from stoker.stage.disk.grounds import Grounds
from stoker.stage.landing.digest import is_sound
from stoker.stage.landing.maps import SLICE_BYTES, known_blocks
from stoker.stage.landing.part import Part, write_all

_SNAPSHOTS = "/snapshots/"


def adopt_blobs(part: Part, grounds: Grounds) -> int:
    """Take what is missing of a part and lies among a hub cache's blobs; how many bytes that was."""
    repository, is_hub_cache, _ = part.unit.folder.partition(_SNAPSHOTS)
    if not is_hub_cache or "/" in repository:
        return 0
    adopted = 0
    for number, file in enumerate(part.unit.files):
        blob = file.digest.partition(":")[2]
        if file.bytes and blob.isalnum() and part.missing(number):
            with suppress(OSError, StorageError), grounds.below(f"{repository}/blobs") as blobs:
                if _is_it(grounds, f"{repository}/blobs/{blob}", blob, blobs, file.bytes, file.digest):
                    part.link(number, blob, blobs)
                    adopted += file.bytes
    return adopted


def keep_sound(part: Part, grounds: Grounds) -> None:
    """Take what is right of the unit's files as they lie at home: the rest of it is to be fetched again."""
    for number, file in enumerate(part.unit.files):
        below, _, name = f"{part.unit.folder}/{file.name}".rpartition("/")
        if not part.missing(number):
            continue
        with suppress(OSError, StorageError), grounds.below(below) as folder:
            if known_blocks(part.unit, number):
                _copy_sound(part, number, name, folder)
            elif file.digest and _is_it(grounds, f"{below}/{name}", name, folder, file.bytes, file.digest):
                part.link(number, name, folder)


def _copy_sound(part: Part, number: int, name: str, folder: int) -> None:
    blocks = known_blocks(part.unit, number)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    home, mine = os.open(name, flags, dir_fd=folder), part.open(number)
    try:
        for index, slice_number in enumerate(part.slices(number)):
            size, begin = part.sizes[slice_number], index * SLICE_BYTES
            data = os.pread(home, size, begin)
            if blocks and len(data) == size and blocks.vouch_for(begin, data):
                write_all(mine, data, begin)
                part.note(slice_number, size, xxhash.xxh3_64_intdigest(data))
    finally:
        os.close(home)
        os.close(mine)


def _is_it(grounds: Grounds, path: str, name: str, blobs: int, size: int, digest: str) -> bool:
    facts = os.stat(name, dir_fd=blobs, follow_symlinks=False)
    is_plain = stat.S_ISREG(facts.st_mode) and facts.st_size == size and facts.st_uid in grounds.trusted
    return is_plain and is_sound(grounds.folder / path, digest)
