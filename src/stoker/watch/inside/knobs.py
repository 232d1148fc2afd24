"""Settings from outside: a program's loader, threads and copies as a file says, with no change to it.

The file is one that `stoker tune` wrote: `tuned.json`, or one trial's. `stoker watch --apply` names it in the
environment; `stoker.apply` reads it in the program itself. Knobs that change results are in numerics.py.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.errors import BadInputError
from stoker.formats.small_json import parse_json
from stoker.watch.inside import numerics
from stoker.watch.inside.sites import is_at, site_of
from stoker.watch.inside.switch import Switch, unseen

if TYPE_CHECKING:
    from stoker.watch.inside.probe import Probe

VARIABLE = "STOKER_APPLY"
OF_LOADER = (
    "num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "multiprocessing_context",
)  # fmt: skip
_OF_WORKERS = {"prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None}
_NUMBER = "_stoker_number"  # of an iterator's loader, among those of the process
_LOSSES = 5
Failed = Callable[[Exception], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Knobs:
    """What to set: knobs by name, variables of the environment by theirs."""

    values: dict[str, Any] = field(default_factory=dict)  # plain JSON values
    site: dict[str, Any] = field(default_factory=dict)  # where the loader is built; none: every loader
    trial: float = 0.0  # of `stoker tune`: when it began, by the clock of files
    empty_at: int = 0  # batches of an epoch after which what the workers have ready is thrown away; 0: never

    @classmethod
    def read(cls, path: Path) -> Knobs:
        try:
            found = parse_json(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise BadInputError(
                f"{path} cannot be read: {error}", hint="give a file of `stoker tune`"
            ) from error
        knobs = found.get("knobs") if isinstance(found, dict) else None
        if not isinstance(knobs, dict):
            raise BadInputError(f"{path} holds no knobs", hint="give a file of `stoker tune`: tuned.json")
        return cls(
            values=knobs,
            site=found.get("site") or {},
            trial=float(found.get("trial") or 0.0),
            empty_at=int(found.get("empty_at") or 0),
        )

    @classmethod
    def from_environ(cls) -> Knobs | None:
        path = os.environ.get(VARIABLE)
        return cls.read(Path(path)) if path else None

    @property
    def environ(self) -> dict[str, str]:
        """Knobs that are variables: they are written in capitals, as those are."""
        return {name: str(value) for name, value in self.values.items() if name.isupper()}

    @property
    def loader(self) -> dict[str, Any]:
        return {name: self.values[name] for name in OF_LOADER if name in self.values}


def hook_knobs(probe: Probe, roots: Any, torch: Any) -> None:
    """Threads, copies and what changes results: once torch is there."""
    if (knobs := Knobs.from_environ()) is not None:
        set_torch(knobs, torch)
        probe.tell(threads=torch.get_num_threads())


def hook_loader_knobs(probe: Probe, roots: Any, module: Any) -> None:
    """DataLoaders as they are built, and which of them an iterator is of."""
    if (knobs := Knobs.from_environ()) is None:
        return
    built = Built(probe)
    set_loaders(module.DataLoader, knobs, failed=Switch(probe, "knobs").fail, built=built.add)
    iterator = module._BaseDataLoaderIter
    original = iterator.__init__

    @functools.wraps(original)
    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        setattr(self, _NUMBER, built.numbers.get(loader))
        original(self, loader, *args, **kwargs)

    iterator.__init__ = __init__
    if knobs.empty_at:
        iterator.__next__ = _emptied(iterator.__next__, Switch(probe, "queues"), knobs.empty_at)


def _emptied(following: Any, switch: Switch, at: int) -> Any:
    """The workers fill their queues while a program starts, and a loop then runs on that for as long as it
    lasts: thirty steps, say, of sixteen workers. A trial measures what they make: they begin anew in it."""
    done = False

    @functools.wraps(following)
    def __next__(self: Any) -> Any:
        nonlocal done
        try:
            ready = 0 if done or self._num_yielded != at else queued(self)
        except Exception as error:
            done, ready = True, 0
            switch.fail(error)
        if ready:
            done = True
            for _ in range(ready):
                following(self)
        return following(self)

    return __next__


def queued(iterator: Any) -> int:
    """Batches that the workers of an iterator keep ready at most; 0 where not even twice as many are left of
    its epoch, nor for what is no training: that is read without gradients."""
    ready = int(iterator._num_workers) * int(getattr(iterator, "_prefetch_factor", None) or 0)
    if not ready or not sys.modules["torch"].is_grad_enabled():
        return 0
    try:
        left = len(iterator._index_sampler) - int(iterator._num_yielded)
    except TypeError:  # an IterableDataset: nobody knows how much is left
        return 0
    return ready if left >= 2 * ready else 0


def hook_losses(probe: Probe, roots: Any, module: Any) -> None:
    """The first losses of a trial: settings that must not change results have the same ones."""
    knobs = Knobs.from_environ()
    if knobs is None or not knobs.trial:
        return
    original, switch, losses = module.backward, Switch(probe, "losses"), list[float]()

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if switch.on:
            try:
                first = tensors if hasattr(tensors, "detach") else next(iter(tensors))
                losses.append(float(first.detach().sum()))
                probe.tell(losses=losses)
                if len(losses) >= _LOSSES:
                    module.backward = original
            except Exception as error:
                switch.fail(error)
        return original(tensors, *args, **kwargs)

    module.backward = unseen(backward)


class Built:
    """The DataLoaders of this process, numbered as they were built."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._told: list[dict[str, Any]] = []
        self.numbers = weakref.WeakKeyDictionary[Any, int]()

    def add(self, loader: Any, site: dict[str, Any]) -> None:
        self.numbers[loader] = len(self._told)
        iterable = type(loader.dataset).__mro__
        self._told.append(
            {
                **site,
                "dataset": id(loader.dataset),
                "iterable": any(one.__name__ == "IterableDataset" for one in iterable),
                "length": _length(loader),
                "settings": {name: _plain(getattr(loader, name, None)) for name in OF_LOADER},
            }
        )
        self._probe.tell(loaders=self._told[:64])


