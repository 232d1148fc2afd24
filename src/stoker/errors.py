"""Exceptions: every error a user can meet, and what to do next.

    StokerError
    ├── UsageError            the call or its options cannot work (exit code 2)
    ├── MissingPackageError   an optional package is not installed
    ├── BadInputError         raw data that cannot be read: which file, where, why
    │   └── UnreadableError       a named file that is not there, or not what it should be (exit code 2)
    ├── BadManifestError      a manifest that is torn or of another version
    │   └── NoManifestError       a folder or prefix that has none (exit code 2)
    ├── BadShardError         a shard that is not what its manifest says
    ├── BadCheckpointError    a checkpoint that is torn, mixed, foreign or damaged
    ├── CheckpointError       a save that failed; the checkpoints before it are untouched
    ├── StorageError          a file or object that cannot be reached, read or written
    │   ├── AbsentError           a name at which there is nothing (exit code 2)
    │   ├── ChangedError          a file or object that became another while it was read
    │   ├── DeniedError           a server that does not let us read, or no longer
    │   └── CacheFullError        what is to be staged does not fit, and what holds the space
    ├── TokenizerError        a tokenizer that cannot be found, loaded or used (exit code 2)
    │   └── EngineMismatchError   a fast engine whose ids differ from the reference
    ├── TaskError             tasks of a plan that failed, with their logs
    ├── LeaseLostError        a lease that another process has taken over
    └── FirstRankError        the process that worked for all ranks failed

A message says what happened with its values; `hint` says what to do about it. Both are redacted (`redact`).
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from stoker.redact import redact_text


class StokerError(Exception):
    """What stoker raises when something a user can mend went wrong."""

    exit_code = 1  # of the command that fails with it

    def __init__(self, message: str, *, hint: str = "") -> None:
        # here, since an error goes anywhere: to a terminal, a log, a report, another rank
        self.message, self.hint = redact_text(message), redact_text(hint)
        super().__init__(self.message, self.hint)

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process borders; the default reduce would lose the keyword argument.
        return _rebuild, (type(self), self.message, self.hint)


class UsageError(StokerError):
    """The call or its options cannot work."""

    exit_code = 2


class MissingPackageError(StokerError, ImportError):
    """An optional package is not installed."""


class BadInputError(StokerError):
    """Raw data that cannot be read."""


class UnreadableError(BadInputError):
    """A file that was named and is not there, or is not what it should be: a recording, a plan, a machine."""

    exit_code = 2


class BadManifestError(StokerError):
    """A manifest that is torn or of another version."""


class NoManifestError(BadManifestError):
    """A folder or prefix without a manifest: no dataset, or not yet."""

    exit_code = 2


class BadShardError(StokerError):
    """A shard that is not what its manifest says."""


class BadCheckpointError(StokerError):
    """A checkpoint that is torn, mixed, foreign or damaged."""


class CheckpointError(StokerError):
    """A save that failed; the checkpoints before it are untouched."""


class StorageError(StokerError):
    """A file or object that cannot be reached, read or written."""


class AbsentError(StorageError):
    """A name at which there is nothing: no file, no prefix."""

    exit_code = 2


class ChangedError(StorageError):
    """A file or object that became another while it was read."""


class DeniedError(StorageError):
    """A server that does not let us read, or no longer: a signature may have run out."""


class CacheFullError(StorageError):
    """What is to be staged does not fit."""


class TokenizerError(StokerError):
    """A tokenizer that cannot be found, loaded or used."""

    exit_code = 2


class EngineMismatchError(TokenizerError):
    """A fast engine whose ids differ from the reference."""

    exit_code = 1


class TaskError(StokerError):
    """Tasks of a plan that failed."""


class LeaseLostError(StokerError):
    """A lease that another process has taken over, or that could not be renewed."""


class FirstRankError(StokerError):
    """The process that worked for all ranks failed: which, and with what."""


def require(package: str, *, extra: str = "", otherwise: str = "") -> Any:
    """Import an optional package, or say which pip line brings it, and all that `extra` lacks with it."""
    try:
        return import_module(package)
    except ImportError as error:
        top = package.partition(".")[0]
        if error.name and error.name.partition(".")[0] != top:
            raise
        line = pip_line(_DISTRIBUTIONS.get(top, top), extra=extra)
        hint = f"{line}, or {otherwise}" if otherwise else line
        raise MissingPackageError(f"{package} is not installed", hint=hint) from error


def explained(error: ImportError) -> ImportError:
    """An import that failed, with its pip line where the package is one that we have as an option."""
    distribution = _DISTRIBUTIONS.get(error.name or "", error.name or "")
    extras = [extra for one, extra in _optional() if _name(one) == _name(distribution)]
    if not extras:
        return error
    extra = next((one for one in extras if one not in _OF_DEVELOPERS), "")
    return MissingPackageError(f"{error.name} is not installed", hint=pip_line(distribution, extra=extra))


def pip_line(package: str, *, extra: str) -> str:
    """What installs a package, and the others of an extra that are not here.

    It never names our own extras: what a public index has under our name is not ours."""
    missing = [one for one in _requirements(extra) if _name(one) == _name(package) or not _is_here(one)]
    if all(_name(one) != _name(package) for one in missing):
        missing.insert(0, package)
    return " ".join(["pip install", *(one if one.isidentifier() else f"'{one}'" for one in missing)])


# What is imported under another name than it is installed by.
_DISTRIBUTIONS = {
    "PIL": "pillow",
    "fasttext": "fasttext-predict",
    "backports": "backports.zstd",
    "streaming": "mosaicml-streaming",
    "cuda": "cuda-bindings",
    "pynvml": "nvidia-ml-py",
    "yaml": "pyyaml",
}
_OF_DEVELOPERS = ("bench", "dev")  # extras with much that no user of one of their packages needs
_EXTRA = re.compile(r"""(?: and |; *)extra == ["']([\w-]+)["']$""")


def _requirements(extra: str) -> list[str]:
    """The packages of one of our extras, as pyproject.toml has them."""
    return [one for one, of in _optional() if of == extra]


def _optional() -> list[tuple[str, str]]:
    """All that our extras bring, as pyproject.toml has it, and the extra that does."""
    from importlib import metadata  # slow to import, and only needed when something is missing

    try:
        declared = metadata.requires("stoker") or []
    except metadata.PackageNotFoundError:  # run from its source
        declared = []
    return [(_EXTRA.sub("", one), found[1]) for one in declared if (found := _EXTRA.search(one))]


def _is_here(requirement: str) -> bool:
    from importlib import metadata

    try:
        return bool(metadata.version(_name(requirement)))
    except metadata.PackageNotFoundError:
        return False


def _name(requirement: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement, maxsplit=1)[0]).lower()


def _rebuild(kind: type[StokerError], message: str, hint: str) -> StokerError:
    return kind(message, hint=hint)
