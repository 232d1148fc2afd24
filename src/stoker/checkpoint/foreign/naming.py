"""What others call their tensors, as a Checkpointer would. Pure.

A path is the name of an object and then the keys inside of it: ("model", "layers.0.weight").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stoker.checkpoint.saved.layout import Path
from stoker.errors import UsageError


def under_model(path: Path) -> Path:
    """What lies at the top without a name above it is the model's: a state_dict that was saved as it is."""
    return ("model", *path) if len(path) == 1 else path


def renaming(rename: Mapping[str, str]) -> Callable[[Path], Path]:
    """Paths whose names begin with a word of the table begin with its new one: "app.model." → "model."."""
    for old, new in rename.items():
        if not old or not new:
            raise UsageError(
                f"rename {old!r} to {new!r} cannot work", hint='give beginnings: {"app.model.": "model."}'
            )

    def renamed(path: Path) -> Path:
        for old, new in rename.items():
            rest = _without(path, old)
            if rest is not None:
                return _with(new, rest)
        return path

    return renamed


def _without(path: Path, words: str) -> Path | None:
    """The path behind these words; nothing if it does not begin with them. They may end inside of a step."""
    steps = list(path)
    while words and steps:
        text = str(steps[0])
        if words == text or words.startswith(f"{text}."):
            words = words[len(text) + 1 :]
            steps.pop(0)
        elif text.startswith(words):
            steps[0] = text.removeprefix(words)
            words = ""
        else:
            return None
    return None if words else tuple(steps)


def _with(words: str, path: Path) -> Path:
    """A path below these words: the first names the object, what follows belongs to the first key in it."""
    first, _, tail = words.partition(".")
    if not tail:
        return (first, *path)
    return (first, f"{tail}{path[0]}", *path[1:]) if path else (first, tail.rstrip("."))
