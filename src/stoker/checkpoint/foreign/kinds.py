"""Whose checkpoint is it: known by the names of its files. Pure but for listing them; no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stoker.checkpoint.saved.layout import MANIFEST, sequence_of
from stoker.errors import UsageError

OWN = "one checkpoint of stoker"
RUN = "checkpoints of stoker"
DCP = "a checkpoint of torch.distributed.checkpoint (DCP)"
MEGATRON = "a torch_dist checkpoint of Megatron"
MODEL = "a Hugging Face model"
SAFETENSORS = "a safetensors file"
TORCH = "a torch.save file"
LIGHTNING = "a Lightning checkpoint"
DEEPSPEED = "a DeepSpeed checkpoint"

_SUFFIXES = {".safetensors": SAFETENSORS, ".ckpt": LIGHTNING, ".pt": TORCH, ".pth": TORCH}
_FILES = frozenset(_SUFFIXES.values())
_MODEL_FILES = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors")
_STEP = re.compile(r"(?:^|[-_])(?:step|checkpoint|iter|global_step)[-_=]?0*(\d+)", re.IGNORECASE)
_DEPTH = 2  # of folders that are listed: a run of others holds its checkpoints one below


@dataclass(frozen=True, kw_only=True, slots=True)
class Stranger:
    """What lies in a folder: a kind of checkpoint, and where in there (nothing: it is the folder itself)."""

    kind: str
    inside: str = ""


def recognise(names: Collection[str]) -> Stranger | None:
    """What these files are, by their paths inside a folder. A folder of others' checkpoints is known by names
    with steps in them (`checkpoint-500`, `step-500`, `iter_0000500`): of several it is the last."""
    by_folder: dict[str, set[str]] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        by_folder.setdefault(folder, set()).add(file)
    if kind := kind_of(by_folder.pop("", set())):
        return Stranger(kind=kind)
    if any(sequence_of(folder) is not None and MANIFEST in by_folder[folder] for folder in by_folder):
        return Stranger(kind=RUN)
    numbered = [folder for folder in by_folder if _STEP.search(folder) and sequence_of(folder) is None]
    for folder in sorted(numbered, key=lambda one: (number_in(one), one), reverse=True):
        if (kind := kind_of(by_folder[folder])) and kind not in _FILES:
            return Stranger(kind=kind, inside=folder)
    return None


def kind_of(files: Collection[str]) -> str:
    """What a folder with these files is; nothing if it is no checkpoint that we know."""
    if MANIFEST in files and any(name.startswith("part-") for name in files):
        return OWN
    if ".metadata" in files:
        return MEGATRON if {"metadata.json", "common.pt"} & set(files) else DCP
    if any(name.endswith("model_states.pt") for name in files):
        return DEEPSPEED
    if any(name.endswith((*_MODEL_FILES, ".safetensors.index.json", ".bin.index.json")) for name in files):
        return MODEL
    return next((kind_of_file(name) for name in sorted(files) if kind_of_file(name)), "")


def kind_of_file(name: str) -> str:
    return _SUFFIXES.get(PurePosixPath(name).suffix, "")


def number_in(name: str) -> int:
    """The step that a name ends with, as frameworks write it; 0 if there is none."""
    found = _STEP.findall(PurePosixPath(name).name)
    return int(found[-1]) if found else 0


def names_in(folder: Path) -> list[str]:
    """The files of a folder and of those right below it, as paths inside of it."""
    found: list[str] = []
    with suppress(OSError):
        _list(folder, "", _DEPTH, found)
    return found


def _list(folder: Path, prefix: str, depth: int, found: list[str]) -> None:
    for path in sorted(folder.iterdir()):
        if path.is_file():
            found.append(f"{prefix}{path.name}")
        elif depth > 1 and path.is_dir() and not path.name.startswith("."):  # what killed saves left
            with suppress(OSError):
                _list(path, f"{prefix}{path.name}/", depth - 1, found)


def refuse_strangers(root: Path, far: Iterable[str] = (), *, url: str = "") -> None:
    """Before a fresh start: raise if a folder, or the remote tier with these files, holds a checkpoint that
    is not one of this run; with the call that reads it."""
    if root.is_file():
        raise _not_a_run(str(root), Stranger(kind=kind_of_file(root.name) or "a file"))
    if stranger := recognise(names_in(root)):
        raise _not_a_run(str(root), stranger)
    if stranger := recognise(list(far)):
        raise _not_a_run(url, stranger)


def _not_a_run(where: str, stranger: Stranger) -> UsageError:
    """Nothing of it was touched, and the answer is the call that would have been right."""
    path = f"{where.rstrip('/')}/{stranger.inside}".rstrip("/")
    message = f"{path} holds {stranger.kind}, and {where} no checkpoint of this run"
    if stranger.kind == OWN:
        parent, _, name = path.rpartition("/")
        hint = f"make the Checkpointer on {parent}; restore(name={name!r}) takes this very one"
    elif stranger.kind == DEEPSPEED:
        hint = "turn it into one file first (its zero_to_fp32.py), then restore(source=FILE, ...)"
    elif "://" in where:
        hint = f"`stoker stage {path}` brings it here; then restore(source=FOLDER, ...)"
    else:
        hint = (
            f"restore(source={path!r}, ...) on a folder of its own begins with it; "
            f"`stoker checkpoint import {path} --out FOLDER` makes it one of stoker's"
        )
    return UsageError(message, hint=hint)
