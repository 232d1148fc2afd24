"""Code injection: boot.py into what `stoker watch` starts, by the environment, else by a `.pth`."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import stoker
from stoker.watch.inside import boot
from stoker.watch.runs.files import node_name

# Nothing wrong with stoker, nor a Python too old for it, keeps the program's own from being run.
_SITECUSTOMIZE = """\
# Written by `stoker watch`; removed when it ends.
try:
    import importlib.util as _util
    _spec = _util.spec_from_file_location("_stoker_boot", {boot!r})
    _boot = _util.module_from_spec(_spec)
    _spec.loader.exec_module(_boot)
    _boot.arm({package!r})
except Exception:
    pass


def _chain():
    # The sitecustomize that ours stands before; and no trace of our folder in sys.path.
    import sys
    from importlib.machinery import PathFinder
    from os.path import realpath

    sys.path[:] = [entry for entry in sys.path if realpath(entry) != {folder!r}]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


_chain()
"""

# Inert without the variable, so that other programs of the same environment see nothing of it. A .pth file
# runs single lines only.
_PTH = """\
if os.environ.get({variable!r}) and os.path.exists({boot!r}):
    space = dict(__name__="_stoker_boot", __file__={boot!r})
    exec(compile(open({boot!r}, encoding="utf-8").read(), {boot!r}, "exec"), space)
    space["arm"]({package!r})
"""

# How many collectives the flight recorder keeps: enough to see who is absent from which.
_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000"}


@contextmanager
def injected(command: Sequence[str], folder: Path, environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The environment in which the command's Python processes attach to the run folder."""
    place = _place(folder)
    place.mkdir(parents=True, exist_ok=True)
    text = _SITECUSTOMIZE.format(boot=boot.__file__, package=_package(), folder=str(place))
    (place / "sitecustomize.py").write_text(text, "utf-8")
    paths = [str(place), *filter(None, [environ.get("PYTHONPATH")])]
    pth = _write_pth(command) if is_isolated(command) else None
    try:
        yield {
            **_RECORDER,
            **environ,
            "PYTHONPATH": os.pathsep.join(paths),
            boot.VARIABLE: str(folder.absolute()),
        }
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if pth is not None:
            with suppress(OSError):
                pth.unlink()


def _place(folder: Path) -> Path:
    """Where our sitecustomize lies: in the run, as Python will spell it in sys.path; elsewhere where a path
    may not be spelled so in PYTHONPATH. Of this watcher alone: others of the run come and go meanwhile, and
    each takes its own away."""
    inside = folder.resolve() / f".attach-{node_name()}-{os.getpid()}"
    return Path(tempfile.mkdtemp(prefix="stoker-attach-")).resolve() if os.pathsep in str(inside) else inside


def is_isolated(command: Sequence[str]) -> bool:
    """Does this Python command ignore PYTHONPATH (-I, -E)?"""
    if not Path(command[0]).name.startswith(("python", "pypy")):
        return False
    for word in command[1:]:
        if not word.startswith("-") or word in ("-", "-c", "-m"):
            return False
        if not word.startswith("--") and set(word) & {"I", "E"}:
            return True
    return False


def not_attachable(command: Sequence[str]) -> str:
    """Why a command cannot be attached to, or nothing."""
    if is_isolated(command) and not os.access(_site_folder(command[0]), os.W_OK):
        return f"python -I ignores the environment, and {_site_folder(command[0])} is not writable for a .pth"
    return ""


def _write_pth(command: Sequence[str]) -> Path | None:
    folder = _site_folder(command[0])
    _remove_stale(folder)
    path = folder / f"stoker-watch-{node_name()}-{os.getpid()}.pth"
    try:
        code = _PTH.format(variable=boot.VARIABLE, boot=boot.__file__, package=_package())
        path.write_text(f"import os; exec({code!r})\n", "utf-8")
    except OSError:
        return None
    return path


def _remove_stale(folder: Path) -> None:
    """Those of this machine's watchers that were killed: nodes may share the folder."""
    for path in folder.glob(f"stoker-watch-{node_name()}-*.pth"):
        pid = path.stem.rpartition("-")[2]
        if not Path("/proc", pid).exists():
            with suppress(OSError):
                path.unlink()


def _site_folder(python: str) -> Path:
    asked = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    try:
        done = subprocess.run([python, "-I", "-c", asked], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):  # the command itself will say so
        return Path("/nonexistent")
    return Path(done.stdout.strip() or "/nonexistent")


def _package() -> str:
    return str(Path(stoker.__file__).parent)
