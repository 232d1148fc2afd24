"""Import hook, no-code attach: hooks torch when, and only when, a process imports it.

This file is run by path from a `sitecustomize` or a `.pth` line (watch/inject.py writes them), before the
program, in every Python process below `stoker watch`: pip, launchers and loader workers too. So it imports
next to nothing, and nothing of stoker until torch has been imported. It must never break its host.
"""

from __future__ import annotations

import os
import sys
from typing import Any

HANDLE = "_stoker_watch"  # in sys.modules: the hooks of this process, whichever stoker they came from
VARIABLE = "STOKER_WATCH"  # the run folder; set by `stoker watch` for what it starts

# Modules after whose import something is hooked; inside/hooks.py says what.
WANTED = frozenset(
    {
        "torch",
        "torch.autograd",
        "torch.distributed.checkpoint.state_dict_loader",
        "torch.distributed.checkpoint.state_dict_saver",
        "torch.distributed.distributed_c10d",
        "torch.optim.optimizer",
        "torch.utils.data.dataloader",
        "safetensors.torch",
    }
)


class Finder:
    """Stands first in sys.meta_path; leaves every import to the others and looks after the wanted ones."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # the importer's own types
        if name not in WANTED:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    if hasattr(spec.loader, "exec_module"):
                        spec.loader = _After(spec.loader, self._package)  # type: ignore[assignment]  # by its methods
                    return spec
        return None


class _After:
    """A module's own loader, and then our hooks. The module never sees it: its loader is put back first."""

    def __init__(self, loader: Any, package: str) -> None:  # any loader
        self._loader, self._package = loader, package

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec) if hasattr(self._loader, "create_module") else None

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        try:
            hooks = load(self._package)
            if hooks is not None:
                hooks.after_import(module)
        except Exception as error:  # whatever is wrong with us, the program goes on
            if os.environ.get(VARIABLE + "_DEBUG"):
                print(f"stoker watch: {module.__name__} not hooked: {error!r}", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def arm(package: str) -> None:
    """Hook torch when it is imported; `package` is the folder of the stoker that watches."""
    if os.environ.get(VARIABLE) and not any(type(finder).__name__ == "Finder" for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder(package))


def load(package: str) -> Any:
    """The hooks: of the environment's own stoker where that is the one that watches; else loaded by path and
    then taken out of sys.modules again, so that the program imports just what it would without us."""
    if HANDLE not in sys.modules:
        hooks = _import_hooks() if _place_of_own() == package else _import_aside(package)
        sys.modules[HANDLE] = hooks  # stoker.attach finds them there
    return sys.modules[HANDLE]


def _place_of_own() -> str:
    import importlib.util

    spec = importlib.util.find_spec("stoker")
    return os.path.dirname(spec.origin) if spec is not None and spec.origin else ""


def _import_hooks() -> Any:
    import importlib

    return importlib.import_module("stoker.watch.inside.hooks")


def _import_aside(package: str) -> Any:
    import importlib.util

    own = _take_out()
    place = os.path.join(package, "__init__.py")
    spec = importlib.util.spec_from_file_location("stoker", place, submodule_search_locations=[package])
    if spec is None or spec.loader is None:
        raise ImportError(place)
    module = sys.modules["stoker"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return _import_hooks()
    finally:
        _take_out()
        sys.modules.update(own)


def _take_out() -> dict[str, Any]:
    """Remove every module of a package named stoker; they live on through those who hold them."""
    names = [name for name in sys.modules if name.partition(".")[0] == "stoker"]
    return {name: sys.modules.pop(name) for name in names}
