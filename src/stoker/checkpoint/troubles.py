"""What went wrong in the background, and what a loop is to hear of it: a checkpoint that was not saved, one
that was not drained, and older ones that were not deleted are three things, with a policy each."""

from __future__ import annotations

import warnings

from stoker.checkpoint.options import CheckpointOptions
from stoker.errors import CheckpointError, StokerError

NOT = {
    "saved": "a checkpoint was not saved",
    "good": "a checkpoint was saved and is not good",
    "drained": "a checkpoint is saved here, and not in the remote tier",
    "tidied": "checkpoints are saved, and older ones were not deleted",
}


class Troubles:
    """Collected by the loop's thread, and raised or warned of at its next step."""

    def __init__(self, options: CheckpointOptions) -> None:
        self._raises = {
            "saved": options.on_failure == "raise",
            "good": options.on_failure == "raise",
            "drained": options.on_drain_failure == "raise",
            "tidied": options.on_tidy_failure == "raise",
        }
        self._known: list[tuple[str, CheckpointError]] = []
        self._said: set[str] = set()

    def add(self, what: str, cause: BaseException) -> None:
        self._known.append((what, failed(what, cause)))

    def surface(self) -> None:
        """Warn of what may be warned of, and raise the newest of the rest. Deletions fail in the same words
        again and again: that is said once."""
        known, self._known = self._known, []
        raised: CheckpointError | None = None
        for what, error in known:
            if self._raises[what]:
                raised = error
            elif what != "tidied" or error.message not in self._said:
                self._said.add(error.message)
                warnings.warn(str(error), RuntimeWarning, stacklevel=4)
        if raised:
            raise raised


def failed(what: str, cause: BaseException) -> CheckpointError:
    """What a loop is told of a failure in the background."""
    reason = cause.message if isinstance(cause, StokerError) else f"{type(cause).__name__}: {cause}"
    hint = cause.hint if isinstance(cause, StokerError) else "see the cause above"
    error = CheckpointError(f"{NOT[what]}: {reason}", hint=hint)
    error.__cause__ = cause
    return error