def set_torch(knobs: Knobs, torch: Any) -> None:
    """What is set once for a process."""
    values = knobs.values
    if values.get("torch_threads"):
        torch.set_num_threads(int(values["torch_threads"]))
    if values.get("non_blocking"):
        for name in ("to", "cuda"):
            setattr(torch.Tensor, name, _not_blocking(getattr(torch.Tensor, name), cuda=name == "cuda"))
    numerics.set_numerics(values, torch)


def set_loaders(
    kind: Any, knobs: Knobs, *, failed: Failed, built: Callable[[Any, dict[str, Any]], None] | None = None
) -> None:
    """From now on a DataLoader that is built at the site has these settings."""
    original = kind.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        site: dict[str, Any] = {}
        try:
            site = site_of(sys._getframe(1))
            if knobs.loader and (not knobs.site or is_at(site, knobs.site)):
                bound = signature.bind(self, *args, **kwargs)
                bound.arguments.update(knobs.loader)
                _agree(bound.arguments)
                args, kwargs = bound.args[1:], bound.kwargs
        except Exception as error:
            failed(error)
        original(self, *args, **kwargs)
        if built is not None:
            try:
                built(self, site)
            except Exception as error:
                failed(error)

    kind.__init__ = __init__


def apply(path: str | os.PathLike[str] = "tuned.json") -> dict[str, Any]:
    """Use the settings that `stoker tune` found: call it before the DataLoader is built. Gives the knobs.

    Variables of the environment are set for what is started from now on; libraries that are loaded already
    do not look at them again. Under `stoker watch --apply` it does nothing: the settings stand."""
    knobs = Knobs.read(Path(path))
    if os.environ.get(VARIABLE):
        return dict(knobs.values)
    import torch
    from torch.utils.data import DataLoader

    os.environ.update(knobs.environ)
    set_torch(knobs, torch)
    set_loaders(DataLoader, knobs, failed=_raise)
    return dict(knobs.values)


def _raise(error: Exception) -> None:
    raise error


def _agree(arguments: dict[str, Any]) -> None:
    """Without workers there is nothing for them to be set to: torch refuses it."""
    if not arguments.get("num_workers"):
        arguments.update({name: none for name, none in _OF_WORKERS.items() if name in arguments})
        arguments.pop("timeout", None)


def _not_blocking(original: Any, *, cuda: bool) -> Any:
    """Copies from the host to a device do not wait; the other way they must: the host reads what came."""

    @functools.wraps(original)
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            tensor.device.type == "cpu"
            and "non_blocking" not in kwargs
            and (cuda or _to_device(args, kwargs))
        ):
            return original(tensor, *args, non_blocking=True, **kwargs)
        return original(tensor, *args, **kwargs)

    return unseen(call)


def _to_device(args: Any, kwargs: Any) -> bool:
    """`to` of a device alone, by name or as an object; not of a type nor of another tensor."""
    target = kwargs.get("device", args[0] if len(args) == 1 else None)
    return isinstance(target, (str, int)) or type(target).__name__ == "device"


def _length(loader: Any) -> int:
    """Batches of an epoch; 0 where nobody knows."""
    try:
        return len(loader)
    except Exception:  # an iterable one has none
        return 0


def _plain(value: Any) -> Any:
    return (
        value if value is None or isinstance(value, (bool, int, str)) else getattr(value, "_name", str(value))
    )
