"""Unit records: written as JSON beside the cache, and read as what anybody may have written. Pure.

A record is believed as far as it could be ours: its names lie below the cache's folder and outside of the
books, its sizes are sizes, and its key is the one that such files have. Whether the files are there, and
whose they are, is for the shelf to see.
"""

from __future__ import annotations

import json
from typing import Any

from stoker.redact import redact_url
from stoker.stage.disk.grounds import parts_below
from stoker.stage.origins.origin import Collection, RemoteFile, can_be_a_path
from stoker.stage.plan import BUNDLE_FILES, Unit, key_of

MOST_BYTES = 16 << 20  # of a record: a thousand files with paths of 4 KiB, as JSON may write them
_MOST_FILE_BYTES = 1 << 62
_TEXT = ("name", "url", "version", "digest")


def record_bytes(unit: Unit) -> bytes:
    """A unit as JSON, on one line. What a URL has for the server alone is not for those who read here."""
    files = [
        {
            "name": file.name,
            "url": redact_url(file.url),
            "bytes": file.bytes,
            "version": file.version,
            "digest": file.digest,
        }
        for file in unit.files
    ]
    return json.dumps({"folder": unit.folder, "files": files}).encode()


def read_record(key: str, data: bytes) -> Unit:
    """The unit of a record that lies under this key; a ValueError if it could not be one of ours."""
    plain = json.loads(data)
    if not isinstance(plain, dict) or not isinstance(plain.get("files"), list):
        raise ValueError("a record is an object with files")
    folder, files = plain.get("folder"), plain["files"]
    if not isinstance(folder, str) or not 0 < len(files) <= BUNDLE_FILES:
        raise ValueError("a record names a folder and some files")
    parts_below(folder)
    unit = Unit(key=key, folder=folder, files=tuple(map(_file, files)))
    if key != key_of(folder, [file.name for file in unit.files]):
        raise ValueError(f"these files would not lie under the key {key}")
    Collection(url="", kind="folder", files=unit.files)  # refuses names that cannot lie side by side
    return unit


def total_bytes(line: bytes) -> int:
    """What the files of a part's map will take, as its first line says."""
    plain = json.loads(line)
    if not isinstance(plain, dict) or not isinstance(plain.get("files"), list):
        raise ValueError("a map names its files")
    return sum(_file(one).bytes for one in plain["files"])


def _file(plain: Any) -> RemoteFile:  # whatever JSON holds
    if not isinstance(plain, dict) or set(plain) != {*_TEXT, "bytes"}:
        raise ValueError("a file has a name, a URL, a size, a version and a digest")
    size = plain["bytes"]
    if type(size) is not int or not 0 <= size <= _MOST_FILE_BYTES:
        raise ValueError(f"{size!r} is no size")
    if not all(isinstance(plain[name], str) for name in _TEXT) or not can_be_a_path(plain["name"]):
        raise ValueError(f"{plain['name']!r} is no file's name")
    return RemoteFile(**plain)
