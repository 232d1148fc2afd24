"""Output files: scripts filled in, and a deployment's folder written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path

from stoker.errors import UsageError
from stoker.storage import new_file

_SCRIPTS = (".sh", ".sbatch")


def filled(name: str, **values: object) -> str:
    """A file of `scripts/`, in which @name@ stands for a value: shell and Containerfile as they are, without
    the braces of their own doubled. In one pass, so that no value is taken for a name."""
    text = (files("stoker.deploy") / "scripts" / name).read_text("utf-8")
    return re.sub(r"@(\w+)@", lambda found: str(values[found[1]]), text)


def write_files(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write every file, each whole or not at all; a folder that holds other things is refused."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", hint="give --out a folder of its own")
    if strange := next(_strange(folder, texts), None):
        raise UsageError(
            f"{folder} holds {strange}, which is none of this deployment's files",
            hint="give --out a folder of its own, or remove what is there",
        )
    written = []
    for name, text in sorted(texts.items()):
        path = folder / name
        with new_file(path) as file:
            file.write(text.encode())
        path.chmod(0o755 if path.suffix in _SCRIPTS else 0o644)
        written.append(path)
    return written


def _strange(folder: Path, texts: Mapping[str, str]) -> Iterator[str]:
    """Logs are none: Slurm writes a job's where it was submitted, which is here."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in texts and path.suffix != ".log":
            yield name
