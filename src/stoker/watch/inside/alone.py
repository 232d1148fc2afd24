"""Loader alone: `stoker bench loader -- COMMAND` has the program's own DataLoader iterated with nothing else.

The training loop never gets its first batch: the iterator that it asks is emptied here for a while, a file
says what came, and the process waits to be ended. A trial is a process: nothing of it goes on afterwards.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.watch.inside.batches import batch_bytes, tokens_of
from stoker.watch.inside.boot import VARIABLE as FOLDER
from stoker.watch.inside.switch import Switch
from stoker.watch.runs.files import node_name, process_key, write_meta

if TYPE_CHECKING:
    from stoker.watch.inside.probe import Probe

VARIABLE = "STOKER_ALONE"  # what is asked for, as JSON
PREFIX = "alone-"  # of the files that answer
_LEAVES = 64
_LEAST_WARM_UPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Which loader, by its number among those of the process, and for how long."""

    number: int
    seconds: float
    most_batches: int = 0

    @classmethod
    def from_environ(cls) -> Asked | None:
        text = os.environ.get(VARIABLE)
        return cls(**json.loads(text)) if text else None

    @property
    def environ(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}


def hook_alone(probe: Probe, roots: Any, module: Any) -> None:
    """Before the loader's other hook: that is around this one and sees a batch that takes for ever."""
    if (asked := Asked.from_environ()) is None:
        return
    iterator, switch = module._BaseDataLoaderIter, Switch(probe, "loader alone")
    built, begin = iterator.__next__, iterator.__init__
    loaders: dict[int, tuple[Any, float]] = {}  # of an iterator: its loader, and when it was made

    @functools.wraps(begin)
    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        loaders[id(self)] = loader, time.monotonic()
        begin(self, loader, *args, **kwargs)

    @functools.wraps(built)
    def __next__(self: Any) -> Any:
        wanted = getattr(self, "_stoker_number", None) == asked.number and id(self) in loaders
        if wanted and switch.on:
            loader, made = loaders[id(self)]
            _answer(lambda: measure(loader, self, built, asked, made=made))
        return built(self)

    iterator.__init__, iterator.__next__ = __init__, __next__


def measure(
    loader: Any, iterator: Any, following: Callable[[Any], Any], asked: Asked, *, made: float
) -> dict[str, Any]:
    """Batches one after another, epoch after epoch, after as many as queues hold."""
    batches = _Batches(loader, iterator, following)
    first = batches.next()
    first_s = time.monotonic() - made
    queued = int(getattr(loader, "num_workers", 0) or 0) * int(getattr(loader, "prefetch_factor", 0) or 0)
    until = time.monotonic() + asked.seconds / 2
    for number in range(max(_LEAST_WARM_UPS, queued)):
        if number >= _LEAST_WARM_UPS and time.monotonic() > until:
            break
        batches.next()
    count, samples, tokens, read, epochs = 0, 0, 0, 0, batches.epochs
    began, cpu = time.monotonic(), batches.cpu_s()
    while time.monotonic() - began < asked.seconds and not 0 < asked.most_batches <= count:
        first = batches.next()
        count += 1
        samples += rows_of(first)
        tokens += max(0, tokens_of(first))
        read += batch_bytes(first)
    return {
        "workers": int(getattr(loader, "num_workers", 0) or 0),
        "first_s": first_s,
        "batches": count,
        "seconds": time.monotonic() - began,
        "samples": samples,
        "tokens": tokens,
        "bytes": read,
        "cpu_s": max(0.0, batches.cpu_s() - cpu),
        "memory_bytes": sum(pss_bytes(pid) for pid in batches.pids()),
        "epochs": batches.epochs - epochs,
    }


class _Batches:
    """An endless row of batches; a new iterator where the epoch is over."""

    def __init__(self, loader: Any, iterator: Any, following: Callable[[Any], Any]) -> None:
        self._loader, self._iterator, self._following = loader, iterator, following
        self._gone_cpu_s = 0.0  # of workers of epochs that are over
        self.epochs = 0

    def next(self) -> Any:
        try:
            return self._following(self._iterator)
        except StopIteration:
            self._renew()
        try:
            return self._following(self._iterator)
        except StopIteration:
            raise ValueError("the loader has no batches") from None

    def _renew(self) -> None:
        from torch.utils.data import DataLoader  # torch is there: this is a hook of it

        self.epochs += 1
        if not getattr(self._loader, "persistent_workers", False):
            self._gone_cpu_s += sum(map(cpu_of, self._workers()))
        self._iterator = DataLoader.__iter__(self._loader)

    def _workers(self) -> list[int]:
        return [one.pid for one in getattr(self._iterator, "_workers", ()) if one.pid]

    def pids(self) -> Iterable[int]:
        return os.getpid(), *self._workers()

    def cpu_s(self) -> float:
        return self._gone_cpu_s + time.process_time() + sum(map(cpu_of, self._workers()))


def rows_of(batch: Any) -> int:
    """Samples of a batch: the length of its first tensor; of none, that of the list."""
    todo = [batch]
    for _ in range(_LEAVES):
        if not todo:
            break
        one = todo.pop(0)
        shape = getattr(one, "shape", None)
        if shape:
            return int(shape[0])
        if hasattr(one, "keys"):
            todo += [one[key] for key in list(one.keys())[:_LEAVES]]
        elif isinstance(one, (list, tuple)):
            todo += one[:_LEAVES]
    return len(batch) if isinstance(batch, (list, tuple)) else 1


def cpu_of(pid: int) -> float:
    """Seconds that a process has computed; 0 of one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def pss_bytes(pid: int) -> int:
    """Proportional set size: what a process holds, its share of shared pages included."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


def _answer(measured: Callable[[], dict[str, Any]]) -> None:
    """Into a file, and then nothing any more: whoever asked ends this process."""
    try:
        told = measured()
    except Exception as error:  # the loader's own: a dataset that raises, a worker that died
        told = {"failure": f"{type(error).__name__}: {error}"}
    folder, key = Path(os.environ[FOLDER]), process_key(node_name(), os.getpid())
    with suppress(OSError):
        write_meta(folder / f"{PREFIX}{key}.json", told)
    while True:
        signal.pause()
