"""Write protection for trials: what lay there before `stoker tune` began is neither replaced nor deleted.

A trial is the user's program, ended after some steps: a checkpoint of step 50 must not take the place of last
week's. Python tells an audit hook of every file that is opened, renamed or removed; what torch and
safetensors write in C++ and Rust is asked about where they are called. Changes in place are not seen.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from stoker.watch.inside.knobs import Knobs

if TYPE_CHECKING:
    from stoker.watch.inside.probe import Probe

REFUSED = "refused"  # the event that says so
REFUSAL = "a trial of `stoker tune` may not overwrite what lay there before it"
VARIABLE = "STOKER_TUNE_OVERWRITE"
_SYSTEM = ("/dev/", "/proc/", "/sys/")
_PASSING = ("__pycache__", "torchinductor_")  # caches that libraries keep in the open
_AT = {
    "os.remove": (0, 1),
    "os.truncate": (0, None),
    "os.rename": (1, 3),
}  # path and folder, in the arguments


def hook_guard(probe: Probe, roots: Any, torch: Any) -> None:
    """From the import of torch on: that comes before a program saves."""
    if (guard := _guard(probe)) is None:
        return
    sys.addaudithook(guard.heard)
    torch.save = torch.serialization.save = guard.asked(torch.save)


def hook_guarded_safetensors(probe: Probe, roots: Any, module: Any) -> None:
    if guard := _guard(probe):
        for name in ("save_file", "save_model"):
            setattr(module, name, guard.asked(getattr(module, name)))


@functools.cache
def _guard(probe: Probe) -> Guard | None:
    """One a process, in a trial that was not allowed to overwrite."""
    knobs = Knobs.from_environ()
    return Guard(knobs.trial, probe) if knobs and knobs.trial and not os.environ.get(VARIABLE) else None


class Guard:
    """Refuses, and tells the run of it."""

    def __init__(self, since: float, probe: Probe) -> None:
        self._since, self._probe = since, probe

    def heard(self, event: str, args: tuple[Any, ...]) -> None:
        """Of Python: runs for every event of the interpreter, so the first comparison decides."""
        if event == "open":
            if args[2] & os.O_TRUNC:
                self.check(args[0])
        elif event in _AT:
            path, folder = _AT[event]
            self.check(args[path], folder=-1 if folder is None else args[folder])

    def asked(self, original: Any) -> Any:
        """A function whose second argument is the file that it writes."""

        @functools.wraps(original)
        def save(what: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
            self.check(file)
            return original(what, file, *args, **kwargs)

        return save

    def check(self, path: Any, *, folder: int = -1) -> None:
        if isinstance(path, (str, bytes, os.PathLike)):
            name = _absolute(os.fsdecode(path), folder)
            if not is_passing(name) and self._is_old(name):
                with suppress(OSError):
                    self._probe.events.say(REFUSED, name)
                raise PermissionError(errno.EPERM, REFUSAL, name)

    def _is_old(self, name: str) -> bool:
        try:
            found = os.lstat(name)
        except (OSError, ValueError):
            return False
        return stat.S_ISREG(found.st_mode) and max(found.st_mtime, found.st_ctime) < self._since


def is_passing(name: str) -> bool:
    """Files that come and go: the system's, caches, locks, and all that is hidden."""
    if name.startswith(_SYSTEM) or name.endswith(".lock"):
        return True
    return any(part.startswith((".", *_PASSING)) for part in name.split(os.sep) if part not in (".", ".."))


def _absolute(name: str, folder: int) -> str:
    if folder >= 0 and not os.path.isabs(name):
        with suppress(OSError):
            name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
    return os.path.abspath(name)
