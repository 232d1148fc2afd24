"""Sampling thread beside the job: reads the machine and its cards at a steady rate into the run folder."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from stoker.watch.gauges.cards import Cards
from stoker.watch.gauges.host import Host
from stoker.watch.gauges.tasks import Tasks
from stoker.watch.runs.files import Rows

_LONGEST_S = 60.0  # between two tries of what fails again and again


class Sampler:
    """Samples until closed. What fails leaves a gap, is said once through `on_missing` and tried again."""

    def __init__(
        self,
        folder: Path,
        *,
        node: str,
        hz: float,
        cards: Cards | None,
        pids: Callable[[], Iterable[int]],
        on_missing: Callable[[str], None],
        on_trainer: Callable[[int], None] = lambda pid: None,
    ) -> None:
        self._folder, self._node, self._period_s = folder, node, 1 / hz
        self._host, self._tasks, self._cards, self._pids = Host(), Tasks(), cards, pids
        self._on_missing, self._on_trainer = on_missing, on_trainer
        self._followed = 0
        self._host_rows = Rows(folder / f"host-{node}.rows")
        self._card_rows: dict[int, Rows] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stoker-sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the last sample and stop; safe twice. A driver that hangs is left behind."""
        self._over.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        looks = {"host": self._sample_host, "gpu": self._sample_cards}
        failed: dict[
            str, tuple[float, float]
        ] = {}  # name → when it is tried again, and how long that was put off
        due = time.monotonic()
        while True:
            over = self._over.wait(max(0.0, due - time.monotonic()))
            due = max(due + self._period_s, time.monotonic())
            for name, look in looks.items():
                again_at, waited_s = failed.get(name, (0.0, self._period_s))
                if time.monotonic() < again_at:
                    continue
                try:
                    look(time.monotonic())
                except Exception as error:
                    failed[name] = (time.monotonic() + waited_s, min(2 * waited_s, _LONGEST_S))
                    if not again_at:
                        self._on_missing(f"{name} samples have gaps: {error!r}")
            if over:
                break
        self._release()

    def _sample_host(self, t: float) -> None:
        pids = list(self._pids())
        if pids and self._followed not in pids:
            self._follow(pids[0])
        self._host_rows.add(t, {**self._host.read(t), **self._tasks.read(t, pids)})

    def _follow(self, pid: int) -> None:
        """What limits the job is read of its first trainer: the watcher itself may be allowed more."""
        self._followed = pid
        with suppress(OSError):  # it has ended meanwhile
            self._host.follow(pid)
            self._on_trainer(pid)

    def _sample_cards(self, t: float) -> None:
        if self._cards is None:
            return
        for index, readings in self._cards.read(t).items():
            if index not in self._card_rows:
                self._card_rows[index] = Rows(self._folder / f"gpu-{self._node}-{index}.rows")
            self._card_rows[index].add(t, readings)

    def _release(self) -> None:
        for one in (self._host, self._tasks, self._cards, self._host_rows, *self._card_rows.values()):
            if one is not None:
                one.close()


def trainers(folder: Path, node: str) -> list[int]:
    """Processes of this machine that have attached to the run and still live: their files name them."""
    begin, end = f"proc-{node}-", ".json"
    names = [name for name in os.listdir(folder) if name.startswith(begin) and name.endswith(end)]
    pids = {int(name[len(begin) : -len(end)].partition("x")[0]) for name in names}
    return [pid for pid in sorted(pids) if os.path.exists(f"/proc/{pid}")]
