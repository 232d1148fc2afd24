"""Process metrics: the job's trainers (main threads) and their loader workers, seen from outside."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from stoker.watch.gauges.kept import Kept, Rate

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_WORKER = "pt_data_worker"
_READS = {"rchar": "read", "syscr": "read_calls", "read_bytes": "disk"}  # the last one: not out of the cache
Readings = dict[str, float]


class Task:
    """One thread or process: its state, CPU time, run delay, and what it read."""

    def __init__(self, folder: Path, *, thread: bool = False, reads: bool = False) -> None:
        self._stat, self._sched = Kept(folder / "stat"), Kept(folder / "schedstat")
        self._io = Kept(folder / "io") if reads else None
        self._thread = thread
        self._rate = Rate()  # its own: what is known of a task goes with it, and a job has many in a month
        self.name = self.state = ""

    def counters(self) -> Readings:
        """Seconds and bytes so far; nothing of a task that is gone."""
        head, _, rest = self._stat.read().rpartition(")")
        fields = rest.split()
        self.name, self.state = head.partition("(")[2], fields[0] if fields else ""
        if len(fields) < 13:
            return {}
        found = {"cpu": (int(fields[11]) + int(fields[12])) * _TICK_S}
        sched = self._sched.read().split()
        if len(sched) == 3:
            found["delay"] = int(sched[1]) / 1e9
            if self._thread:  # of a process these are its first thread's alone
                found["cpu"] = int(sched[0]) / 1e9
        if self._io is not None:
            for line in self._io.read().split("\n")[:5]:
                name, _, value = line.partition(": ")
                if name in _READS:
                    found[_READS[name]] = int(value)
        return found

    def rates(self, t: float) -> Readings:
        """What it did since it was last asked, a second."""
        return self._rate.per_second(t, self.counters())

    def close(self) -> None:
        for one in (self._stat, self._sched, *filter(None, [self._io])):
            one.close()


class Tasks:
    """All trainers of this machine and their workers; `read` takes the trainers' pids as they are known."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._trainers: dict[int, tuple[Task, Task, Kept]] = {}
        self._workers: dict[int, Task] = {}

    def read(self, t: float, pids: Iterable[int]) -> Readings:
        self._follow(set(pids))
        main, whole, workers = {}, {}, {}
        for pid, (first, process, _) in list(self._trainers.items()):
            main[pid], whole[pid] = first.rates(t), process.rates(t)
        for pid, task in list(self._workers.items()):
            workers[pid] = task.rates(t)
        return {**self._trainer_columns(main, whole), **self._worker_columns(workers)}

    def close(self) -> None:
        for task in (*self._workers.values(), *(part for one in self._trainers.values() for part in one)):
            task.close()
        self._workers.clear()
        self._trainers.clear()

    def _follow(self, pids: set[int]) -> None:
        """Keep the files of those that live, open those of new ones, close those of the dead."""
        for pid in pids - self._trainers.keys():
            folder = self._proc / str(pid)
            self._trainers[pid] = (
                Task(folder / f"task/{pid}", thread=True),
                Task(folder, reads=True),
                Kept(folder / f"task/{pid}/children"),
            )
        for pid in self._trainers.keys() - pids:
            for part in self._trainers.pop(pid):
                part.close()
        self._follow_workers()

    def _follow_workers(self) -> None:
        """Workers are children of a trainer's main thread; torch gives them their name a moment later."""
        children = {int(pid) for *_, kept in self._trainers.values() for pid in kept.read().split()}
        for pid in children - self._workers.keys():
            task = Task(self._proc / str(pid), reads=True)
            task.counters()
            if task.name.startswith(_WORKER):
                self._workers[pid] = task
                continue
            task.close()
        for pid in self._workers.keys() - children:
            self._workers.pop(pid).close()

    def _trainer_columns(self, main: dict[int, Readings], whole: dict[int, Readings]) -> Readings:
        if not main:
            return {}
        states = [first.state for first, *_ in self._trainers.values()]
        return {
            "trainer_cpu": _mean(main.values(), "cpu"),
            "trainer_delay": _mean(main.values(), "delay"),
            "trainer_running": states.count("R") / len(states),
            "trainer_blocked": states.count("D") / len(states),
            "trainer_cores": sum(one.get("cpu", 0.0) for one in whole.values()),
            "trainer_disk": _mean(whole.values(), "disk") * len(whole),
        }

    def _worker_columns(self, workers: dict[int, Readings]) -> Readings:
        if not self._trainers:
            return {}
        states = [task.state for task in self._workers.values()]
        sums = {f"workers_{name}": 0.0 for name in ("cpu", "delay", "read", "read_calls", "disk")}
        for rates in workers.values():
            for name, rate in rates.items():
                sums[f"workers_{name}"] += rate
        counts = {"running": "R", "sleeping": "S", "blocked": "D"}
        return {
            "workers": len(workers),
            **{f"workers_{name}": states.count(letter) for name, letter in counts.items()},
            **sums,
        }


def _mean(rates: Iterable[Readings], name: str) -> float:
    known = [one[name] for one in rates if name in one]
    return sum(known) / len(known) if known else float("nan")
