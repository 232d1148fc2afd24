"""Every error a user can meet, and what to do next.

    StokerError
    ├── UsageError            the call or its options cannot work (exit code 2)
    ├── MissingPackageError   an optional package is not installed
    ├── BadInputError         raw data that cannot be read: which file, where, why
    ├── BadManifestError      a manifest that is absent, torn or of another version
    ├── BadShardError         a shard that is not what its manifest says
    ├── BadCheckpointError    a checkpoint that is torn, mixed, foreign or damaged
    ├── CheckpointError       a save that failed; the checkpoints before it are untouched
    ├── StorageError          a file or object that cannot be reached, read or written
    │   ├── ChangedError          a file or object that became another while it was read
    │   ├── DeniedError           a server that does not let us read, or no longer
    │   └── CacheFullError        what is to be staged does not fit, and what holds the space
    ├── TokenizerError        a tokenizer that cannot be found, loaded or used
    │   └── EngineMismatchError   a fast engine whose ids differ from the reference
    ├── TaskError             tasks of a plan that failed, with their logs
    ├── LeaseLostError        a lease that another process has taken over
    └── FirstRankError        the process that worked for all ranks failed

A message says what happened with its values; `hint` says what to do about it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any


class StokerError(Exception):
    """What stoker raises when something a user can mend went wrong."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process borders; the default reduce would lose the keyword argument.
        return _rebuild, (type(self), self.message, self.hint)


class UsageError(StokerError):
    """The call or its options cannot work."""


class MissingPackageError(StokerError):
    """An optional package is not installed."""


class BadInputError(StokerError):
    """Raw data that cannot be read."""


class BadManifestError(StokerError):
    """A manifest that is absent, torn or of another version."""


class BadShardError(StokerError):
    """A shard that is not what its manifest says."""


class BadCheckpointError(StokerError):
    """A checkpoint that is torn, mixed, foreign or damaged."""


class CheckpointError(StokerError):
    """A save that failed; the checkpoints before it are untouched."""


class StorageError(StokerError):
    """A file or object that cannot be reached, read or written."""


class ChangedError(StorageError):
    """A file or object that became another while it was read."""


class DeniedError(StorageError):
    """A server that does not let us read, or no longer: a signature may have run out."""


class CacheFullError(StorageError):
    """What is to be staged does not fit."""


class TokenizerError(StokerError):
    """A tokenizer that cannot be found, loaded or used."""


class EngineMismatchError(TokenizerError):
    """A fast engine whose ids differ from the reference."""


class TaskError(StokerError):
    """Tasks of a plan that failed."""


class LeaseLostError(StokerError):
    """A lease that another process has taken over, or that could not be renewed."""


class FirstRankError(StokerError):
    """The process that worked for all ranks failed: which, and with what."""


def check_options(
    given: Iterable[str], known: Collection[str], *, of: str, elsewhere: Mapping[str, str] | None = None
) -> None:
    """Refuse options that nobody knows: `elsewhere` says what replaces the names that people bring along."""
    for name in sorted(set(given) - set(known)):
        near = get_close_matches(name, known, n=1)
        hint = (elsewhere or {}).get(name) or (f"did you mean {near[0]}?" if near else "")
        raise UsageError(f"{of} has no option {name!r}", hint=hint or f"it has {', '.join(known)}")


def require(package: str, *, extra: str) -> Any:
    """Import an optional package, or say which pip line brings it."""
    try:
        return import_module(package)
    except ImportError as error:
        if error.name and error.name.partition(".")[0] != package.partition(".")[0]:
            raise
        raise MissingPackageError(
            f"{package} is not installed", hint=f"pip install 'stoker[{extra}]'"
        ) from error


def _rebuild(kind: type[StokerError], message: str, hint: str) -> StokerError:
    return kind(message, hint=hint)
