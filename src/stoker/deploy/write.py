"""Writes a deployment's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stoker.errors import UsageError
from stoker.storage import new_file

_SCRIPTS = (".sh", ".sbatch")


def write_files(folder: Path, files: Mapping[str, str]) -> list[Path]:
    """Write every file, each whole or not at all; a folder that holds other things is refused."""
    strange = _strange(folder, files)
    if strange:
        raise UsageError(
            f"{folder} holds {strange[0]}, which is none of this deployment's files",
            hint="give --out a folder of its own, or remove what is there",
        )
    written = []
    for name, text in sorted(files.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as file:
            file.write(text.encode())
        path.chmod(0o755 if path.suffix in _SCRIPTS else 0o644)
        written.append(path)
    return written


def _strange(folder: Path, files: Mapping[str, str]) -> list[str]:
    if not folder.exists():
        return []
    present = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    return [name for name in present if name not in files]
